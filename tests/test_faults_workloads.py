"""Kinds of faults that other servers had in their workloads; each test's name is the claim."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from cbresearch import metrics, workloads
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Refusal, Request
from cbresearch.simulator import simulate
from cbresearch.workloads import Fixed, Gamma, Lognormal, OnOff, Poisson, Prefixes, make_requests

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
EPOCH = 1_700_158_546.0

N = 50_000


def rng(seed=0):
    return np.random.default_rng(seed)


def load(tmp_path, *lines, name="trace.csv", options=""):
    path = tmp_path / name
    path.write_text("\n".join([*lines, ""]))
    return workloads.load(f"{path}{options}", rng())


def served(requests):
    return simulate(requests, cost=Linear(step=0.02), scheduler=SchedulerConfig(2, 512))


# --- one clock


@pytest.mark.parametrize(
    "lines",
    [
        (
            AZURE,
            "2023-11-16 18:15:46.5000000,4,3",
            "2023-11-16 18:15:47.0000000,4,3",
            "2023-11-16 18:15:50,4,3",
        ),
        (VIDUR, f"{EPOCH},4,3", f"{EPOCH + 0.5},4,3", f"{EPOCH + 3.5},4,3"),
        (BURSTGPT, f"{EPOCH},m,4,3,7,x", f"{EPOCH + 0.5},m,4,3,7,x", f"{EPOCH + 3.5},m,4,3,7,x"),
    ],
)
def test_a_trace_that_counts_from_an_epoch_begins_at_0_and_keeps_its_span(tmp_path, lines):
    requests = load(tmp_path, *lines)
    assert [request.arrival for request in requests] == [0.0, 0.5, 3.5]
    assert [record.ttft for record in served(requests).requests] == pytest.approx([0.02] * 3)


def test_a_workload_file_on_the_clock_of_an_epoch_is_served_whole_and_with_the_same_waits(tmp_path):
    # The run's clock jumps to the first arrival; deadlines are on the same clock as arrivals.
    traces = []
    for start in (0.0, EPOCH):
        lines = [
            json.dumps({"prompt": 4, "max_tokens": 3, "arrival": start + gap, "deadline": start + gap + 9})
            for gap in (0.0, 0.01, 0.01, 5.0)
        ]
        traces.append(served(load(tmp_path, *lines, name="work.jsonl")))
    for early, late in zip(*(trace.requests for trace in traces), strict=True):
        assert late.is_complete
        assert late.ttft == pytest.approx(early.ttft, abs=1e-5)


def test_a_deadline_that_counts_from_the_arrival_is_refused_instead_of_missed(tmp_path):
    line = {"prompt": 4, "max_tokens": 3, "arrival": EPOCH, "deadline": 2.5}
    (refused,) = load(tmp_path, json.dumps(line), name="work.jsonl")
    assert "deadline is 2.5, before the arrival" in refused.error


# --- a rate scales intervals; ids fit the length; the order is repaired or refused


@pytest.mark.parametrize("factor", [0.5, 2.0, 7.0])
def test_twice_the_rate_is_half_the_interval_and_never_twice_the_time(tmp_path, factor):
    times = [0.0, 1.5, 1.5, 4.0, 10.0]
    requests = load(tmp_path, VIDUR, *[f"{time},4,3" for time in times], options=f":speed={factor}")
    assert [request.arrival for request in requests] == pytest.approx([time / factor for time in times])
    assert len(requests) / requests[-1].arrival == pytest.approx(factor * 5 / 10)


def test_ids_that_do_not_fit_the_length_are_refused(tmp_path):
    line = {"timestamp": 0, "input_length": 1025, "output_length": 3, "hash_ids": [1, 2]}
    (refused,) = load(tmp_path, json.dumps(line), name="trace.jsonl")
    assert "hash_ids has 2 ids, but input_length 1025 makes 3 blocks" in refused.error


def test_rows_out_of_order_are_served_in_order_of_arrival_and_no_time_is_negative(tmp_path):
    trace = served(load(tmp_path, VIDUR, "5.0,4,3", "1.0,4,3", "3.0,4,3"))
    starts = [(record.id, record.first_scheduled) for record in trace.requests]
    assert starts == [("1", 0.0), ("2", 2.0), ("0", 4.0)]


# --- the rate that was asked for


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("process", "squared_variation"),
    [
        (Poisson(200.0), 1.0),
        (Gamma(200.0, 0.5), 2.0),
        (Gamma(200.0, 4.0), 0.25),
        (OnOff(200.0, 1.0, 1.0), None),
    ],
)
def test_the_measured_rate_the_span_and_the_variation_are_those_asked_for(process, squared_variation, seed):
    times = process(rng(seed), N)
    gaps = np.diff(times, prepend=0.0)
    # For the bursts, the variance of the count is its dispersion times that of a Poisson process.
    dispersion = squared_variation if squared_variation is not None else process.dispersion(1e9)
    assert len(times) == N
    assert N / times[-1] == pytest.approx(200.0, rel=4 * math.sqrt(dispersion / N))
    if squared_variation is not None:
        # A truncated exponential has a rate 5.24 % too high, and 0.774 here.
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared_variation, rel=0.05)


@pytest.mark.parametrize("process", [Poisson(200.0), Gamma(200.0, 0.3), OnOff(200.0, 1.0, 4.0)])
def test_no_process_ends_before_all_requests_have_come(process):
    requests = make_requests(process, (Fixed(4), Fixed(3)), 1000, rng())
    trace = simulate(requests, cost=Linear(step=1e-4), scheduler=SchedulerConfig(64, 512))
    assert len(trace.served) == 1000
    # Arrivals are absolute, so that a slow server delays nobody's arrival.
    slow = simulate(requests, cost=Linear(step=0.1), scheduler=SchedulerConfig(64, 512))
    assert [r.arrival for r in slow.requests] == [r.arrival for r in trace.requests]


# --- exact lengths, and as much sharing as asked


def test_every_prompt_has_exactly_the_tokens_that_were_drawn_and_survives_a_vocabulary():
    lengths = (Lognormal(60, 0.8, 400), Fixed(3))
    plain = make_requests(Poisson(1.0), lengths, 200, rng(3))
    prefixed = make_requests(Poisson(1.0), lengths, 200, rng(3), prefixes=Prefixes(4, Fixed(32)))
    assert [len(p.prompt) - 32 for p in prefixed] == [request.prompt for request in plain]
    for requests in (plain, prefixed):
        resolved = workloads.resolve_prompts(requests, None, 256, rng())
        assert [len(r.prompt) for r in resolved] == [r.num_prompt_tokens for r in requests]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize("prefix", [16, 64, 250])
def test_prompts_share_what_was_asked_for_and_nothing_else(prefix, exponent):
    prefixes = Prefixes(5, Fixed(prefix), exponent)
    requests = make_requests(Poisson(1e-3), (Fixed(100), Fixed(2)), 80, rng(), prefixes=prefixes)
    distinct = len({request.prompt[:prefix] for request in requests})
    trace = simulate(
        requests, scheduler=SchedulerConfig(4, 2048), cache=CacheConfig(4096, 16, prefix_caching=True)
    )
    # Whole blocks are found, and each prefix is computed once; a prefix never swallows a prompt of its own.
    found = [record.num_cached_tokens for record in trace.requests]
    assert sum(found) == (80 - distinct) * (prefix // 16 * 16)
    assert max(found) <= prefix


def test_without_prefixes_nothing_is_shared():
    requests = workloads.resolve_prompts(
        make_requests(Poisson(1e-3), (Fixed(100), Fixed(2)), 50, rng()), None, 4096, rng()
    )
    trace = simulate(requests, cache=CacheConfig(4096, 16, prefix_caching=True))
    assert sum(record.num_cached_tokens for record in trace.requests) == 0


# --- outputs are as long as the trace says


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((AZURE, "2023-11-16 18:15:46,4,7"), "trace.csv"),
        ((VIDUR, "0.0,4,7"), "trace.csv"),
        ((BURSTGPT, "5,GPT-4,4,7,11,API log"), "trace.csv"),
        (('{"timestamp": 0, "input_length": 4, "output_length": 7, "hash_ids": [3]}',), "trace.jsonl"),
    ],
)
def test_an_answer_of_a_trace_ends_neither_before_nor_after_its_length(tmp_path, lines, name):
    (request,) = load(tmp_path, *lines, name=name)
    assert (request.max_tokens, request.output_length, request.sampling.ignore_eos) == (7, 7, True)
    assert not request.sampling.stop and not request.sampling.stop_token_ids
    assert len(simulate([request]).requests[0].tokens) == 7


def test_a_model_that_would_stop_at_once_goes_on_to_the_length_of_the_trace(tmp_path, tiny):
    from cbresearch.experiments import compare

    plain = Request("a", (5, 6, 7), 9)
    first = compare([plain], "fcfs", model=tiny).traces["fcfs"].requests[0].tokens
    (traced,) = load(tmp_path, VIDUR, "0.0,3,9")
    stopping = replace(tiny, eos_token_ids=frozenset({first[0]}))
    requests = [plain, Request("b", plain.prompt, traced.max_tokens, sampling=traced.sampling)]
    stopped, forced = compare(requests, "fcfs", model=stopping).traces["fcfs"].requests
    assert len(stopped.tokens) == 1
    assert forced.tokens == first


# --- no output, one token, no spread


def test_an_output_of_nothing_is_refused_and_one_of_a_single_token_has_no_time_per_token(tmp_path):
    nothing, single, two = load(tmp_path, VIDUR, "0.0,4,0", "0.0,4,1", "0.0,4,2")
    assert isinstance(nothing, Refusal)
    trace = served([nothing, single, two])
    records = {record.id: record for record in trace.requests}
    assert records["0"].is_refused
    assert (len(records["1"].tokens), records["1"].tpot) == (1, None)
    assert records["2"].tpot == pytest.approx(0.02)
    # Neither a refused nor a single token is counted as a time of 0.
    assert metrics.summary(trace)["num_refused"] == 1


def test_lengths_and_gaps_without_any_spread_are_allowed():
    assert Lognormal(54, 0, 54)(rng(), 50).tolist() == [54] * 50
    assert workloads.Geometric(5.0, minimum=5)(rng(), 50).tolist() == [5] * 50
    assert workloads.Uniform(5, 5)(rng(), 50).tolist() == [5] * 50
    assert workloads.Quantiles(5, ((0, 5), (1, 5)))(rng(), 50).tolist() == [5] * 50
    requests = make_requests(workloads.AtOnce(), (Fixed(4), Fixed(1)), 5, rng())
    assert [len(record.tokens) for record in simulate(requests).requests] == [1] * 5
