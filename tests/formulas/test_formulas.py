"""Closed forms against brute force, exact arithmetic, Monte Carlo and the simulator's own step counts."""

import math
import random
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest

from cbresearch import Request, SchedulerConfig, formulas, simulate
from cbresearch.config import ModelShape
from cbresearch.costs import Linear

OPT_13B = ModelShape(
    num_layers=40, num_heads=40, num_kv_heads=40, head_dim=128, num_parameters=13_000_000_000, dtype_bytes=2
)


def classic_lengths() -> list[int]:
    generator = random.Random(2024)
    return [generator.randint(4, 12) for _ in range(60)]


def random_workload(seed: int) -> tuple[list[int], list[int], int]:
    """Return random prompt lengths, output lengths and a number of slots."""
    generator = random.Random(seed)
    number, slots = generator.randint(1, 40), generator.randint(1, 9)
    prompts = [generator.randint(1, 30) for _ in range(number)]
    return prompts, [generator.randint(1, generator.choice((3, 25))) for _ in range(number)], slots


def run(prompts, outputs, slots, policy, cost):
    requests = [
        Request(id=str(place), prompt=prompt, max_tokens=output)
        for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return simulate(requests, policy, cost=cost, scheduler=SchedulerConfig(max_num_seqs=slots))


def list_schedule_by_steps(lengths: list[int], slots: int) -> tuple[int, list[int]]:
    """Return steps and the rows of each, by moving every slot one token at a time."""
    waiting, running, rows = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        rows.append(len(running))
        running = [left - 1 for left in running if left > 1]
    return len(rows), rows


@pytest.mark.parametrize("sample", [[7], [1, 2], [3, 3, 9], [5, 1, 5, 2], [0.5, 2.25, 2.5]])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_expected_max_is_the_mean_over_all_draws(sample, slots):
    draws = [max(draw) for draw in product(sample, repeat=slots)]
    assert formulas.expected_max(sample, slots) == pytest.approx(sum(draws) / len(draws), rel=1e-12)


def test_expected_max_of_one_slot_is_the_mean_and_of_many_the_maximum():
    lengths = classic_lengths()
    assert formulas.expected_max(lengths, 1) == pytest.approx(np.mean(lengths))
    assert formulas.expected_max(np.array(lengths), np.int64(10_000)) == pytest.approx(12)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (4, 12), (1, 200), (10, 11)])
@pytest.mark.parametrize("slots", [1, 2, 8, 256])
def test_uniform_form_equals_the_empirical_one_on_the_whole_range(low, high, slots):
    sample = np.arange(low, high + 1)
    assert formulas.expected_max_uniform(low, high, slots) == pytest.approx(
        formulas.expected_max(sample, slots)
    )


def test_uniform_4_to_12_in_8_slots_is_the_classic_number():
    expected = formulas.expected_max_uniform(4, 12, 8)
    assert expected == pytest.approx(11.4266, abs=5e-5)
    assert formulas.speed_up(8, expected) == pytest.approx(1.428, abs=5e-4)
    assert formulas.mean_occupancy_static(8, expected, 8) == pytest.approx(5.601, abs=5e-4)


@pytest.mark.parametrize("slots", [1, 2, 8, 64])
def test_exponential_and_geometric_forms_match_monte_carlo(slots):
    generator = np.random.default_rng(7)
    # The standard deviation of the maximum is at most 1.3 means, so four standard errors are about 2 %.
    exponential = generator.exponential(50, (60_000, slots)).max(axis=1).mean()
    assert formulas.expected_max_exponential(50, slots) == pytest.approx(exponential, rel=0.02)
    geometric = generator.geometric(0.1, (60_000, slots)).max(axis=1).mean()
    assert formulas.expected_max_geometric(0.1, slots) == pytest.approx(geometric, rel=0.02)


@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 10), Fraction(1, 200), Fraction(99, 100)])
@pytest.mark.parametrize("slots", [1, 2, 8, 64, 150])
def test_geometric_form_equals_the_alternating_sum_in_exact_arithmetic(p, slots):
    exact = sum(
        Fraction((-1) ** (k + 1) * math.comb(slots, k)) / (1 - (1 - p) ** k) for k in range(1, slots + 1)
    )
    assert formulas.expected_max_geometric(float(p), slots) == pytest.approx(float(exact), rel=1e-12)


