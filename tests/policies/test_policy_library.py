"""The published policies against what is proven or published about them, by oracles that share no code."""

import ast
import inspect
import itertools
import random
import statistics
from functools import cache
from types import SimpleNamespace

import pytest

from cbresearch import CacheConfig, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.costs import Linear
from cbresearch.policies.memory import PastFuture
from cbresearch.policies.servers import Orca
from cbresearch.policies.size import fits_until_each_end
from cbresearch.request import RequestState
from cbresearch.step import StepResult

EVERY = tuple(policies.available())
ENDLESS = 10**9


def run(requests, policy, *, seats=8, budget=10_000, num_blocks=10_000, block_size=1, cost=None, **options):
    caching, host = options.pop("prefix_caching", False), options.pop("num_host_blocks", 0)
    return simulate(
        requests,
        policy,
        cost=cost or Linear(1.0),
        scheduler=SchedulerConfig(seats, budget, **options),
        cache=CacheConfig(num_blocks, block_size, caching, host),
    )


def one_slot(requests, policy):
    """Serve on one slot with a second a token; a preemption costs nothing, since a step takes any prompt."""
    return run(requests, policy, seats=1, max_preemptions=ENDLESS)


def preemptions(trace):
    return [name for step in trace.steps for name in step.plan.preempted]


def admitted(trace):
    return [admission.request.id for step in trace.steps for admission in step.plan.admitted]


def served(trace):
    return ["".join(entry.request_id for entry in step.plan.scheduled) for step in trace.steps]


def finishes(trace):
    return {record.id: record.finish for record in trace.requests}


def jobs(seed, number, longest, horizon):
    """Draw jobs of whole seconds whose predicted length is the truth."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, longest) for _ in range(number)]
    return [
        Request(
            str(place),
            1,
            length,
            arrival=float(draw.randint(0, horizon)),
            predicted_output=length,
            client="ab"[place % 2],
            priority=draw.randint(0, 2),
        )
        for place, length in enumerate(lengths)
    ]


# --- the table


def test_table_names_rule_family_and_source_of_each_policy():
    table = policies.table()
    assert set(table) == set(policies.available())
    assert {entry.family for entry in table.values()} == {
        "batching",
        "size",
        "memory",
        "fairness",
        "slo",
        "locality",
    }
    for name, entry in table.items():
        assert entry.source, f"{name} names no source"
        assert entry.rule == policies.available()[name]
        assert entry.rule.endswith("."), name


def test_table_tells_policies_apart_by_their_rules():
    assert len(set(policies.available().values())) == len(EVERY)


def test_table_has_no_source_for_an_own_policy_that_names_none(monkeypatch):
    monkeypatch.setattr(policies, "_REGISTRY", dict(policies._REGISTRY))

    @policies.register
    class Mine(policies.Ranked):
        """Do as I say."""

        name = "mine"

    assert policies.table()["mine"] == ("Do as I say.", "batching", "")


def code_lines(policy):
    """Count a class's lines without docstrings and blank lines."""
    source = inspect.getsource(policy)
    tree = ast.parse(source)
    texts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and place not in texts for place, line in lines)


def test_policy_classes_have_few_lines():
    sizes = {policy: code_lines(policy) for policy in {type(policies.get(name)) for name in EVERY}}
    assert max(sizes.values()) < 30, sizes
    assert statistics.median(sizes.values()) < 15, sizes


@pytest.mark.parametrize("policy", EVERY)
def test_every_policy_object_begins_each_run_anew(policy):
    built = policies.get(policy)
    requests = jobs(3, 12, 9, 20)
    first, second = (run(requests, built, seats=2, num_blocks=14) for _ in range(2))
    assert second.steps == first.steps
    assert second.steps == run(requests, policy, seats=2, num_blocks=14).steps


# --- size


@pytest.mark.parametrize("seed", range(8))
def test_sjf_minimizes_the_mean_completion_of_a_batch_on_one_slot(seed):
    requests = jobs(seed, 6, 9, 0)
    lengths = [request.max_tokens for request in requests]
    best = min(statistics.mean(itertools.accumulate(order)) for order in itertools.permutations(lengths))
    assert statistics.mean(finishes(one_slot(requests, "sjf")).values()) == best


def test_srpt_has_the_least_mean_latency_of_all_policies_on_one_slot():
    excess = dict.fromkeys(EVERY, 0.0)
    for seed in range(15):
        requests = jobs(seed, 12, 15, 40)
        mean = {
            name: statistics.mean(record.latency for record in one_slot(requests, name).requests)
            for name in EVERY
        }
        for name in EVERY:
            assert mean["srpt"] <= mean[name], (seed, name)
            excess[name] += mean[name] - mean["srpt"]
    # The bound is no triviality: the others are not all optimal.
    assert sum(value > 0 for value in excess.values()) > len(EVERY) / 2
    assert excess["sjf"] > 0


