"""Arrivals that tell the time of day: their run is that of the same arrivals counted from the first."""

import json
from dataclasses import replace

import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, export, metrics, simulate, trace, viz
from cbresearch.cluster import ReplicaConfig, simulate_cluster
from cbresearch.costs import Linear
from cbresearch.request import Rejected
from cbresearch.simulator import replan, replay

COST = Linear(step=1e-4, token=1e-6)
LIMITS = SchedulerConfig(4, 64)


def requests_at(epoch):
    """Return requests a few milliseconds apart, with deadlines, one of them rejected, from a moment on."""
    requests = [
        Request(str(place), 8, 30, epoch + place / 512, deadline=epoch + place / 512 + 0.25)
        for place in range(20)
    ]
    return [*requests, Rejected("line", "no request", epoch + 0.5), Rejected("early", "no time")]


def times_of(run):
    return [time for record in run.requests for time in (record.arrival, *record.token_times)]


@pytest.mark.parametrize("policy", ["fcfs", "static", "edf", "static:wait=0.01"])
@pytest.mark.parametrize("epoch", [1.7e9, 1.0e9, 1.7e12])
def test_a_run_at_a_time_of_day_is_the_run_from_its_first_arrival(epoch, policy):
    late = simulate(requests_at(epoch), policy, cost=COST, scheduler=LIMITS)
    early = simulate(requests_at(0.0), policy, cost=COST, scheduler=LIMITS)
    # At 1.7e12 a float holds a quarter of a millisecond, so the arrivals differ by as much.
    assert times_of(late) == pytest.approx(times_of(early), abs=1e-6 if epoch < 1e12 else 1e-3)
    if epoch < 1e12:
        assert [step.plan for step in late.steps] == [step.plan for step in early.steps]
        assert metrics.summary(late) == metrics.summary(early)
    assert (late.origin.epoch, early.origin.epoch) == (epoch, 0.0)


def test_a_long_run_at_a_time_of_day_loses_no_time_from_step_to_step():
    (late,) = simulate([Request("a", 1, 20_000, 1.7e9)], "fcfs", cost=Linear(step=1e-4)).requests
    assert late.latency == pytest.approx(2.0, abs=1e-6)
    assert late.tpot == pytest.approx(1e-4, abs=1e-12)


def test_requests_that_follow_may_tell_either_time():
    def followed(name_of_time):
        def follow(record):
            if record.id != "a":
                return ()
            zero = 1.7e9 if name_of_time == "of day" else 0.0
            return [Request("b", 1, 2, zero + 5.0, deadline=zero + 9.0)]

        return simulate([Request("a", 1, 2, 1.7e9)], "fcfs", cost=Linear(step=1.0), on_finish=follow)

    for run in map(followed, ("of day", "of the run")):
        assert run.requests[1].arrival == 5.0 and run.requests[1].latency == 2.0


def test_a_run_at_a_time_of_day_is_replayed_saved_and_shown(tmp_path):
    requests = requests_at(1.7e9)
    run = simulate(requests, "fcfs", cost=COST, scheduler=LIMITS)
    assert trace.load(run.save(tmp_path / "trace.jsonl")) == run
    again = replay(run, requests, "fcfs")
    assert [step.plan for step in again.steps] == [step.plan for step in run.steps]
    assert replan(run, "fcfs", requests=requests).first_difference is None
    events = export.to_chrome(run)["traceEvents"]
    begins = [event["ts"] for event in events if event.get("cat") == "step"]
    expected = [round(step.start * 1e9) / 1000 for step in run.steps]
    assert begins == expected and len(set(begins)) == len(run.steps)
    assert viz.seats(run).axes[-1].get_xlim()[1] < 1000
    json.dumps(viz.player.player_data({"a": run}), allow_nan=False)


def test_a_cluster_at_a_time_of_day_counts_from_its_first_arrival():
    replica = ReplicaConfig(COST, LIMITS, CacheConfig(100, 4))
    late, early = (simulate_cluster(requests_at(epoch), [replica, replica]) for epoch in (1.7e9, 0.0))
    assert times_of(late.trace) == pytest.approx(times_of(early.trace), abs=1e-6)
    assert late.trace.origin.epoch == 1.7e9


def test_arrivals_below_a_time_of_day_stay_as_they_are():
    run = simulate([Request("a", 1, 1, 5e8)], "fcfs", cost=Linear(step=1.0))
    assert run.requests[0].arrival == 5e8 and run.origin.epoch == 0


def test_late_steps_are_told_to_the_microsecond():
    requests = [Request("a", 1, 1), Request("b", 1, 3, 123456.789012)]
    run = simulate(requests, "fcfs", cost=Linear(step=1e-3))
    story = export.explain(run, "b")
    assert "arrived at 123456.789012 s" in story and "finished at 123456.792012 s" in story
    assert "TTFT 0.001 s" in story


def test_times_keep_their_digits_in_a_file(tmp_path):
    run = simulate([Request("a", 1, 3, 123456.7890123)], "fcfs", cost=Linear(step=1e-4))
    trace.write_columns(tmp_path / "requests.csv", {"fcfs": run.request_columns}, "policy")
    header, row = (line.split(",") for line in (tmp_path / "requests.csv").read_text().splitlines())
    assert float(row[header.index("finish_s")]) == run.requests[0].finish
    assert replace(run, policy="x") != run
