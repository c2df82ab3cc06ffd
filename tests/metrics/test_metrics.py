"""Measures of a trace against hand-counted traces, formulas and identities that hold in every run."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, Trace, formulas, metrics, simulate
from cbresearch.costs import Linear
from cbresearch.trace import RequestRecord

POLICIES = ["fcfs", "prefill_first", "sjf", "static", "static:release"]
NOTHING = Trace("fcfs", SchedulerConfig(), CacheConfig(num_blocks=4), steps=(), requests=())
COST = Linear(step=0.01, token=0.001, context=0.0001)


def record(identity="a", arrival=0.0, times=(), **fields) -> RequestRecord:
    """Return the record of a request that was finished with its last token."""
    fields = {"num_prompt_tokens": 1, "finish_reason": "length" if times else None, **fields}
    return RequestRecord(identity, arrival, tokens=(0,) * len(times), token_times=tuple(times), **fields)


def trace_of(*records: RequestRecord) -> Trace:
    return replace(NOTHING, requests=records)


def classic(policy: str) -> Trace:
    generator = random.Random(2024)
    lengths = [generator.randint(4, 12) for _ in range(60)]
    requests = [Request(id=str(place), prompt=1, max_tokens=length) for place, length in enumerate(lengths)]
    return simulate(requests, policy, scheduler=SchedulerConfig(max_num_seqs=8))


def random_run(seed: int, policy: str, cost=COST) -> Trace:
    """Return a run of random requests, some of which are rejected, in a pool that barely holds one."""
    generator = random.Random(seed)
    block_size = generator.choice((1, 3, 16))
    requests = [
        Request(
            id=str(place),
            prompt=generator.randint(1, 40),
            max_tokens=generator.randint(1, 25),
            arrival=generator.choice((0.0, generator.uniform(0, 2))),
            output_length=generator.randint(1, 25),
        )
        for place in range(generator.randint(1, 30))
    ]
    return simulate(
        requests,
        policy,
        cost=cost,
        scheduler=SchedulerConfig(generator.randint(1, 8), generator.choice((7, 64, 2048))),
        cache=CacheConfig(num_blocks=-(-generator.randint(40, 80) // block_size), block_size=block_size),
    )


def test_classic_workload_has_the_classic_occupancy_and_speed_up():
    released, padded, continuous = classic("static:release"), classic("static"), classic("fcfs")
    assert [len(trace.steps) for trace in (released, padded, continuous)] == [91, 91, 69]
    assert metrics.token_counts(released).output == metrics.token_counts(continuous).output == 510
    assert metrics.occupancy(released) == metrics.occupancy(padded) == pytest.approx(5.604, abs=5e-4)
    assert metrics.occupancy(continuous) == pytest.approx(7.391, abs=5e-4)
    assert metrics.speed_up(released, continuous) == pytest.approx(1.319, abs=5e-4)
    lengths = [len(request.tokens) for request in released.requests]
    assert metrics.speed_up(released, continuous) == pytest.approx(formulas.finite_speed_up(lengths, 8))


def test_static_utilization_approaches_mean_over_expected_maximum():
    generator = np.random.default_rng(5)
    requests = [
        Request(id=str(place), prompt=1, max_tokens=int(length))
        for place, length in enumerate(generator.integers(4, 13, 4000))
    ]
    trace = simulate(requests, "static", scheduler=SchedulerConfig(max_num_seqs=8))
    predicted = formulas.static_utilization(8, formulas.expected_max_uniform(4, 12, 8))
    assert metrics.utilization(trace) == pytest.approx(predicted, rel=0.01)
    # All seats are taken to the end of each batch, so what is not useful is padding.
    assert metrics.wasted_row_share(trace) == pytest.approx(1 - metrics.utilization(trace))


def test_sample_of_nothing_has_a_size_and_no_numbers():
    assert metrics.summarize([]) == metrics.Summary(n=0)
    assert metrics.percentile([], 99) is None


@pytest.mark.parametrize("sample", [[2.0], [1.0, 3.0], [1.0, 2.0, 10.0], list(range(20)), [4.0] * 5])
def test_summary_is_numpys(sample):
    got = metrics.summarize(iter(sample))
    assert got.n == len(sample)
    assert (got.mean, got.min, got.max) == (pytest.approx(np.mean(sample)), min(sample), max(sample))
    assert (got.p50, got.p90, got.p99) == pytest.approx([np.percentile(sample, q) for q in (50, 90, 99)])


@pytest.mark.parametrize(("sample", "p99"), [([5], 5), ([0, 1], 0.99), ([0, 1, 2], 1.98)])
def test_p99_of_few_values_is_interpolated_between_them(sample, p99):
    assert metrics.summarize(sample).p99 == pytest.approx(p99)


def test_extreme_percentiles_are_the_extremes():
    assert metrics.percentile([3, 1, 2], 0) == 1
    assert metrics.percentile([3, 1, 2], 100) == 3


@pytest.mark.parametrize("q", [-0.1, 100.1, 990, float("nan")])
@pytest.mark.parametrize("sample", [[], [1, 2]])
def test_percentile_outside_0_to_100_is_rejected(q, sample):
    with pytest.raises(ValueError, match=f"q is {q}"):
        metrics.percentile(sample, q)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_value_that_was_not_measured_is_rejected_rather_than_averaged(value):
    with pytest.raises((ValueError, TypeError)):
        metrics.summarize([1.0, value])


def test_one_token_has_no_time_per_output_token():
    trace = trace_of(
        record("a", times=[2.0]), record("b", times=[1.0, 4.0]), record("c", times=[1.0, 2.0, 4.0])
    )
    assert metrics.ttft(trace).n == metrics.latency(trace).n == 3
    assert (metrics.tpot(trace).n, metrics.tpot(trace).mean) == (2, pytest.approx((3 + 1.5) / 2))
    assert (
        metrics.tpot(trace_of(record(times=[2.0])))
        == metrics.itl(trace_of(record(times=[2.0])))
        == metrics.Summary(0)
    )


def test_itl_pools_the_gaps_that_tpot_averages_away():
    trace = trace_of(record("a", times=[1, 2, 3, 13]), record("b", times=[1, 2]))
    assert (metrics.itl(trace).n, metrics.itl(trace).max) == (4, 10)
    assert (metrics.tpot(trace).n, metrics.tpot(trace).max) == (2, 4)


def test_rejected_and_unfinished_requests_are_counted_and_not_measured():
    trace = trace_of(
        record("a", arrival=1.0, times=[3.0, 5.0]),
        RequestRecord("b", 0.0, error="request 'b' is too long"),
        record("c", arrival=2.0),
        record("d", arrival=2.0, times=[4.0], finish_reason=None),
    )
    got = metrics.summary(trace)
    assert (got["num_requests"], got["num_rejected"], got["num_finished"]) == (4, 1, 1)
    assert (got["ttft_n"], got["ttft_max_s"], got["latency_n"]) == (2, 2.0, 1)
    # The rejected request came first, but the run starts with the first that was served.
    assert got["makespan_s"] == 4.0
    assert got["output_throughput_tokens_per_s"] == 3 / 4
    assert got["total_throughput_tokens_per_s"] == (3 + 2) / 4
    assert got["request_throughput_requests_per_s"] == 1 / 4


def test_a_late_start_and_a_pause_count_as_the_run_has_them():
    requests = [Request("a", 1, 2, arrival=10.0), Request("b", 1, 2, arrival=16.0)]
    trace = simulate(requests)
    assert metrics.makespan(trace) == 8
    assert metrics.output_throughput(trace) == 0.5
    assert metrics.occupancy(trace) == 1
    assert metrics.time_weighted_occupancy(trace) == 0.5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_ttft_runs_from_arrival_to_the_first_token_ever_sampled(policy, seed):
    trace = random_run(seed, policy)
    first = {}
    for step in trace.steps:
        for entry in step.plan.scheduled:
            if entry.samples:
                first.setdefault(entry.request_id, step.end)
    waits = [first[request.id] - request.arrival for request in trace.served]
    assert metrics.ttft(trace) == metrics.summarize(waits)


def test_preemption_does_not_reset_ttft():
    roomy = [Request("a", 4, 12), Request("b", 4, 12)]
    calm = simulate(roomy, cache=CacheConfig(num_blocks=30, block_size=1))
    tight = simulate(roomy, cache=CacheConfig(num_blocks=16, block_size=1))
    assert metrics.num_preemptions(tight) > metrics.num_preemptions(calm) == 0
    assert metrics.ttft(tight) == metrics.ttft(calm)
    assert metrics.latency(tight).max > metrics.latency(calm).max


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(25))
def test_token_counts_reconcile(policy, seed):
    trace = random_run(seed, policy)
    counts = metrics.token_counts(trace)
    assert all(request.finish_reason for request in trace.served)
    assert counts.computed == counts.prompt + counts.output - len(trace.served) + counts.recomputed
    assert counts.computed + counts.padding == sum(step.plan.num_tokens for step in trace.steps)
    assert counts.output == sum(entry.samples for step in trace.steps for entry in step.plan.scheduled)
    assert (counts.recomputed > 0) <= (metrics.num_preemptions(trace) > 0)
    assert policy == "static" or counts.padding == 0


def test_random_runs_do_preempt_pad_and_reject():
    runs = [random_run(seed, policy) for seed in range(25) for policy in POLICIES]
    assert sum(metrics.token_counts(trace).recomputed > 0 for trace in runs) > 10
    assert sum(metrics.token_counts(trace).padding > 0 for trace in runs) > 10
    assert sum(len(trace.served) < len(trace.requests) for trace in runs) > 10


@pytest.mark.parametrize("seed", range(10))
def test_latency_is_ttft_and_the_gaps_after_it(seed):
    trace = random_run(seed, "fcfs")
    ttft, itl, latency = metrics.ttft(trace), metrics.itl(trace), metrics.latency(trace)
    assert ttft.n * ttft.mean + itl.n * (itl.mean or 0) == pytest.approx(latency.n * latency.mean)
    queue = metrics.queue_time(trace)
    assert (queue.n, queue.min >= 0, queue.mean < ttft.mean) == (ttft.n, True, True)


@pytest.mark.parametrize("seed", range(10))
def test_littles_law_holds_where_everyone_with_a_seat_is_served(seed):
    generator = np.random.default_rng(seed)
    arrivals = generator.exponential(0.05, 60).cumsum()
    requests = [
        Request(
            str(place), int(generator.integers(1, 30)), int(generator.integers(1, 30)), arrival=float(arrival)
        )
        for place, arrival in enumerate(arrivals)
    ]
    trace = simulate(requests, cost=COST)
    residence = [request.finish - request.first_scheduled for request in trace.served]
    rate = len(residence) / metrics.makespan(trace)
    assert metrics.time_weighted_occupancy(trace) == pytest.approx(
        formulas.occupancy_by_littles_law(rate, float(np.mean(residence)))
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_shares_are_shares(policy, seed):
    trace = random_run(seed, policy)
    got = metrics.summary(trace)
    for name in ("utilization", "time_weighted_utilization", "wasted_row_share", "mean_pool_use"):
        assert 0 <= got[name] <= 1, name
    for name in ("fragmentation", "time_weighted_fragmentation"):
        assert 0 <= got[name] < 1, name
    assert got["peak_kv_tokens"] <= trace.cache.num_tokens
    assert got["occupancy_rows"] <= trace.scheduler.max_num_seqs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_weightings_agree_when_every_step_takes_the_same_time(policy, seed):
    trace = random_run(seed, policy, cost=Linear(step=1.0))
    assert metrics.time_weighted_fragmentation(trace) == pytest.approx(metrics.fragmentation(trace))
    rows = sum(len(step.plan.scheduled) for step in trace.steps)
    assert metrics.time_weighted_occupancy(trace) * metrics.makespan(trace) == pytest.approx(rows)


def test_time_weights_follow_the_durations():
    # A step costs a second a token: the prompt of 4 takes 4 s, the one decode step 1 s.
    trace = simulate([Request("a", 4, 2), Request("b", 4, 1)], cost=Linear(step=0.0, token=1.0))
    assert [step.duration for step in trace.steps] == [8, 1]
    assert metrics.occupancy(trace) == 1.5
    assert metrics.time_weighted_occupancy(trace) == pytest.approx((2 * 8 + 1 * 1) / 9)
    assert metrics.time_weighted_utilization(trace) == pytest.approx(17 / 9 / 8)
    # Each request holds one block of 16; the second one's is gone after the first step.
    assert metrics.fragmentation(trace) == pytest.approx(1 - (8 + 5) / (32 + 16))
    assert metrics.time_weighted_fragmentation(trace) == pytest.approx(
        1 - (8 * 8 + 5 * 1) / (32 * 8 + 16 * 1)
    )


def test_fragmentation_is_counted_by_hand():
    # A prompt of 5 and 3 outputs: 5, 6 and 7 tokens held in two blocks of 4; the last output needs no KV.
    trace = simulate([Request("a", 5, 3)], cache=CacheConfig(num_blocks=8, block_size=4))
    assert metrics.fragmentation(trace) == pytest.approx(1 - (5 + 6 + 7) / (3 * 8))
    assert metrics.peak_kv_tokens(trace) == 8
    assert metrics.peak_kv_bytes(trace, 100) == 800
    assert metrics.mean_pool_use(trace) == 2 / 8


@pytest.mark.parametrize("policy", ["fcfs", "static:release"])
def test_blocks_of_one_token_do_not_fragment(policy):
    requests = [Request(str(place), place + 1, 3) for place in range(9)]
    trace = simulate(requests, policy, cache=CacheConfig(num_blocks=40, block_size=1))
    assert metrics.fragmentation(trace) == 0


def test_what_a_static_batch_keeps_of_the_finished_is_waste():
    requests = [Request("short", 4, 1), Request("long", 4, 5)]
    cache = CacheConfig(num_blocks=40, block_size=1)
    kept, released = (simulate(requests, policy, cache=cache) for policy in ("static", "static:release"))
    # Of 8 + 9 + ... + 12 tokens held, the short request's 4 are in vain in the four steps after its end.
    assert metrics.fragmentation(kept) == pytest.approx(16 / (8 + 9 + 10 + 11 + 12))
    assert metrics.fragmentation(released) == 0
    assert metrics.token_counts(kept).padding == 4
    assert metrics.wasted_row_share(kept) == pytest.approx(4 / 10)


def test_paged_fragmentation_formula_predicts_the_measured_one():
    generator = np.random.default_rng(11)
    prompts, outputs = generator.integers(1, 200, 300), generator.integers(1, 200, 300)
    requests = [
        Request(str(place), int(prompt), int(output))
        for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    trace = simulate(requests)
    held = formulas.time_mean_held_tokens(prompts, outputs) - 0.5
    assert metrics.fragmentation(trace) == pytest.approx(formulas.paged_fragmentation(held, 16), rel=0.02)


def test_speed_up_is_a_ratio_of_throughputs():
    slow, fast = classic("static"), classic("fcfs")
    assert metrics.speed_up(slow, slow) == 1
    assert metrics.speed_up(slow, fast) * metrics.speed_up(fast, slow) == pytest.approx(1)
    assert metrics.speed_up(NOTHING, fast) is None
    assert metrics.speed_up(slow, NOTHING) is None


@pytest.mark.parametrize("trace", [NOTHING, trace_of(RequestRecord("a", 0.0, error="too long"))])
def test_run_that_served_nobody_defines_counts_only(trace):
    for name, value in metrics.summary(trace, bytes_per_token=100).items():
        counted = name.startswith("num_") or name.endswith("_n")
        assert (value is None) != counted, name
    assert metrics.summary(trace)["num_rejected"] == len(trace.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_summary_survives_json_and_gives_every_percentile_its_n(policy):
    got = metrics.summary(random_run(3, policy), bytes_per_token=100)
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert {type(value) for value in got.values()} <= {int, float, type(None)}
    percentiles = [name for name in got if name.endswith(("_p50_s", "_p90_s", "_p99_s"))]
    assert len(percentiles) == 15
    assert all(got[f"{name[:-6]}_n"] for name in percentiles)


def test_bytes_are_undefined_without_a_models_shape():
    trace = classic("fcfs")
    assert metrics.summary(trace)["peak_kv_bytes"] is None
    assert metrics.summary(trace, 100)["peak_kv_bytes"] == 100 * metrics.peak_kv_tokens(trace)
    with pytest.raises(ValueError, match="bytes_per_token is 0"):
        metrics.peak_kv_bytes(trace, 0)


def test_kpi_table_puts_runs_side_by_side():
    rows = metrics.kpi_table({"static": classic("static"), "none": NOTHING, "fcfs": classic("fcfs")})
    table = {row.name: row for row in rows}
    assert table["mean occupancy"].values == ("5.604", "–", "7.391")
    assert table["utilization"][1:3] == ("%", ("70.05", "–", "92.39"))
    assert table["TTFT p50"].values == ("37,000", "–", "29,000")
    assert table["TTFT p50"].sizes == ("60", "0", "60")
    assert table["ITL p99"].sizes == ("450", "0", "450")
    assert table["peak KV memory"][1:3] == ("tokens", ("128", "–", "128"))
    assert table["requests served"].values == ("60", "0", "60")
    assert all(len(row.values) == 3 for row in rows)
    assert all(bool(row.sizes) == any(rank in row.name for rank in ("p50", "p99")) for row in rows)


def test_kpi_table_of_no_runs_has_rows_without_values():
    assert {row.values for row in metrics.kpi_table({})} == {()}


def test_kpi_table_counts_failed_and_aborted_requests_where_there_are_any():
    done = record("a", times=[1.0, 2.0])
    failed, aborted = record("b", times=[1.0], finish_reason="error"), record("c", finish_reason="abort")
    plain, broken = trace_of(done), trace_of(done, failed)
    names = [row.name for row in metrics.kpi_table({"plain": plain})]
    assert not {"requests failed", "requests aborted"} & set(names)
    table = {row.name: row.values for row in metrics.kpi_table({"plain": plain, "broken": broken})}
    assert table["requests failed"] == ("0", "1") and "requests aborted" not in table
    rows = metrics.kpi_table({"all": trace_of(done, failed, aborted, aborted)})
    table = {row.name: row.values for row in rows}
    assert [table[f"requests {kind}"] for kind in ("served", "rejected", "failed", "aborted")] == [
        ("1",),
        ("0",),
        ("1",),
        ("2",),
    ]
    assert [row.name for row in rows if row.name not in ("requests failed", "requests aborted")] == names


def test_kpi_table_gives_memory_in_bytes_where_the_model_is_known():
    rows = metrics.kpi_table({"fcfs": classic("fcfs")}, bytes_per_token=2**20)
    assert ("peak KV memory", "MiB", ("128",), ()) in rows