def least_total_latency(requests):
    """Search all preemptive schedules of unit steps on one slot."""
    arrivals = [int(request.arrival) for request in requests]

    @cache
    def search(now, left):
        here = [place for place, rest in enumerate(left) if rest and arrivals[place] <= now]
        if not any(left):
            return 0
        if not here:
            return search(now + 1, left)
        return min(
            (now + 1 - arrivals[place] if left[place] == 1 else 0)
            + search(now + 1, (*left[:place], left[place] - 1, *left[place + 1 :]))
            for place in here
        )

    return search(0, tuple(request.max_tokens for request in requests))


@pytest.mark.parametrize("seed", range(10))
def test_srpt_is_as_good_as_the_best_of_all_schedules(seed):
    requests = jobs(seed, 5, 5, 8)
    trace = one_slot(requests, "srpt")
    assert sum(record.latency for record in trace.requests) == least_total_latency(requests)


def test_srpt_preempts_only_for_strictly_less_that_is_left():
    for shorter, expected in ((6, 0), (5, 1)):
        requests = [Request("long", 1, 9), Request("short", 1, shorter, arrival=3.0)]
        assert len(preemptions(one_slot(requests, "srpt"))) == expected


def start_of_the_long_one(policy, num_short):
    requests = [
        Request("first", 1, 2),
        Request("long", 1, 20),
        *(Request(str(place), 1, 2, arrival=2.0 * place) for place in range(num_short)),
    ]
    trace = one_slot(requests, policy)
    return trace.requests[1].first_scheduled


def test_hrrn_bounds_the_wait_that_sjf_does_not():
    waits = {
        name: [start_of_the_long_one(name, number) for number in (50, 100, 200)] for name in ("sjf", "hrrn")
    }
    # Under sjf the long one waits for the whole stream, however long it is.
    assert waits["sjf"] == [102.0, 202.0, 402.0]
    # Under hrrn it overtakes a new request as soon as it has waited longer for its size.
    assert len(set(waits["hrrn"])) == 1
    assert waits["hrrn"][0] <= 50


def test_hrrn_admits_the_highest_response_ratio():
    # At time 4 the ratios are (4 + 8)/8 = 1.5 for a and (1 + 3)/3 = 1.33 for b, at time 9 (9 + 8)/8 and more.
    requests = [Request("x", 1, 4), Request("a", 1, 8), Request("b", 1, 3, arrival=3.0)]
    assert admitted(one_slot(requests, "hrrn")) == ["x", "a", "b"]
    # With a second of arrival more b is ahead: (2 + 3)/3 = 1.67.
    requests[2] = Request("b", 1, 3, arrival=2.0)
    assert admitted(one_slot(requests, "hrrn")) == ["x", "b", "a"]


def test_rank_promotes_starving_requests_in_order_of_arrival():
    requests = [
        Request("x", 1, 10),
        Request("long", 1, 30, arrival=1.0),
        Request("longer", 1, 40, arrival=0.5),
        Request("short", 1, 2, arrival=2.0),
    ]
    assert admitted(one_slot(requests, "rank")) == ["x", "short", "long", "longer"]
    # At second 10 the longest of all has waited for 9.5 seconds, and at its end all have waited for long.
    assert admitted(one_slot(requests, "rank:starvation=9.2")) == ["x", "longer", "long", "short"]
    assert admitted(one_slot(requests, "rank:starvation=11.2")) == ["x", "short", "longer", "long"]


@pytest.mark.parametrize("arrival", range(1, 9))
def test_trail_displaces_a_request_only_while_it_is_young(arrival):
    requests = [Request("long", 1, 10), Request("short", 1, 1, arrival=float(arrival))]
    trace = one_slot(requests, "trail:c=0.5")
    # As many tokens as seconds were generated by then.
    assert preemptions(trace) == (["long"] if arrival < 5 else [])
    assert preemptions(one_slot(requests, "srpt")) == ["long"]


def test_mlfq_demotes_a_request_at_its_quantum_and_a_new_one_displaces_it():
    requests = [Request("a", 1, 20), Request("b", 1, 20, arrival=2.0)]
    trace = one_slot(requests, "mlfq:levels=3,quantum=4,aging=1000")
    # Quanta are 4, 8 and without end; a prompt that is computed again counts as service.
    order = "".join(served(trace))
    assert order[:8] == "aaaabbbb"
    # Both are at the second level, a came first. Its 5 tokens so far are computed again at once: 5 + 3 = 8.
    assert order[8:12] == "aaaa"
    # b has as many.
    assert order[12:16] == "bbbb"
    # At the last level the first to get there stays to its end.
    assert order[16:] == "a" * 12 + "b" * 12


