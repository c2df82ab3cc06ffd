"""SLOs, fairness, queues and intervals, against hand-counted records, closed forms and simulation."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cbresearch import CacheConfig, Request, SchedulerConfig, Trace, metrics, simulate
from cbresearch.costs import Linear
from cbresearch.metrics import Reporting, Slo
from cbresearch.trace import RequestRecord

NOTHING = Trace("fcfs", SchedulerConfig(), CacheConfig(num_blocks=4), steps=(), requests=())


def record(identity, arrival, times, reason="length", **fields):
    fields = {"num_prompt_tokens": 3, "first_scheduled": arrival, **fields}
    return RequestRecord(
        identity,
        arrival,
        tokens=(0,) * len(times),
        token_times=tuple(times),
        finish_reason=reason,
        **fields,
    )


def run_of(seed, policy="fcfs", num_requests=60):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.3, num_requests)).tolist()
    requests = [
        Request(
            str(n),
            int(rng.integers(1, 30)),
            int(rng.integers(1, 40)),
            arrival=arrival,
            client="ab"[int(rng.integers(2))],
        )
        for n, arrival in enumerate(arrivals)
    ]
    cost = Linear(step=0.01, token=0.001)
    return simulate(requests, policy, cost=cost, scheduler=SchedulerConfig(4, 64))


def test_a_request_keeps_an_slo_if_it_is_within_every_demand_and_complete():
    slo = Slo(ttft=1.0, tpot=0.5, latency=3.0)
    kept = record("kept", 10.0, (11.0, 11.5, 12.0))
    records = [
        kept,
        record("late first", 10.0, (11.01, 11.5, 12.0)),
        record("slow", 10.0, (11.0, 11.5, 12.01)),
        record("late last", 10.0, (11.0, 11.5, 12.0, 12.5, 13.0, 13.5)),
        replace(kept, finish_reason="abort"),
        replace(kept, finish_reason="error", error="why"),
        RequestRecord("rejected", 10.0, error="why"),
        record("one token", 10.0, (10.9,)),
    ]
    assert [slo.is_met(each) for each in records] == [True, *[False] * 6, True]
    trace = replace(NOTHING, requests=tuple(records))
    assert metrics.slo_attainment(trace, slo) == 2 / 8
    assert metrics.goodput(trace, slo) == pytest.approx(2 / 3.5)
    assert metrics.slo_attainment(NOTHING, slo) is metrics.goodput(NOTHING, slo) is None


@pytest.mark.parametrize("demands", [{}, {"ttft": 0.0}, {"tpot": -1.0}, {"latency": math.inf}])
def test_an_slo_that_demands_nothing_or_the_impossible_is_rejected(demands):
    with pytest.raises(ValueError, match="SLO"):
        Slo(**demands)


def test_a_stricter_slo_is_never_kept_more_often():
    trace = run_of(1)
    attained = [metrics.slo_attainment(trace, Slo(ttft=seconds)) for seconds in (0.01, 0.05, 0.2, 1.0, 100.0)]
    assert attained == sorted(attained)
    assert attained[0] < attained[-1] == 1.0


@pytest.mark.parametrize(
    ("shares", "index"),
    [([3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2], 0.9), ([], None), ([0, 0], None), ([5], 1.0)],
)
def test_jains_index_is_1_for_equals_and_1_over_n_for_one_who_has_everything(shares, index):
    assert metrics.jain_index(shares) == (None if index is None else pytest.approx(index))


def test_jains_index_of_a_negative_share_is_rejected():
    with pytest.raises(ValueError, match=r"a share is -1\.0"):
        metrics.jain_index([1, -1])


@pytest.mark.parametrize("policy", ["fcfs", "static", "sjf"])
def test_time_weighted_queues_are_integrals_over_the_run(policy):
    trace = run_of(3, policy)
    begin, end = min(each.arrival for each in trace.requests), trace.duration
    grid = np.linspace(begin, end, 40_001)
    middle = (grid[1:] + grid[:-1]) / 2
    arrived = np.array([each.arrival for each in trace.requests])
    seated = np.array([each.first_scheduled for each in trace.requests])
    left = np.array([each.finish for each in trace.requests])

    def before(moments):
        return np.searchsorted(np.sort(moments), middle)

    assert metrics.mean_queue_length(trace) == pytest.approx(
        (before(arrived) - before(seated)).mean(), rel=1e-2
    )
    assert metrics.mean_in_system(trace) == pytest.approx((before(arrived) - before(left)).mean(), rel=1e-2)
    seats = metrics.residence_time(trace)
    assert seats.mean == pytest.approx((left - seated).mean())
    assert metrics.mean_queue_length(NOTHING) is metrics.mean_in_system(NOTHING) is None


def test_a_warm_up_leaves_out_what_ended_in_it():
    trace = run_of(4)
    rest = metrics.without_warm_up(trace, 5.0)
    assert rest.requests == tuple(each for each in trace.requests if each.finish >= 5.0)
    assert list(rest.steps) == [step for step in trace.steps if step.end >= 5.0]
    assert 0 < len(rest.requests) < len(trace.requests)
    assert metrics.without_warm_up(trace, 0.0) == trace


def test_a_run_that_begins_away_from_its_steady_state_is_cut_where_that_begins():
    rng = np.random.default_rng(5)
    steady = rng.normal(10, 1, 2000)
    assert metrics.warm_up_length(steady) < 200
    rising = steady - 10 * np.exp(-np.arange(2000) / 60)
    assert 100 <= metrics.warm_up_length(rising) <= 500
    assert metrics.warm_up_length([]) == metrics.warm_up_length([1.0, 2.0]) == 0
    # A series that never settles is cut in half at most.
    assert metrics.warm_up_length(np.arange(1000.0)) == 500


def test_the_interval_of_a_percentile_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(6)
    true = -math.log(0.1)
    intervals = [metrics.percentile_interval(rng.exponential(size=400), 90) for _ in range(600)]
    covered = sum(each.low <= true <= each.high for each in intervals) / 600
    assert 0.93 <= covered <= 0.99


def test_few_values_bound_p99_from_below_only():
    # Ranks 990 ± 1.96 · √9.9, that is 984 to 996.
    sample = np.arange(1, 1001)
    interval = metrics.percentile_interval(sample, 99)
    assert 983 <= interval.low <= 984
    assert 996 <= interval.high <= 998
    assert metrics.percentile_interval(np.arange(100), 99).high is None
    assert metrics.percentile_interval([], 99) is None
    for q in (0, 100, -1):
        with pytest.raises(ValueError, match=f"q is {q}"):
            metrics.percentile_interval([1.0], q)


def test_the_interval_of_a_mean_is_students():
    sample = [3.1, 2.9, 3.4, 3.0, 2.7]
    interval = metrics.mean_interval(sample, 0.9)
    low, high = stats.t.interval(0.9, 4, loc=np.mean(sample), scale=stats.sem(sample))
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))
    assert metrics.mean_interval([2.0]) == (2.0, None, None, 1)
    assert metrics.mean_interval([]) is None
    with pytest.raises(ValueError, match="confidence is 1"):
        metrics.mean_interval(sample, 1)


def test_batch_means_cover_the_mean_of_a_series_whose_values_depend_on_each_other():
    rng = np.random.default_rng(7)
    naive = batched = 0
    for _ in range(200):
        noise = rng.normal(size=4000)
        series = np.empty(4000)
        series[0] = noise[0]
        for n in range(1, 4000):
            series[n] = 0.9 * series[n - 1] + noise[n]
        plain, cut = metrics.mean_interval(series), metrics.batch_means_interval(series)
        naive += plain.low <= 0 <= plain.high
        batched += cut.low <= 0 <= cut.high
    assert naive < 120
    assert batched >= 178
    assert metrics.batch_means_interval(range(19)) is None
    with pytest.raises(ValueError, match="num_batches is 1"):
        metrics.batch_means_interval([1.0], 1)


def test_the_cost_of_tokens_is_the_price_of_the_makespan_over_the_tokens():
    trace = run_of(3)
    ends = [r.token_times[-1] for r in trace.requests]
    price = 3.0 * (max(ends) - min(r.arrival for r in trace.requests)) / 3600
    outputs = sum(len(r.tokens) for r in trace.requests)
    prompts = sum(r.num_prompt_tokens for r in trace.requests)
    assert metrics.cost_per_million_tokens(trace, 3.0) == pytest.approx(price / outputs * 1e6)
    assert metrics.cost_per_million_total_tokens(trace, 3.0) == pytest.approx(
        price / (outputs + prompts) * 1e6
    )
    assert metrics.cost_per_million_tokens(trace, 0.0) == 0


def test_nothing_generated_has_no_cost_and_no_price_is_below_0():
    assert metrics.cost_per_million_tokens(NOTHING, 1.0) is None
    assert metrics.cost_per_million_total_tokens(NOTHING, 1.0) is None
    for price in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="price_per_hour"):
            metrics.cost_per_million_tokens(NOTHING, price)
        with pytest.raises(ValueError, match=f"price_per_hour is {price}; it must be a finite number"):
            Reporting(price_per_hour=price)


@pytest.mark.parametrize("metric", [metrics.slo_attainment, metrics.goodput])
def test_a_promise_that_is_no_slo_is_refused(metric):
    for trace, promise in ((run_of(3), (1, 2)), (NOTHING, None)):
        with pytest.raises(TypeError, match=r"slo is .*; give an Slo, such as"):
            metric(trace, promise)


@pytest.mark.parametrize(("step_seconds", "price"), [(1.0, 1e308), (1e-310, 1.0), (1e306, 1.0)])
def test_a_metric_beyond_the_largest_float_is_undefined_and_loses_no_other(step_seconds, price):
    requests = [Request(str(n), 5, 4) for n in range(9)]
    trace = simulate(requests, "fcfs", cost=lambda plan: step_seconds)
    with np.errstate(over="ignore"):
        values = metrics.summary(trace, reporting=Reporting(Slo(ttft=1.0), price))
    assert None in values.values() and values["num_finished"] == 9
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_the_table_has_rows_of_promise_and_cost_only_where_they_are_given():
    trace, slo = run_of(3), Slo(ttft=2.0)
    plain = [row.name for row in metrics.kpi_table({"a": trace})]
    full = metrics.kpi_table({"a": trace}, reporting=Reporting(slo, 2.0, "EUR"))
    assert [row.name for row in full[: len(plain)]] == plain
    added = {(row.name, row.unit): float(row.values[0]) for row in full[len(plain) :]}
    assert added == {
        ("kept the SLO", "%"): pytest.approx(100 * metrics.slo_attainment(trace, slo), rel=1e-3),
        ("goodput", "requests/s"): pytest.approx(metrics.goodput(trace, slo), rel=1e-3),
        ("cost per million output tokens", "EUR"): pytest.approx(
            metrics.cost_per_million_tokens(trace, 2.0), rel=1e-3
        ),
        ("cost per million total tokens", "EUR"): pytest.approx(
            metrics.cost_per_million_total_tokens(trace, 2.0), rel=1e-3
        ),
    }
