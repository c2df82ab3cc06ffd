"""Waits by queueing theory, against textbook values, one another, the simulator and a library of its own."""

import math

import numpy as np
import pytest

from cbresearch import formulas
from cbresearch.config import SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.metrics import mean_interval
from cbresearch.simulator import simulate
from cbresearch.workloads import Fixed, Geometric, Poisson, make_requests

LOADS = [0.1, 0.5, 0.8, 0.95]


def waits_of(num_slots, rate, mean_length, step, num_requests, seed):
    lengths = Fixed(1), Geometric(mean_length)
    requests = make_requests(Poisson(rate), lengths, num_requests, np.random.default_rng(seed))
    limits = SchedulerConfig(max_num_seqs=num_slots)
    trace = simulate(requests, cost=Linear(step=step), scheduler=limits)
    return requests, np.array([record.first_scheduled - record.arrival for record in trace.served])


def lindley(gaps, services):
    """Return the waits of one slot, first come, first served; a row a run."""
    walk = np.cumsum(services[:, :-1] - gaps[:, 1:], axis=1)
    walk = np.pad(walk, ((0, 0), (1, 0)))
    return walk - np.minimum.accumulate(walk, axis=1)


def test_one_slot_waits_as_the_textbook_says():
    assert formulas.mg1_wait(0.5, 1.0, 1.0) == pytest.approx(1.0)
    assert formulas.md1_wait(0.5, 1.0) == pytest.approx(0.5)
    assert formulas.mg1_wait(4.0, 0.2, 2.5) == pytest.approx(0.8 / 0.2 * 3.5 / 2 * 0.2)


def test_erlang_c_gives_the_printed_tables():
    # Two slots in closed form, C = 2ρ²/(1 + ρ); and a = 8 on 10 slots, printed as 0.409.
    assert formulas.erlang_c(1.0, 1.0, 2) == pytest.approx(1 / 3)
    assert formulas.erlang_c(8.0, 1.0, 10) == pytest.approx(0.409, abs=5e-4)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("num_slots", [1, 2, 7, 64])
def test_erlangs_numbers_are_those_of_the_birth_and_death_chain(num_slots, load):
    rate = load * num_slots
    number = np.arange(num_slots + math.ceil(40 / (1 - load)))
    weights = np.cumsum(np.log(rate / np.minimum(number[1:], num_slots)))
    share = np.exp(np.append(0, weights) - weights.max())
    share /= share.sum()
    assert formulas.mmc_idle(rate, 1.0, num_slots) == pytest.approx(share[0])
    assert formulas.erlang_c(rate, 1.0, num_slots) == pytest.approx(share[num_slots:].sum())
    queue = share @ np.maximum(number - num_slots, 0)
    assert formulas.mmc_wait(rate, 1.0, num_slots) == pytest.approx(queue / rate)


@pytest.mark.parametrize("load", LOADS)
def test_mmc_wait_of_one_slot_is_mg1_wait_of_exponential_services(load):
    assert formulas.mmc_wait(load, 1.0, 1) == pytest.approx(formulas.mg1_wait(load, 1.0, 1.0))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mean_length", [1, 1.5, 10])
def test_one_slot_of_the_batch_is_pollaczek_and_khinchines_queue(mean_length, load):
    step = 1 / mean_length
    wait = formulas.slotted_wait(load, mean_length, step, 1)
    assert wait == pytest.approx(formulas.mg1_wait(load, 1.0, 1 - 1 / mean_length))
    shift = formulas.step_boundary_shift(load, mean_length, step, 1)
    assert wait == pytest.approx(formulas.mmc_wait(load, 1.0, 1) + shift)


@pytest.mark.parametrize("load", [0.3, 0.8, 0.9])
@pytest.mark.parametrize("num_slots", [2, 4, 8])
def test_the_shift_is_the_first_order_of_the_chain(num_slots, load):
    rate = load * num_slots

    def error(mean_length):
        wait = formulas.mmc_wait(rate, 1.0, num_slots)
        shift = formulas.step_boundary_shift(rate, mean_length, 1 / mean_length, num_slots)
        return abs(formulas.slotted_wait(rate, mean_length, 1 / mean_length, num_slots) - wait - shift)

    assert error(100) < 1e-4
    # What is left shrinks with the square of the step.
    assert error(100) == pytest.approx(error(50) / 4, rel=0.1)


