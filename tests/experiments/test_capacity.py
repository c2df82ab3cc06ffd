"""Capacity: the largest arrival rate that keeps a promise, against closed forms."""

import math

import pytest

from cbresearch import Request, SchedulerConfig, policies
from cbresearch.experiments import capacity
from cbresearch.metrics import Slo

ONE_SEAT = SchedulerConfig(max_num_seqs=1)


@pytest.fixture(autouse=True)
def no_bars(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def evenly(rate, rng):
    """Draw 200 requests of one step each, at equal distances."""
    return [Request(str(n), 1, 1, n / rate) for n in range(200)]


def poisson(rate, rng):
    """Draw 1,000 requests of one step each: an M/D/1 queue, where there is one seat."""
    arrivals = rng.exponential(size=1000).cumsum() / rate
    return [Request(str(n), 1, 1, time) for n, time in enumerate(arrivals)]


def share_within(wait, load):
    """Return P(W <= wait) of an M/D/1 queue with a service time of 1 (Erlang, 1909)."""
    terms = (
        (load * (k - wait)) ** k / math.factorial(k) * math.exp(-load * (k - wait))
        for k in range(math.floor(wait) + 1)
    )
    return (1 - load) * math.fsum(terms)


def test_an_even_stream_is_kept_up_to_the_rate_at_which_the_queue_of_the_last_is_too_long():
    # Above one request a second, request n waits n (1 - 1/rate) seconds; 180 of 200 may wait at most 1.
    found = capacity(evenly, slo=Slo(latency=2.0), scheduler=ONE_SEAT, seeds=[0], start=0.3, tolerance=1e-4)
    assert found.rate == pytest.approx(1 / (1 - 1 / 179), rel=2e-4)
    assert found.kept.rate == found.rate < found.lost.rate <= found.rate * (1 + 1e-4)
    assert found.kept.attainment >= 0.9 > found.lost.attainment
    assert found.is_monotone
    assert {point.num_requests for point in found.tried} == {200}
    assert str(found).startswith(f"up to {found.rate:.4g} requests/s, 0.9 of the requests keep latency ≤ 2 s")


def test_an_even_stream_of_promises_without_slack_is_kept_up_to_one_over_the_service_time():
    for service in (0.25, 2.0):
        found = capacity(
            evenly,
            slo=Slo(latency=service * 1.001),
            cost=lambda plan, service=service: service,
            scheduler=ONE_SEAT,
            seeds=[0],
            attainment=1.0,
        )
        assert found.kept.rate * service <= 1 + 1e-5 < found.lost.rate * service <= 1.03


@pytest.mark.parametrize(("wait", "attainment"), [(2.0, 0.9), (4.0, 0.95)])
def test_a_poisson_stream_is_kept_up_to_the_rate_of_the_queueing_formula(wait, attainment):
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(wait, middle) >= attainment else (low, middle)
    found = capacity(
        poisson,
        slo=Slo(ttft=1 + wait),
        attainment=attainment,
        scheduler=ONE_SEAT,
        start=0.6,
    )
    # 3,000 requests that wait in bursts leave an error of a few per cent.
    assert found.rate == pytest.approx(low, rel=0.05)
    assert found.is_monotone


def test_a_second_search_and_another_start_find_the_same():
    def found(**options):
        return capacity(evenly, slo=Slo(ttft=3.0), scheduler=ONE_SEAT, seeds=[1, 2], **options)

    first = found(start=0.5)
    assert found(start=0.5, policy=policies.Policy()) == first
    assert found(start=6.0).rate == pytest.approx(first.rate, rel=0.02)


def test_it_is_said_when_no_rate_keeps_the_promise():
    found = capacity(evenly, slo=Slo(latency=0.5), scheduler=ONE_SEAT, seeds=[0], max_doublings=3)
    assert (found.rate, found.kept) == (None, None)
    assert [point.rate for point in found.tried] == [0.125, 0.25, 0.5, 1.0]
    assert "at no rate tried" in str(found)


def test_it_is_said_when_the_bracket_has_no_end():
    found = capacity(evenly, slo=Slo(latency=500.0), scheduler=ONE_SEAT, seeds=[0], max_doublings=3)
    assert (found.rate, found.lost) == (None, None)
    assert found.kept.rate == 8.0
    assert "draw more requests" in str(found)


def test_attainment_that_rises_with_the_rate_is_told():
    def odd(rate, rng):
        num_slow = 1 if rate < 1.2 else 0 if rate < 1.9 else 10
        return [Request(str(n), 1, 9 if n < num_slow else 1, n * 20) for n in range(10)]

    found = capacity(odd, slo=Slo(latency=2.0), seeds=[0])
    assert [point.attainment for point in found.tried][:2] == [0.9, 1.0]
    assert found.rate == pytest.approx(1.9, rel=0.02)
    assert not found.is_monotone


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attainment": 0}, "attainment is 0"),
        ({"attainment": 1.5}, "attainment is 1.5"),
        ({"start": -1.0}, "start is -1.0"),
        ({"tolerance": 0}, "tolerance is 0"),
        ({"max_doublings": 0}, "max_doublings is 0"),
        ({"seeds": []}, "no seed"),
        ({"policy": "fcsf"}, "'fcfs'"),
        ({"workload": lambda rate, rng: []}, "draws no request at 1 requests/s"),
    ],
)
def test_what_cannot_be_searched_is_rejected_with_the_value(changes, said):
    with pytest.raises(ValueError, match=said):
        capacity(**{"workload": evenly, "slo": Slo(latency=2.0), **changes})


def test_a_run_that_fails_names_the_rate_and_the_seed():
    def fails(rate, rng):
        raise KeyError("nobody")

    with pytest.raises(RuntimeError, match=r"at 1 requests/s with seed 7: KeyError: 'nobody'"):
        capacity(fails, slo=Slo(latency=2.0), seeds=[7])