def test_the_alternating_sum_in_floating_point_is_useless_where_the_geometric_form_is_not():
    p, slots = 0.1, 80
    naive = sum((-1) ** (k + 1) * math.comb(slots, k) / (1 - (1 - p) ** k) for k in range(1, slots + 1))
    assert abs(naive - formulas.expected_max_geometric(p, slots)) > 1000


@pytest.mark.parametrize("p", [1e-9, 0.99e-5, 1.01e-5, 1e-3, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("slots", [1, 3, 1000, 1_000_000])
def test_geometric_form_keeps_within_eisenbergs_bounds(p, slots):
    expected = formulas.expected_max_geometric(p, slots)
    exponential = formulas.expected_max_exponential(1 / -math.log1p(-p), slots) if p < 1 else 0.0
    assert exponential * (1 - 1e-9) <= expected <= (1 + exponential) * (1 + 1e-9)


@pytest.mark.parametrize("p", [1e-9, 0.999e-5, 1.001e-5, 1e-3, 0.5, 1.0])
def test_geometric_form_in_one_slot_is_the_mean(p):
    assert formulas.expected_max_geometric(p, 1) == pytest.approx(1 / p, rel=1e-9)


def test_static_speed_up_equals_expected_maximum_over_mean():
    lengths = classic_lengths()
    mean, expected = float(np.mean(lengths)), formulas.expected_max(lengths, 8)
    assert formulas.speed_up(mean, expected) == pytest.approx(expected / mean)
    assert formulas.speed_up(mean, expected) * formulas.static_utilization(mean, expected) == pytest.approx(1)


def test_constant_lengths_leave_nothing_to_gain():
    for slots in (1, 8, 200):
        assert formulas.speed_up(9, formulas.expected_max([9, 9, 9], slots)) == pytest.approx(1)
        assert formulas.finite_speed_up([9] * 50, slots) == 1


def test_speed_up_grows_with_the_slots():
    gains = [formulas.speed_up(8, formulas.expected_max_uniform(4, 12, slots)) for slots in range(1, 40)]
    assert gains[0] == pytest.approx(1)
    assert gains == sorted(set(gains))


def test_classic_workload_takes_91_static_and_69_continuous_steps():
    lengths = classic_lengths()
    assert sum(lengths) == 510
    assert formulas.static_steps(lengths, 8) == 91
    assert formulas.continuous_steps(lengths, 8) == 69
    assert formulas.finite_speed_up(lengths, 8) == pytest.approx(1.319, abs=5e-4)
    assert formulas.graham_bounds(lengths, 8) == (63.75, 74.25)


@pytest.mark.parametrize("seed", range(40))
def test_continuous_steps_equal_moving_every_slot_a_token_at_a_time(seed):
    _, lengths, slots = random_workload(seed)
    steps, rows = list_schedule_by_steps(lengths, slots)
    assert formulas.continuous_steps(lengths, slots) == steps
    assert formulas.continuous_seconds(lengths, slots, 0.5, 0.25) == pytest.approx(
        sum(0.5 + 0.25 * number for number in rows)
    )


@pytest.mark.parametrize("seed", range(40))
def test_continuous_steps_lie_within_grahams_bounds(seed):
    _, lengths, slots = random_workload(seed)
    low, high = formulas.graham_bounds(lengths, slots)
    assert low <= formulas.continuous_steps(lengths, slots) <= high + 1e-9


def test_grahams_bounds_hold_in_every_order_and_the_upper_one_is_reached():
    low, high = formulas.graham_bounds([1, 1, 1, 1, 1, 1, 3], 3)
    steps = {formulas.continuous_steps(order, 3) for order in permutations([1, 1, 1, 1, 1, 1, 3])}
    assert (min(steps), max(steps)) == (low, high) == (3, 5)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("policy", ["static", "static:release", "fcfs"])
def test_simulator_takes_the_predicted_steps(seed, policy):
    prompts, outputs, slots = random_workload(seed)
    trace = run(prompts, outputs, slots, policy, Linear(step=1.0))
    predicted = formulas.continuous_steps if policy == "fcfs" else formulas.static_steps
    assert len(trace.steps) == predicted(outputs, slots)


@pytest.mark.parametrize("seed", range(30))
def test_simulator_takes_the_predicted_seconds_when_rows_cost_time(seed):
    _, outputs, slots = random_workload(seed)
    prompts = [1] * len(outputs)
    seconds = {
        policy: run(prompts, outputs, slots, policy, Linear(step=0.03, token=0.002)).duration
        for policy in ("static", "static:release", "fcfs")
    }
    cost = (outputs, slots, 0.03, 0.002)
    assert seconds["static"] == pytest.approx(formulas.static_seconds(*cost, padded=True))
    assert seconds["static:release"] == pytest.approx(formulas.static_seconds(*cost, padded=False))
    assert seconds["fcfs"] == pytest.approx(formulas.continuous_seconds(*cost))
    for policy, padded in (("static", True), ("static:release", False)):
        assert formulas.finite_speed_up(*cost, padded=padded) == pytest.approx(
            seconds[policy] / seconds["fcfs"]
        )


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("t0", "t1"), [(1.0, 0.0), (1.0, 0.05), (0.2, 1.0), (0.0, 1.0)])
def test_long_workload_approaches_the_endless_queue(padded, t0, t1):
    lengths = np.random.default_rng(3).geometric(0.02, 40_000)
    endless = formulas.speed_up_with_step_cost(
        float(lengths.mean()), formulas.expected_max(lengths, 16), 16, t0, t1, padded=padded
    )
    assert formulas.finite_speed_up(lengths, 16, t0, t1, padded=padded) == pytest.approx(endless, rel=0.02)


def test_costly_rows_take_the_gain_away_from_released_batches_only():
    mean, expected = 8, formulas.expected_max_uniform(4, 12, 8)
    costs = (0.0, 0.01, 0.1, 1.0, 1e6)
    released = [formulas.speed_up_with_step_cost(mean, expected, 8, 1.0, t1, padded=False) for t1 in costs]
    padded = [formulas.speed_up_with_step_cost(mean, expected, 8, 1.0, t1, padded=True) for t1 in costs]
    assert released == sorted(released, reverse=True)
    assert released[0] == pytest.approx(expected / mean)
    assert released[-1] == pytest.approx(1, abs=1e-5)
    assert padded == pytest.approx([expected / mean] * len(costs))


def test_released_form_is_the_one_of_the_reference():
    mean, expected, slots, t0, t1 = 8.0, 11.4266, 8, 0.03, 0.002
    reference = (t0 * expected + t1 * slots * mean) / ((t0 + t1 * slots) * mean)
    given = formulas.speed_up_with_step_cost(mean, expected, slots, t0, t1, padded=False)
    assert given == pytest.approx(reference, rel=1e-12)


def test_flop_utilization_of_a_run_at_the_peak_is_one():
    lengths = [3, 5, 12]
    seconds = sum(lengths) * 2e9 / 1e12
    assert formulas.flop_utilization(lengths, 2e9, 1e12, seconds) == pytest.approx(1)
    assert formulas.flop_utilization(lengths, 2e9, 1e12, 4 * seconds) == pytest.approx(0.25)


def test_throughput_and_littles_law_are_products():
    assert formulas.throughput_decode(8, 0.02) == pytest.approx(400)
    assert formulas.occupancy_by_littles_law(2.5, 4) == 10


def test_kv_bytes_are_those_of_the_vllm_paper():
    assert formulas.kv_bytes_per_token(OPT_13B) == 800 * 1024
    assert formulas.kv_bytes_per_request(OPT_13B, 2048) == pytest.approx(1.6e9, rel=0.05)
    slots = formulas.num_requests_that_fit(12 * 2**30, formulas.kv_bytes_per_token(OPT_13B))
    assert slots == pytest.approx(15_700, rel=0.005)
    assert formulas.weight_bytes(OPT_13B) == 26_000_000_000


def test_grouped_queries_shrink_the_kv_cache_by_the_group():
    shape = ModelShape(num_layers=4, num_heads=12, num_kv_heads=3, head_dim=8, num_parameters=1000)
    every = ModelShape(num_layers=4, num_heads=12, num_kv_heads=12, head_dim=8, num_parameters=1000)
    assert formulas.kv_bytes_per_token(every) == 4 * formulas.kv_bytes_per_token(shape)


@pytest.mark.parametrize(("tokens", "held"), [(1, 16), (16, 16), (17, 32), (32, 32)])
def test_a_request_holds_whole_blocks(tokens, held):
    assert formulas.kv_bytes_per_request(OPT_13B, tokens, 16) == held * formulas.kv_bytes_per_token(OPT_13B)
    assert formulas.kv_bytes_per_request(OPT_13B, tokens, 1) == formulas.kv_bytes_per_request(OPT_13B, tokens)


@pytest.mark.parametrize(
    ("capacity", "per_request", "reserved", "fit"),
    [(100, 30, 0, 3), (90, 30, 0, 3), (100, 30, 71, 0), (10, 30, 50, 0)],
)
def test_requests_that_fit_are_counted_whole(capacity, per_request, reserved, fit):
    assert formulas.num_requests_that_fit(capacity, per_request, reserved) == fit


def test_flops_count_a_multiplication_and_an_addition_per_weight_and_attended_element():
    shape = ModelShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=5000)
    assert formulas.flops_per_token(shape, 0) == 10_000
    scores = values = 2 * 4 * 8 * 100
    assert formulas.flops_per_token(shape, 100) == 10_000 + 3 * (scores + values)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_paged_fragmentation_is_exact_when_lengths_fill_the_blocks_evenly(block_size):
    held = np.arange(block_size * 3 + 1, block_size * 9 + 1)
    blocks = -(-held // block_size) * block_size
    assert formulas.paged_fragmentation(float(held.mean()), block_size) == pytest.approx(
        formulas.fragmentation(held.sum(), blocks.sum())
    )


def test_paged_fragmentation_of_457_tokens_in_blocks_of_16_is_1_6_percent():
    assert formulas.paged_fragmentation(457, 16) == pytest.approx(0.016, abs=5e-4)


def test_fragmentation_of_no_memory_is_undefined():
    assert formulas.fragmentation(0, 0) is None
    assert formulas.fragmentation(0, 16) == 1
    assert formulas.fragmentation(16, 16) == 0


@pytest.mark.parametrize("seed", range(20))
def test_running_requests_hold_half_a_token_less_than_the_time_mean(seed):
    prompts, outputs, slots = random_workload(seed)
    trace = run(prompts, outputs, slots, "fcfs", Linear(step=1.0))
    held = sum(step.num_held_tokens for step in trace.steps) / sum(step.num_running for step in trace.steps)
    assert formulas.time_mean_held_tokens(prompts, outputs) - 0.5 == pytest.approx(held)


def test_time_mean_is_length_biased():
    # The long request is there nine times as long, so it counts nine times as much.
    assert formulas.time_mean_held_tokens([100, 1], [9, 1]) == pytest.approx(
        (9 * (100 + 4.5) + 1 * (1 + 0.5)) / 10
    )


def test_numbers_from_numpy_give_plain_numbers():
    mean, expected = np.float64(8), np.float64(11.4266)
    results = [
        formulas.static_utilization(mean, expected),
        formulas.speed_up_with_step_cost(mean, expected, np.int64(8), mean, mean, padded=False),
        formulas.flop_utilization(np.arange(1, 9), mean, mean, mean),
        formulas.static_seconds(np.arange(1, 9), 8, mean, mean, padded=True),
        formulas.continuous_seconds(np.arange(1, 9), 8, mean, mean),
        formulas.expected_max_exponential(mean, 8),
        formulas.throughput_decode(mean, mean),
        formulas.occupancy_by_littles_law(mean, mean),
        formulas.flops_per_token(OPT_13B, mean),
        formulas.paged_fragmentation(mean, 16),
        formulas.fragmentation(mean, expected),
    ]
    assert {type(result) for result in results} == {float}


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: formulas.expected_max([], 8), r"lengths has shape \(0,\)"),
        (lambda: formulas.expected_max([[1, 2]], 8), r"lengths has shape \(1, 2\)"),
        (lambda: formulas.expected_max([4, 0], 8), "lengths holds 0.0"),
        (lambda: formulas.expected_max([4, -2], 8), "lengths holds -2.0"),
        (lambda: formulas.expected_max([4, math.nan], 8), "lengths holds nan"),
        (lambda: formulas.expected_max([4], 0), "num_slots is 0"),
        (lambda: formulas.expected_max([4], 1.5), "num_slots is 1.5"),
        (lambda: formulas.expected_max([4], True), "num_slots is True"),
        (lambda: formulas.expected_max_uniform(0, 3, 8), "low is 0"),
        (lambda: formulas.expected_max_uniform(5, 3, 8), "high is 3, below low 5"),
        (lambda: formulas.expected_max_exponential(-1, 8), "mean is -1"),
        (lambda: formulas.expected_max_geometric(0, 8), "p is 0"),
        (lambda: formulas.expected_max_geometric(1.5, 8), "p is 1.5"),
        (lambda: formulas.expected_max_geometric(math.nan, 8), "p is nan"),
        (lambda: formulas.static_utilization(0, 3), "mean_length is 0"),
        (lambda: formulas.speed_up(11, 8), "expected_maximum is 8, below mean_length 11"),
        (lambda: formulas.mean_occupancy_static(8, 11, -1), "num_slots is -1"),
        (lambda: formulas.flop_utilization([4], 1, 0, 1), "peak_flops is 0"),
        (lambda: formulas.flop_utilization([4], 1, 1, math.inf), "seconds is inf"),
        (lambda: formulas.speed_up_with_step_cost(8, 11, 8, 0, 0, padded=True), "t0 and t1 are both 0"),
        (lambda: formulas.speed_up_with_step_cost(8, 11, 8, 1, -2, padded=False), "t1 is -2"),
        (lambda: formulas.speed_up_with_step_cost(8, 11, 0, 1, 0, padded=True), "num_slots is 0"),
        (lambda: formulas.static_steps([], 8), r"lengths has shape \(0,\)"),
        (lambda: formulas.static_steps([4, 2.5], 8), "lengths holds 2.5"),
        (lambda: formulas.continuous_steps([4], 0), "num_slots is 0"),
        (lambda: formulas.graham_bounds([4], 0), "num_slots is 0"),
        (lambda: formulas.static_seconds([4], 8, -1, padded=True), "t0 is -1"),
        (lambda: formulas.continuous_seconds([4], 8, math.nan), "t0 is nan"),
        (lambda: formulas.throughput_decode(8, 0), "step_seconds is 0"),
        (lambda: formulas.occupancy_by_littles_law(-1, 2), "rate is -1"),
        (lambda: formulas.kv_bytes_per_request(OPT_13B, 0), "num_tokens is 0"),
        (lambda: formulas.kv_bytes_per_request(OPT_13B, 5, 0), "block_size is 0"),
        (lambda: formulas.num_requests_that_fit(10, 0), "per_request is 0"),
        (lambda: formulas.num_requests_that_fit(10, 1, -5), "reserved is -5"),
        (lambda: formulas.flops_per_token(OPT_13B, -1), "context_length is -1"),
        (lambda: formulas.paged_fragmentation(0, 16), "mean_held is 0"),
        (lambda: formulas.fragmentation(17, 16), "valid is 17, above capacity 16"),
        (lambda: formulas.time_mean_held_tokens([1, 2], [3]), "prompts has 2 values, but outputs has 1"),
        (lambda: formulas.time_mean_held_tokens([1, -2], [3, 4]), "prompts holds -2.0"),
    ],
)
def test_bad_input_is_rejected_with_its_name_and_value(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


@pytest.mark.parametrize(("wait", "attainment"), [(0.0, 0.98), (3.0, 0.97), (8.0, 0.99)])
def test_at_the_light_load_rate_the_missing_share_waits_too_long_for_one_seat(wait, attainment):
    rng = np.random.default_rng(0)
    services = rng.integers(1, 20, 40_000)
    rate = formulas.light_load_rate(services, wait, attainment)
    arrivals, end, num_late = np.cumsum(rng.exponential(1 / rate, len(services))), 0.0, 0
    for arrival, service in zip(arrivals, services, strict=True):
        num_late += end - arrival > wait
        end = max(end, arrival) + service
    # Those who find a queue are left out of the formula: it is good to first order.
    assert num_late / len(services) == pytest.approx(1 - attainment, rel=0.2)


def test_light_load_rates_of_fixed_services():
    assert formulas.light_load_rate([10.0], 2.0, 0.9) == pytest.approx(0.1 / 8)
    assert formulas.light_load_rate([10.0, 1.0], 2.0, 0.9) == pytest.approx(0.1 / 4)
    assert formulas.light_load_rate([10.0], 10.0, 0.9) == math.inf
    for attainment in (0, 1, math.nan):
        with pytest.raises(ValueError, match="attainment is"):
            formulas.light_load_rate([10.0], 2.0, attainment)


def test_a_million_tokens_cost_the_hours_that_they_take():
    for price, rate in ((0.0, 5.0), (2.5, 277.0), (98.32, 30_000.0)):
        hours = Fraction(10**6) / Fraction(rate) / 3600
        assert formulas.cost_per_million_tokens(price, rate) == pytest.approx(float(Fraction(price) * hours))
    # An hour at a million tokens an hour costs just its price.
    assert formulas.cost_per_million_tokens(4.0, 1e6 / 3600) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="tokens_per_second is 0"):
        formulas.cost_per_million_tokens(1.0, 0.0)
    with pytest.raises(ValueError, match="price_per_hour is -1"):
        formulas.cost_per_million_tokens(-1.0, 1.0)