@pytest.mark.parametrize(("num_slots", "load", "mean_length"), [(4, 0.3, 4), (4, 0.8, 4), (8, 0.8, 2)])
def test_the_chain_predicts_the_simulator(num_slots, load, mean_length):
    rate, step = load * num_slots, 1 / mean_length
    means = [waits_of(num_slots, rate, mean_length, step, 1000, seed)[1][200:].mean() for seed in range(10)]
    interval = mean_interval(means, 0.99)
    predicted = formulas.slotted_wait(rate, mean_length, step, num_slots)
    assert interval.low < predicted < interval.high
    if load == 0.3:
        # An interval that covers everything would prove nothing: Erlang's wait, without steps, is outside.
        assert formulas.mmc_wait(rate, 1.0, num_slots) < interval.low


def test_one_slot_of_the_simulator_waits_as_in_ciw_wait_by_wait():
    ciw = pytest.importorskip("ciw")
    requests, waits = waits_of(1, 0.9, 3, 1 / 3, 1000, 0)
    gaps = np.diff([request.arrival for request in requests], prepend=0.0)
    services = np.array([request.max_tokens / 3 for request in requests])
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential([*gaps.tolist(), 1e9])],
        service_distributions=[ciw.dists.Sequential(services.tolist())],
        number_of_servers=[1],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(len(requests), method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)
    np.testing.assert_allclose(waits, [record.waiting_time for record in records], atol=1e-8)
    np.testing.assert_allclose(waits, lindley(gaps[None], services[None])[0], atol=1e-8)


def test_clipping_at_three_means_raises_the_rate_by_5_percent_and_calms_the_gaps():
    assert 1 / formulas.clipped_gap_mean(1.0, 3.0) == pytest.approx(1.0524, abs=5e-5)
    assert formulas.clipped_gap_cv2(3.0) == pytest.approx(0.774, abs=5e-4)
    gaps = np.minimum(np.random.default_rng(0).exponential(0.5, 1_000_000), 1.5)
    assert gaps.mean() == pytest.approx(formulas.clipped_gap_mean(2.0, 3.0), rel=2e-3)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(formulas.clipped_gap_cv2(3.0), rel=5e-3)


def test_a_late_clip_changes_nothing():
    assert formulas.clipped_gap_mean(2.0, 50.0) == pytest.approx(0.5)
    assert formulas.clipped_gap_cv2(50.0) == pytest.approx(1.0)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_wait_says_as_much_as_daley_says(load):
    rng = np.random.default_rng(1)
    runs, length = 1000, 4000
    waits = lindley(rng.exponential(1 / load, (runs, length)), rng.exponential(1.0, (runs, length)))[:, 1000:]
    ratio = waits.mean(axis=1).var() * waits.shape[1] / waits.var()
    assert ratio == pytest.approx(formulas.mm1_correlated_waits(load), rel=0.1)


def test_the_relaxation_time_grows_with_the_load():
    assert formulas.mm1_relaxation(0.25, 2.0) == pytest.approx(8.0)
    assert formulas.mm1_relaxation(0.9, 1.0) == pytest.approx(380, rel=0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda: formulas.mg1_wait(1.0, 1.0, 1.0),
        lambda: formulas.mmc_wait(8.0, 0.5, 4),
        lambda: formulas.mm1_correlated_waits(1.0),
        lambda: formulas.mg1_wait(0.5, 1.0, -0.1),
        lambda: formulas.mmc_wait(0.5, 1.0, 0),
        lambda: formulas.slotted_wait(0.5, 0.5, 1.0, 1),
        lambda: formulas.clipped_gap_mean(1.0, 0.0),
    ],
)
def test_what_has_no_answer_raises(call):
    with pytest.raises(ValueError, match=r"(load|cv2|num_slots|mean_length|clip) is"):
        call()