@pytest.mark.parametrize(
    ("prompt", "level"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (16, 2), (17, 2), (99, 2)]
)
def test_mlfq_enters_a_long_prompt_below_the_levels_that_it_would_use_up(prompt, level):
    policy = policies.get("mlfq:levels=3,quantum=4")
    scheduler = Scheduler(policy, SchedulerConfig(1, 100), CacheConfig(200, 1))
    scheduler.submit(Request("first", 1, 9))
    scheduler.submit(Request("asked", prompt, 1))
    view = SimpleNamespace(now=0.0)
    assert [int(policy.rank(view, state)) for state in scheduler.waiting] == [0, level]


def test_mlfq_promotes_a_request_that_has_waited_long():
    requests = [Request("long", 40, 3), *(Request(str(n), 1, 3, arrival=3.0 * n) for n in range(30))]
    start = {
        aging: one_slot(requests, f"mlfq:quantum=8,aging={aging}").requests[0].first_scheduled
        for aging in (10, 40, 1000)
    }
    assert start[1000] == 90.0
    assert start[10] < start[40] < 90.0


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_mc_sf_admits_as_a_simulation_of_the_memory_to_come_says(block_size):
    draw = random.Random(block_size)
    verdicts = []
    for _ in range(300):
        held = [(draw.randint(1, 40), draw.randint(1, 30)) for _ in range(draw.randint(1, 6))]
        peak = 0
        for step in range(1, 31):
            # A request that still generates holds the KV of all tokens but the one that comes out.
            blocks = [-(-(tokens - 1 + step) // block_size) for tokens, left in held if left >= step]
            peak = max(peak, sum(blocks))
        num_blocks = peak + draw.randint(-1, 1)
        states = [SimpleNamespace(num_tokens=tokens, predicted_remaining=left) for tokens, left in held]
        view = SimpleNamespace(block_size=block_size, num_blocks=num_blocks)
        verdicts.append(fits_until_each_end(view, states))
        assert verdicts[-1] == (peak <= num_blocks)
    assert {True, False} == set(verdicts)


def memory_bound(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(2, 20) for _ in range(25)]
    return [
        Request(
            str(n), draw.randint(1, 15), length, arrival=float(draw.randint(0, 60)), predicted_output=length
        )
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("policy", ["mc_sf", "no_evict", "orca", "orca:reserve=oracle"])
def test_policies_that_reserve_by_true_lengths_never_preempt(policy):
    others = 0
    for seed in range(10):
        for block_size in (1, 4):
            requests = memory_bound(seed)
            limits = {"num_blocks": 60 // block_size, "block_size": block_size}
            assert not preemptions(run(requests, policy, **limits))
            others += len(preemptions(run(requests, "max_utilization", **limits)))
    assert others > 50


# --- memory


def test_past_future_foresees_the_peak_that_a_simulation_finds():
    policy = PastFuture()
    policy.begin()
    draw = random.Random(0)
    for _ in range(200):
        states = []
        for place in range(draw.randint(1, 7)):
            state = RequestState(Request(str(place), draw.randint(1, 40), draw.randint(2, 30)), place)
            state.output_token_ids = [0] * draw.randint(0, state.max_tokens - 1)
            state.num_tokens += state.num_output_tokens
            states.append(state)
        peak = 0
        for step in range(1, 31):
            holding = [
                state.num_tokens + step
                for state in states
                if state.max_tokens - state.num_output_tokens >= step
            ]
            peak = max(peak, sum(holding))
        assert policy.peak(states) == peak


def test_past_future_expects_the_mean_of_the_past_outputs_that_were_longer():
    policy = PastFuture(history=3)
    policy.begin()
    asked = RequestState(Request("asked", 1, 100), 0)
    assert policy.left(asked) == 100
    for length in (50, 4, 10, 16):
        past = RequestState(Request("past", 1, length), 1)
        past.output_token_ids = [0] * length
        policy.served(past, 1)
        assert policy.left(asked) == 100, "an unfinished output is no past"
        past.finish_reason = "length"
    for length in (50, 4, 10, 16):
        past = RequestState(Request("past", 1, length), 1)
        past.output_token_ids, past.finish_reason = [0] * length, "length"
        policy.served(past, 1)
    # The last three are remembered: 4, 10 and 16.
    assert policy.left(asked) == 10
    asked.output_token_ids = [0] * 5
    assert policy.left(asked) == 13 - 5
    asked.output_token_ids = [0] * 20
    assert policy.left(asked) == 80


def test_past_future_admits_more_once_it_has_seen_that_outputs_end_early():
    early = [Request(f"old {n}", 2, 40, output_length=4) for n in range(4)]
    later = [Request(f"new {n}", 2, 40, arrival=100.0, output_length=4) for n in range(8)]
    trace = run([*early, *later], "past_future", num_blocks=100)
    first = [len(step.plan.scheduled) for step in trace.steps if step.start < 50]
    second = [len(step.plan.scheduled) for step in trace.steps if step.start > 50]
    # Two of 42 tokens fit below 95; of those expected to take 2 + 4 each all eight do.
    assert (max(first), max(second)) == (2, 8)


def test_no_evict_never_preempts_whatever_comes():
    for seed, mode in itertools.product(range(20), ("recompute", "swap")):
        draw = random.Random(seed)
        requests = [
            Request(str(n), draw.randint(1, 30), draw.randint(1, 30), arrival=draw.random() * 40)
            for n in range(20)
        ]
        block_size = draw.choice((1, 4, 16))
        limits = {"num_blocks": -(-60 // block_size) + draw.randint(0, 3), "block_size": block_size}
        trace = run(requests, "no_evict", preemption=mode, num_host_blocks=20 * (mode == "swap"), **limits)
        assert not preemptions(trace)
        assert all(record.finish_reason for record in trace.requests)


def test_no_evict_admits_a_windowed_request_longer_than_the_pool_alone():
    trace = simulate(
        [Request("a", 40, 40), Request("b", 4, 4)],
        "no_evict",
        scheduler=SchedulerConfig(4, 4),
        cache=CacheConfig(16, 1, sliding_window=8),
    )
    assert [record.error for record in trace.requests] == [None, None]
    assert [len(record.tokens) for record in trace.requests] == [40, 4]


@pytest.mark.parametrize(("reserve", "slots"), [("max", 10 + 100), ("pow2", 10 + 32), ("oracle", 10 + 25)])
def test_orca_reserves_the_longest_the_power_of_two_or_the_predicted_output(reserve, slots):
    assert Orca(reserve).num_slots(RequestState(Request("a", 10, 100, predicted_output=25), 0)) == slots
    requests = [Request(str(n), 10, 100, predicted_output=25, output_length=25) for n in range(20)]
    trace = run(requests, f"orca:reserve={reserve}", num_blocks=400, seats=20)
    assert max(len(step.plan.scheduled) for step in trace.steps) == 400 // slots
    assert not preemptions(trace)


def test_orca_rounds_a_prediction_up_to_a_power_of_two_that_may_be_itself():
    outputs = {1: 1, 2: 2, 3: 4, 25: 32, 32: 32, 33: 64, 80: 128}
    for predicted, rounded in outputs.items():
        state = RequestState(Request("a", 10, 100, predicted_output=predicted), 0)
        assert Orca("pow2").num_slots(state) == 10 + rounded
    # No request is expected to generate more than it may.
    assert Orca("oracle").num_slots(RequestState(Request("a", 10, 100, predicted_output=500), 0)) == 110


def test_no_evict_lets_two_share_a_pool_that_holds_all_but_their_last_tokens():
    requests = [Request(name, 8, 9) for name in "ab"]
    for num_blocks, together in ((8, 2), (7, 1)):
        trace = run(requests, "no_evict", num_blocks=num_blocks, block_size=4)
        assert max(len(step.plan.scheduled) for step in trace.steps) == together


def drive(scheduler, steps, now=0.0):
    """Schedule and commit some steps; yield the plans."""
    for step in range(steps):
        if not scheduler.has_work:
            return
        plan = scheduler.schedule(now + step)
        tokens = {entry.request_id: 7 for entry in plan.scheduled if entry.samples}
        scheduler.commit(plan, StepResult(1.0, tokens), now + step + 1)
        scheduler.check()
        yield plan


def test_new_token_ratio_falls_linearly_to_its_floor_and_begins_anew_when_idle():
    policy = policies.get("new_token_ratio:decay=10")
    scheduler = Scheduler(policy, SchedulerConfig(2, 100), CacheConfig(100, 1))
    scheduler.submit(Request("a", 1, 15))
    shares = [policy.share for _ in drive(scheduler, 15)]
    expected = [0.7] + [0.7 - 0.7 * 0.86 * min(step, 10) / 10 for step in range(1, 15)]
    assert shares == pytest.approx(expected)
    assert shares[-1] == pytest.approx(0.098)
    scheduler.submit(Request("b", 1, 2))
    assert [policy.share for _ in drive(scheduler, 1)] == [0.7]


def test_new_token_ratio_counts_a_share_of_running_requests_and_all_of_a_new_one():
    needed = 10 + 1 + 35 + 20 + 60
    for num_blocks, is_in in ((needed, True), (needed - 1, False)):
        policy = policies.get("new_token_ratio:ratio=0.5,decay=1000000000")
        scheduler = Scheduler(policy, SchedulerConfig(4, 100), CacheConfig(num_blocks, 1))
        scheduler.submit(Request("a", 10, 71))
        next(drive(scheduler, 1))
        # a holds 10 tokens and its first output, and may generate 70 more.
        scheduler.submit(Request("b", 20, 60))
        plan = next(drive(scheduler, 1, now=1.0))
        assert (len(plan.admitted) == 1) == is_in


def test_new_token_ratio_retracts_the_request_that_generated_least():
    policy = policies.get("new_token_ratio:ratio=0.0")
    scheduler = Scheduler(policy, SchedulerConfig(4, 100), CacheConfig(128, 1))
    scheduler.submit(Request("a", 10, 100))
    list(drive(scheduler, 5))
    scheduler.submit(Request("b", 20, 50))
    assert next(plan.preempted for plan in drive(scheduler, 60, now=5.0) if plan.preempted) == ("b",)


def test_new_token_ratio_sets_its_share_from_the_requests_that_stay():
    policy = policies.get("new_token_ratio")
    policy.begin()
    states = []
    for place, (prompt, outputs) in enumerate([(5, 30), (9, 4), (12, 4), (3, 8)]):
        state = RequestState(Request(str(place), prompt, 200), place)
        state.output_token_ids = [0] * outputs
        state.num_tokens = prompt + outputs
        states.append(state)
    view = SimpleNamespace(running=states)
    # Of the two with 4 tokens the one with the longer prompt goes.
    assert policy.victim(view, states) is states[2]
    assert policy.share == pytest.approx((30 + 4 + 8 + 3 * 20) / (3 * 200 + 1))


# --- fairness and locality


def services(trace, weights=(1.0, 2.0)):
    """Return each client's service after each step: prompts at their admission, outputs as they come."""
    client = {record.id: record.client for record in trace.requests}
    length = {record.id: record.num_prompt_tokens for record in trace.requests}
    total = dict.fromkeys(client.values(), 0.0)
    for step in trace.steps:
        for admission in step.plan.admitted:
            total[client[admission.request.id]] += weights[0] * length[admission.request.id]
        for entry in step.plan.scheduled:
            total[client[entry.request_id]] += weights[1] * entry.samples
        yield step, dict(total)


def largest_gap(trace, since=0.0):
    """Return how far two clients' services drift apart while both have requests waiting."""
    last = {}
    for record in trace.requests:
        last[record.client] = max(last.get(record.client, 0.0), record.first_scheduled)
    drift = [
        total["a"] - total["b"]
        for step, total in services(trace)
        if since <= step.start <= min(last.values())
    ]
    return max(drift) - min(drift)


@pytest.mark.parametrize("seed", range(6))
def test_vtc_keeps_two_backlogged_clients_within_its_proven_bound(seed):
    """Theorem 4.4 of the paper: the difference is at most 2 · max(w_p · L_input, w_q · M)."""
    draw = random.Random(seed)
    seats, longest_prompt, longest_output = 3, 20, 12
    requests = [
        Request(
            f"{client}{place}",
            draw.randint(1, longest_prompt if client == "a" else 4),
            draw.randint(1, longest_output if client == "b" else 5),
            client=client,
        )
        for client in "ab"
        for place in range(120)
    ]
    # The batch holds no more tokens than its seats do.
    bound = 2 * max(1.0 * longest_prompt, 2.0 * seats * (longest_prompt + longest_output))
    gaps = {name: largest_gap(run(requests, name, seats=seats)) for name in ("vtc", "fcfs")}
    assert gaps["vtc"] <= bound < gaps["fcfs"]


def test_vtc_lets_no_client_save_up_without_waiting_requests():
    requests = [Request(f"a{n}", 2, 4, client="a") for n in range(300)]
    requests += [Request(f"b{n}", 2, 4, arrival=200.0, client="b") for n in range(100)]
    trace = run(requests, "vtc", seats=1)
    assert largest_gap(trace, since=200.0) <= 2 * max(2, 2 * 6)
    # Without the lift b would be served alone until it has caught up with 200 seconds of service.
    starts = [record.first_scheduled for record in trace.requests if record.client == "a"]
    assert any(200 < start < 220 for start in starts)


def test_vtc_does_not_lift_a_client_again_while_it_waits():
    # b waits from second 1 on and sees a's counter grow; once a seat is free it goes ahead of a.
    requests = [Request("a0", 1, 10, client="a"), Request("a1", 1, 10, client="a")]
    requests += [Request(f"a{n}", 1, 1, client="a", arrival=0.0) for n in range(2, 6)]
    requests += [Request(f"b{n}", 1, 1, client="b", arrival=1.0) for n in range(5)]
    order = admitted(run(requests, "vtc", seats=2))
    assert order[:2] == ["a0", "a1"]
    assert [name[0] for name in order[2:7]] == ["b"] * 5


@pytest.mark.parametrize("budget", [2, 4, 5, 100])
@pytest.mark.parametrize("num_blocks", [14, 100])
def test_vtc_counts_each_prompt_once_and_each_output_token(budget, num_blocks):
    draw = random.Random(budget)
    requests = [
        Request(f"{client}{n}", draw.randint(1, 8), draw.randint(1, 6), client=client)
        for n in range(10)
        for client in "ab"
    ]
    policy = policies.get("vtc:prompt_weight=3,output_weight=5")
    trace = run(requests, policy, seats=3, budget=budget, num_blocks=num_blocks)
    assert bool(preemptions(trace)) == (num_blocks == 14)
    for client in "ab":
        mine = [request for request in requests if request.client == client]
        assert policy.accounts[client] == sum(
            3 * given.num_prompt_tokens + 5 * given.max_tokens for given in mine
        )


def prompts_alike(prefix, number, length=64, tail=4, start=1000):
    return [
        (*range(prefix, prefix + length), *range(start + n * tail, start + (n + 1) * tail))
        for n in range(number)
    ]


def test_lpm_admits_the_longest_cached_prefix_first():
    (first, again, half) = (tuple(range(64)), (*range(64), 901, 902), (*range(40), *range(500, 530)))
    requests = [
        Request("warm", first, 2),
        Request("cold", tuple(range(200, 270)), 2, arrival=1.0),
        Request("half", half, 2, arrival=1.0),
        Request("whole", again, 2, arrival=1.0),
    ]
    limits = {"seats": 1, "block_size": 8, "prefix_caching": True}
    assert admitted(run(requests, "lpm", **limits)) == ["warm", "whole", "half", "cold"]
    assert admitted(run(requests, "lpm:most=1", **limits)) == ["warm", "cold", "half", "whole"]


def test_lpm_sends_one_request_of_a_shared_prefix_ahead_so_that_others_hit_it():
    alike = prompts_alike(0, 3, length=40)
    requests = [Request(f"alike {n}", prompt, 2) for n, prompt in enumerate(alike)]
    requests.append(Request("other", tuple(range(300, 340)), 2))
    trace = run(requests, "lpm", seats=2, block_size=8, prefix_caching=True)
    assert admitted(trace) == ["alike 0", "other", "alike 1", "alike 2"]
    assert [record.num_cached_tokens for record in trace.requests] == [0, 40, 40, 0]
    # A prefix of less than 32 tokens is not worth waiting for.
    short = [Request(str(n), prompt, 2) for n, prompt in enumerate(prompts_alike(0, 3, length=31))]
    assert admitted(run(short, "lpm", seats=2, block_size=8, prefix_caching=True))[:2] == ["0", "1"]


def test_dlpm_goes_by_cached_prefix_within_credit_and_lpm_without_end():
    hot = [
        Request(f"hot {n}", prompt, 4, client="hot", arrival=float(n > 0))
        for n, prompt in enumerate(prompts_alike(0, 12))
    ]
    cold = [
        Request(f"cold {n}", tuple(range(2000 + 9 * n, 2009 + 9 * n)), 4, client="cold") for n in range(3)
    ]
    limits = {"seats": 1, "block_size": 4, "prefix_caching": True}
    greedy = admitted(run([*hot, *cold], "lpm", **limits))
    assert greedy[-3:] == ["cold 0", "cold 1", "cold 2"]
    shared = admitted(run([*hot, *cold], "dlpm:quantum=16", **limits))
    assert max(map(shared.index, ("cold 0", "cold 1", "cold 2"))) < shared.index("hot 11")
    # With credit for everything it is the longest prefix first again.
    assert admitted(run([*hot, *cold], "dlpm:quantum=100000", **limits)) == greedy


def test_dlpm_charges_uncached_prompt_tokens_and_output_tokens():
    prompts = prompts_alike(0, 2, length=16)
    policy = policies.get("dlpm:quantum=1000")
    requests = [Request("a", prompts[0], 3, client="a"), Request("b", prompts[1], 5, client="b", arrival=9.0)]
    run(requests, policy, block_size=4, budget=7, prefix_caching=True)
    assert policy.accounts == {"a": 1000 - 20 - 3, "b": 1000 - 4 - 5}


# --- promises about time


def test_priority_makes_room_for_the_whole_run_that_an_urgent_request_reserves():
    requests = [
        Request("a", 8, 20, priority=5),
        Request("c", 8, 9, priority=6),
        Request("b", 8, 4, arrival=3.0, priority=0),
    ]
    # Runs of 4 and 2 blocks leave 1 of 7; the urgent request's prompt would fit in it, but its run does not.
    trace = simulate(requests, "priority", cache=CacheConfig(7, 8, reservation="oracle"))
    assert [record.first_scheduled for record in trace.requests] == [0.0, 0.0, 3.0]
    assert [record.num_preemptions for record in trace.requests] == [0, 1, 0]


@pytest.mark.parametrize("urgent", [-10, 0, 4])
def test_priority_preempts_for_an_urgent_request_and_not_among_equals(urgent):
    requests = [
        Request("low", 1, 10, priority=5),
        Request("high", 1, 4, priority=urgent, arrival=3.0),
        Request("equal", 1, 4, priority=5, arrival=4.0),
    ]
    trace = one_slot(requests, "priority")
    assert preemptions(trace) == ["low"]
    assert finishes(trace) == {"high": 7.0, "low": 14.0, "equal": 18.0}
    equals = [Request(str(n), 1, 5, priority=urgent, arrival=float(n)) for n in range(6)]
    assert not preemptions(one_slot(equals, "priority"))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_priority_makes_room_for_an_urgent_request_that_lacks_blocks(mode):
    requests = [Request(name, 10, 8, priority=place) for place, name in enumerate("abc")]
    requests.append(Request("urgent", 25, 5, priority=-1, arrival=2.0))
    trace = run(requests, "priority", num_blocks=45, preemption=mode, num_host_blocks=99 * (mode == "swap"))
    urgent = next(record for record in trace.requests if record.id == "urgent")
    assert urgent.first_scheduled == 2.0
    # 45 - 3 · 11 = 12 blocks are free, and each of the two least urgent gives 11.
    assert sorted(trace.steps[2].plan.preempted) == ["b", "c"]
    assert trace.requests[0].num_preemptions == 0


def meets_all_deadlines(requests):
    """Search all preemptive schedules of unit steps on one slot."""
    arrivals = [int(request.arrival) for request in requests]
    deadlines = [int(request.deadline) for request in requests]

    @cache
    def search(now, left):
        if any(rest and now + rest > deadline for rest, deadline in zip(left, deadlines, strict=True)):
            return False
        if not any(left):
            return True
        here = [place for place, rest in enumerate(left) if rest and arrivals[place] <= now]
        if not here:
            return search(now + 1, left)
        return any(search(now + 1, (*left[:place], left[place] - 1, *left[place + 1 :])) for place in here)

    return search(0, tuple(request.max_tokens for request in requests))


def test_edf_meets_all_deadlines_whenever_one_slot_can():
    feasible, missed = 0, dict.fromkeys(("fcfs", "sjf", "srpt"), 0)
    for seed in range(150):
        draw = random.Random(seed)
        requests = [
            Request(
                str(place),
                1,
                length := draw.randint(1, 4),
                arrival=float(arrival := draw.randint(0, 8)),
                deadline=float(arrival + length + draw.randint(0, 6)),
            )
            for place in range(5)
        ]

        def misses(policy, requests=requests):
            times = finishes(one_slot(requests, policy))
            return sum(times[request.id] > request.deadline for request in requests)

        can = meets_all_deadlines(requests)
        assert (misses("edf") == 0) == can, seed
        feasible += can
        for name in missed:
            missed[name] += can and misses(name) > 0
    assert 20 < feasible < 140
    assert all(number > 5 for number in missed.values()), missed


def test_edf_serves_a_request_without_deadline_last():
    requests = [
        Request("none", 1, 3),
        Request("late", 1, 3, deadline=99.0),
        Request("soon", 1, 3, deadline=50.0),
    ]
    assert admitted(one_slot(requests, "edf")) == ["soon", "late", "none"]


def test_least_slack_takes_the_time_of_the_prompt_into_account():
    requests = [
        Request("running", 1, 3),
        Request("short", 2, 2, arrival=1.0, deadline=50.0),
        Request("long", 30, 2, arrival=1.0, deadline=60.0),
        Request("none", 1, 2, arrival=1.0),
    ]
    # A step takes a second and one for each of its tokens: 50 - 3 = 47 seconds of slack against 60 - 31.
    with_model = run(requests, "least_slack", seats=1, cost=Linear(1.0, 1.0))
    assert admitted(with_model) == ["running", "long", "short", "none"]
    without = run(requests, "least_slack", seats=1)
    assert admitted(without) == ["running", "short", "long", "none"]


def test_least_relative_slack_does_not_put_off_a_late_deadline():
    requests = [
        Request("running", 1, 83),
        Request("a", 1, 2, arrival=10.0, deadline=110.0),
        Request("b", 1, 2, arrival=82.0, deadline=100.0),
    ]
    # At second 83 a has 27 of its 100 seconds left, b 17 of 18.
    assert admitted(run(requests, "least_slack", seats=1))[1:] == ["b", "a"]
    assert admitted(run(requests, "least_slack:relative", seats=1))[1:] == ["a", "b"]


def test_andes_gives_the_seat_of_a_reader_ahead_to_one_behind():
    requests = [Request("a", 1, 12), Request("b", 1, 12, arrival=1.0)]
    trace = one_slot(requests, "andes:ttft=2,speed=0.5")
    behind = []
    for record in trace.requests:
        for place, time in enumerate(record.token_times):
            due = record.arrival + 2 + place / 0.5
            behind.append(max(0.0, time - due))
    # Both readers get what they read, a step late at most; if first come were first served, b would wait.
    assert max(behind) <= 1.0
    assert trace.requests[1].ttft == 3.0
    assert one_slot(requests, "fcfs").requests[1].ttft == 12.0


def test_andes_takes_no_seat_of_a_reader_behind():
    requests = [Request("a", 1, 8), Request("b", 1, 8, arrival=1.0)]
    # All read faster than one slot can write.
    assert not preemptions(one_slot(requests, "andes:ttft=0,speed=50"))


# --- batching


@pytest.mark.parametrize("budget", [8, 16, 33])
def test_sarathi_stalls_no_decode_by_more_than_one_budget(budget):
    draw = random.Random(budget)
    requests = [
        Request(str(n), draw.choice((3, 100, 400)), draw.randint(5, 30), arrival=float(draw.randint(0, 2000)))
        for n in range(30)
    ]
    # A second for each token that is computed.
    gaps = {
        name: max(
            gap
            for record in run(requests, name, seats=6, budget=budget, cost=Linear(0.0, 1.0)).requests
            for gap in record.itl
        )
        for name in ("sarathi", "splitfuse", "prefill_first")
    }
    assert max(gaps["sarathi"], gaps["splitfuse"]) <= budget < gaps["prefill_first"]


def test_splitfuse_fills_the_budget_exactly_while_prompts_wait():
    requests = [Request(str(n), 5 + 7 * (n % 5), 6) for n in range(20)]
    trace = run(requests, "splitfuse", seats=20, budget=32)
    last_prompt = max(step.plan.step for step in trace.steps if step.plan.num_prefill_tokens)
    assert [step.plan.num_tokens for step in trace.steps[:last_prompt]] == [32] * last_prompt


def test_splitfuse_serves_in_the_order_of_sarathi():
    for seed in range(5):
        requests = memory_bound(seed)
        order = {
            name: served(run(requests, name, budget=9, num_blocks=60))
            for name in ("splitfuse", "sarathi", "prefill_first")
        }
        assert order["splitfuse"] == order["sarathi"] != order["prefill_first"]


def test_vllm_v0_admits_no_request_below_its_watermark():
    requests = [Request("a", 40, 12), Request("b", 45, 2)]
    joined = {
        watermark: run(requests, f"vllm_v0:watermark={watermark}", num_blocks=100).requests[1].first_scheduled
        for watermark in (0.15, 0.16)
    }
    # 100 - 40 - 45 = 15 blocks stay free.
    assert joined == {0.15: 0.0, 0.16: 12.0}


def test_vllm_v0_admits_no_new_request_while_one_is_swapped_out():
    requests = [Request(name, 10, 15) for name in "abc"] + [Request("d", 1, 1, arrival=3.0)]
    for policy in ("vllm_v0:swap", "fcfs"):
        trace = run(requests, policy, num_blocks=40, num_host_blocks=100, preemption="swap")
        swapped: set[str] = set()
        new = []
        for step in trace.steps:
            back = {admission.request.id for admission in step.plan.admitted} & swapped
            new += [
                admission.request.id
                for admission in step.plan.admitted
                if swapped and admission.request.id not in swapped
            ]
            swapped = (swapped | set(step.plan.swapped)) - back
        assert any(step.plan.swapped for step in trace.steps)
        assert policy == "fcfs" or not new


@pytest.mark.parametrize(("seats", "start"), [(4, 2.5), (3, 2.0), (2, 1.0)])
def test_static_gathers_a_batch_until_it_is_full_or_its_time_is_up(seats, start):
    requests = [Request(str(n), 1, 3, arrival=float(n)) for n in range(3)]
    trace = run(requests, "static:wait=2.5", seats=seats)
    assert trace.steps[0].start == start
    assert len(trace.steps[0].plan.admitted) == min(3, seats)
    assert run(requests, "static", seats=seats).steps[0].start == 0.0


def test_static_stops_gathering_once_the_first_request_has_waited_long_enough():
    requests = [Request("a", 1, 9), Request("b", 1, 2, arrival=1.0), Request("c", 1, 2, arrival=8.0)]
    trace = run(requests, "static:wait=2", seats=4)
    # The second batch has b, which has waited since second 1, and c.
    assert [step.start for step in trace.steps if step.plan.admitted] == [2.0, 11.0]
    late = [Request("a", 1, 1), Request("b", 1, 1, arrival=10.0)]
    assert [step.start for step in run(late, "static:wait=2", seats=4).steps] == [2.0, 12.0]
