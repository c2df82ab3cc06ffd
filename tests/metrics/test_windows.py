"""A window of a run: what every reader says of it, and that windows which follow one another are the run."""

import json
import math
import random
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, export, metrics, simulate, trace, viz
from cbresearch.cluster import ReplicaConfig, simulate_cluster
from cbresearch.costs import Linear
from cbresearch.request import Rejected
from cbresearch.simulator import replan
from cbresearch.step import DecodeRun
from cbresearch.trace import RequestRecord, Trace
from cbresearch.viz.memory import BlockMap
from cbresearch.viz.player import player_data
from cbresearch.viz.timeline import seat_stays

COST = Linear(step=0.01, token=0.001, context=0.0001)
COUNTS = [
    "num_finished", "num_requests", "num_rejected", "num_aborted", "num_failed", "num_steps",
    "num_output_tokens", "num_prefill_tokens", "num_decode_tokens", "num_prompt_tokens", "num_padding_tokens",
    "num_cached_tokens", "num_recomputed_tokens", "num_preemptions", "num_swapped_out_blocks",
    "num_swapped_in_blocks", "num_copied_blocks",
    *(f"{measure}_n" for measure in ("ttft", "tpot", "itl", "latency", "queue_time")),
]  # fmt: skip


def run_of(kind):
    """Return a run under pressure that shows what its name says."""
    generator = random.Random(kind)
    prefix = tuple(range(100, 108))
    requests = [
        Request(
            str(place),
            (*prefix[: generator.choice((0, 8))], *(generator.randrange(50) for _ in range(5))),
            generator.randint(1, 30),
            generator.uniform(0, 1.0),
            output_length=generator.randint(1, 30),
        )
        for place in range(40)
    ]
    requests += [Request("too long", 999, 9, 0.3), Rejected("line", "no request", 0.6)]
    limits = SchedulerConfig(6, 24, preemption="swap" if kind == "swap" else "recompute")
    pool = CacheConfig(28, 4, prefix_caching=kind == "cached", num_host_blocks=40 if kind == "swap" else 0)
    policy = kind if kind.startswith("static") else "fcfs"
    return simulate(requests, policy, cost=COST, scheduler=limits, cache=pool)


def aborted_run():
    """Return a run of which one request was aborted, and one never ended."""
    whole = run_of("plain")
    victims = {whole.requests[0].id: "abort", whole.requests[1].id: None}
    requests = tuple(
        replace(each, finish_reason=victims[each.id]) if each.id in victims else each
        for each in whole.requests
    )
    moment = next(place for place, step in enumerate(whole.steps) if step.start > 0.7)
    keep = tuple(
        replace(each, finished=tuple(name for name in each.finished if name not in victims))
        for each in whole.steps
    )
    step = replace(keep[moment], plan=replace(keep[moment].plan, aborted=(whole.requests[0].id,)))
    return replace(whole, steps=(*keep[:moment], step, *keep[moment + 1 :]), requests=requests)


RUNS = {kind: run_of(kind) for kind in ("plain", "static", "static:release", "cached", "swap")}


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def cuts_of(run):
    """Return moments to cut at: inside a step, between two, and inside a decode run if there is one."""
    longest = max((part for part in run.parts if isinstance(part, DecodeRun)), key=len, default=None)
    inside = [] if longest is None or len(longest) < 3 else [longest.ends[1] + 1e-4, longest.ends[1]]
    return [run.duration * share for share in (0.1, 0.37, 0.62)] + inside


def test_windows_that_follow_one_another_add_up_to_the_run(run):
    whole = metrics.summary(run)
    for cut in cuts_of(run):
        parts = [run.between(0.0, cut), run.between(cut)]
        found = [metrics.summary(part) for part in parts]
        for name in COUNTS:
            assert sum(each[name] for each in found) == whole[name], name
        busy = [part.step_columns["duration_s"].sum() for part in parts]
        assert sum(busy) == pytest.approx(run.step_columns["duration_s"].sum())
        rows = [
            each["time_weighted_occupancy_rows"] * part.duration
            for each, part in zip(found, parts, strict=True)
        ]
        served = float(run.step_columns["num_scheduled"] @ run.step_columns["duration_s"])
        assert sum(rows) == pytest.approx(served)
        waits = [metrics.mean_queue_length(part) * part.duration for part in parts]
        assert sum(waits) == pytest.approx(sum(each.first_scheduled - each.arrival for each in run.served))
        assert [part.requests for part in parts] != [(), ()]
        assert sorted(r.id for part in parts for r in part.requests) == sorted(r.id for r in run.requests)


def test_throughput_of_a_window_is_its_tokens_over_its_length(run):
    times = np.array([when for record in run.requests for when in record.token_times])
    for begin in cuts_of(run):
        end = (begin + run.duration) / 2
        for window, last in ((run.between(begin, end), end), (metrics.without_warm_up(run, begin), math.inf)):
            inside = (times >= begin) & (times < last)
            rate = inside.sum() / (min(last, run.duration) - begin)
            assert metrics.output_throughput(window) == pytest.approx(rate)
            ended = [r for r in run.served if r.is_complete and begin <= r.finish < last]
            assert metrics.ttft(window) == metrics.summarize([r.ttft for r in ended])
            assert metrics.queue_time(window) == metrics.summarize(
                [r.first_scheduled - r.arrival for r in ended]
            )
            assert metrics.itl(window) == metrics.summarize([gap for r in ended for gap in r.itl])
            assert metrics.request_throughput(window) == pytest.approx(len(ended) / window.duration)
            slo = metrics.Slo(ttft=0.4)
            kept = sum(r.ttft <= 0.4 for r in ended)
            assert metrics.goodput(window, slo) == pytest.approx(kept / window.duration)


def test_an_overloaded_server_gives_out_tokens_at_its_known_rate():
    # Every step takes 0.1 s and serves 4 requests; four arrive for each that can be served.
    rng = np.random.default_rng(1)
    arrivals, lengths = rng.exponential(1 / 8, 400).cumsum(), rng.integers(10, 30, 400)
    requests = [Request(str(n), 1, int(lengths[n]), float(arrivals[n])) for n in range(400)]
    run = simulate(requests, "fcfs", cost=Linear(step=0.1), scheduler=SchedulerConfig(4))
    for begin, end in ((10.0, 60.0), (33.33, 34.0), (20.05, 25.0)):
        window = run.between(begin, end)
        assert metrics.output_throughput(window) == pytest.approx(40.0, abs=4 / (end - begin))
        assert metrics.occupancy(window) == pytest.approx(4.0)
        assert metrics.time_weighted_utilization(window) == pytest.approx(1.0)
        assert 0 < metrics.summary(window)["ttft_n"] < 400


def test_steps_at_the_edges_weigh_by_their_part():
    run = simulate([Request("a", 1, 4), Request("b", 1, 2)], "fcfs", cost=Linear(step=1.0))
    # Two rows in the steps to 2 s, one from there to 4 s.
    window = run.between(1.5, 2.25)
    assert metrics.time_weighted_occupancy(window) == pytest.approx((2 * 0.5 + 1 * 0.25) / 0.75)
    assert metrics.occupancy(window) == pytest.approx((2 * 0.5 + 1 * 0.25) / 0.75)
    assert window.step_columns["share"].tolist() == [0.5, 0.25]
    assert window.num_ended_steps == 1 and metrics.token_counts(window).output == 2
    assert [record.id for record in window.requests] == ["b"]


def test_memory_of_a_window_is_that_of_the_runs_steps(run):
    everything = list(metrics.memory(run))
    for begin in cuts_of(run):
        window = run.between(begin, (begin + run.duration) / 2)
        first = window.first_step
        assert list(metrics.memory(window)) == everything[first : first + len(window.steps)]
        assert all(min(use) >= 0 for use in metrics.memory(window))
        shares = metrics.memory_shares(window)
        assert sum(list(shares.values())[:6]) == pytest.approx(1.0)
        assert list(window.steps) == list(run.steps[first : first + len(window.steps)])


def test_stays_and_blocks_of_a_window_are_those_of_the_runs_steps(run):
    def seats_of(part):
        return {
            (step, stay.seat): (stay.request_id, span.kind)
            for stay in seat_stays(part)
            for span in stay.spans
            for step in range(span.first, span.end)
        }

    def held(tables, step):
        return sorted((t.request_id, t.on_host, t.held(step)) for t in tables if t.held(step))

    everything, blocks = seats_of(run), BlockMap.of(run.steps)
    tokens = {
        (stay.request_id, stay.first): stay.num_tokens_before for stay in seat_stays(run) if stay.first > 0
    }
    for begin in cuts_of(run):
        window = run.between(begin, (begin + run.duration) / 2)
        first, number = window.first_step, len(window.steps)
        assert seats_of(window) == {
            (step - first, seat): what
            for (step, seat), what in everything.items()
            if first <= step < first + number
        }
        part = BlockMap.of((record for _, record in window.steps_so_far()), -first)
        for step in range(0, number, 3):
            assert held(part.tables, step) == held(blocks.tables, first + step)
            cached = {span.block for span in part.cached if span.first <= step < span.end}
            assert cached == {s.block for s in blocks.cached if s.first <= first + step < s.end}
        assert all(0 <= span.first < span.end <= number for span in part.cached)
        before = {stay.request_id: stay.num_tokens_before for stay in seat_stays(window) if not stay.first}
        times = {record.id: record.token_times for record in run.requests}
        for name, count in before.items():
            assert count == sum(when <= window.steps[0].start + 1e-9 for when in times[name])
        assert tokens or not before
        for stay in export.stays_of(window):
            assert 0 <= stay.first_step <= stay.last_step < number
            assert stay.num_padding_steps <= stay.last_step - stay.first_step + 1


@pytest.mark.parametrize("kind", [*RUNS, "aborted"])
def test_every_reader_takes_a_window(kind, tmp_path):
    run = aborted_run() if kind == "aborted" else RUNS[kind]
    begin, end = cuts_of(run)[1], 0.8 * run.duration
    for window in (metrics.without_warm_up(run, begin), run.between(begin, end), run.between(begin, begin)):
        path = tmp_path / "trace.jsonl.gz"
        assert trace.load(window.save(path)) == window
        assert metrics.summary(trace.load(path)) == metrics.summary(window)
        metrics.kpi_table({"a": window}, reporting=metrics.Reporting(metrics.Slo(ttft=1.0), 2.0))
        events = export.to_chrome(window)["traceEvents"]
        steps = [event for event in events if event.get("cat") == "step"]
        assert len(steps) == len(window.steps)
        allowed = [(step.start, step.end) for step in window.steps] or [(0.0, 0.0)]
        for event in events:
            if event["ph"] == "X":
                assert allowed[0][0] - 1e-6 <= event["ts"] / 1e6
                assert (event["ts"] + event["dur"]) / 1e6 <= allowed[-1][1] + 1e-6
        count = metrics.token_counts(window).output
        assert f'vllm:generation_tokens_total{{policy="{run.policy}"}} {count}\n' in export.prometheus(window)
        for record in run.requests:
            assert export.explain(window, record.id) == export.explain(run, record.id)
        assert len(window.steps_frame()) == len(window.steps)
        assert len(window.requests_frame()) == len(window.requests)
        json.dumps(player_data({"a": window, "b": run}), allow_nan=False)


def test_a_report_tells_of_windows(tmp_path):
    run = RUNS["swap"]
    for number, window in enumerate((run.between(0.5, 1.0), run.between(0.5, 0.5))):
        path = viz.write_report(
            tmp_path / f"{number}.html", title="t", traces={"window": window, "run": RUNS["static"]}
        )
        assert path.stat().st_size > 10_000


def test_figures_of_a_window_begin_where_it_does():
    run = RUNS["plain"]
    window = run.between(0.5, 1.0)
    for draw in (viz.seats, viz.occupancy, viz.kv_memory, viz.kv_categories):
        fig = draw(window)
        scale = 1000 if fig.axes[-1].get_xlabel().endswith("(ms)") else 1
        low, high = fig.axes[-1].get_xlim()
        assert low == pytest.approx(0.5 * scale) and high == pytest.approx(scale, rel=0.05)
        plt.close(fig)
        plt.close(draw(window, time="step"))


def test_the_player_counts_a_windows_time_and_tokens_from_its_beginning():
    run = RUNS["plain"]
    window = run.between(0.5, 1.0)
    (shown,) = player_data({"a": window})["runs"]
    assert shown["duration"] == pytest.approx(0.5) and shown["tokens"] == metrics.token_counts(window).output
    assert shown["start"][1] == 0 and 0 < shown["end"][0] < 0.1
    numbers = player_data({"a": window})["requests"]
    assert min(arrival for arrival, *_ in numbers) == 0


def test_an_aborted_request_ends_where_the_steps_say():
    run = aborted_run()
    aborted, unfinished = run.requests[:2]
    early, late = run.between(0.0, 0.69), run.between(0.69)
    assert aborted in late.requests and aborted not in early.requests
    assert unfinished in late.requests and unfinished not in run.between(0.0, 1.0).requests


def test_a_window_without_steps_or_ends_has_no_figures_but_rates_of_nothing():
    run = simulate([Request("a", 1, 3), Request("b", 1, 3, arrival=50.0)], "fcfs", cost=Linear(step=1.0))
    idle = run.between(10.0, 20.0)
    values = metrics.summary(idle)
    assert len(idle.steps) == len(idle.requests) == 0
    assert values["output_throughput_tokens_per_s"] == values["time_weighted_occupancy_rows"] == 0
    assert values["occupancy_rows"] is values["fragmentation"] is values["ttft_p50_s"] is None
    assert metrics.mean_in_system(idle) == 0
    decoding = run.between(0.5, 1.5)
    assert metrics.output_throughput(decoding) == 1.0 and metrics.ttft(decoding).n == 0
    beyond = metrics.without_warm_up(run, 99.0)
    assert metrics.output_throughput(beyond) is None and metrics.summary(beyond)["num_steps"] == 0
    for begin, end in ((-1.0, 2.0), (3.0, 2.0), (math.nan, 1.0), (0.0, math.nan), (math.inf, math.inf)):
        with pytest.raises(ValueError, match="the window is"):
            run.between(begin, end)
    for odd in ("a", None, [], 1j):
        with pytest.raises(ValueError, match=r"the window is .* to inf; give seconds"):
            metrics.without_warm_up(run, odd)
        with pytest.raises(ValueError, match=r"the window is 0\.0 to"):
            run.between(0.0, odd)


def test_the_run_of_a_window_is_planned_anew():
    run = RUNS["swap"]
    assert replan(run.between(0.5, 1.0)) == replan(run) and replan(run).first_difference is None


def test_a_window_of_a_window_is_their_common_part():
    run = RUNS["plain"]
    assert run.between(0.2, 1.0).between(0.5, 2.0) == run.between(0.5, 1.0)
    assert run.between(0.2).between(0.5) == run.between(0.5)
    assert len(run.between(0.2, 0.5).between(0.7).steps) == 0


def test_a_cluster_without_steps_of_its_own_has_windows_too():
    requests = [Request(str(place), 8, 10, 0.05 * place) for place in range(20)]
    replica = ReplicaConfig(COST, SchedulerConfig(2, 64), CacheConfig(40, 4))
    run = simulate_cluster(requests, [replica, replica]).trace
    parts = [run.between(0.0, 0.5), run.between(0.5)]
    assert sum(metrics.token_counts(part).output for part in parts) == 200
    assert sum(metrics.latency(part).n for part in parts) == 20
    assert metrics.output_throughput(parts[1]) == pytest.approx(
        sum(when >= 0.5 for r in run.requests for when in r.token_times) / (run.end - 0.5)
    )
    assert metrics.mean_in_system(run) > 1


def test_a_moment_on_an_edge_belongs_to_the_later_window():
    records = (RequestRecord("a", 0.0, 1, 2, tokens=(1, 2), token_times=(1.0, 2.0), finish_reason="length"),)
    run = Trace("fcfs", SchedulerConfig(), CacheConfig(num_blocks=4), requests=records)
    assert [metrics.token_counts(part).output for part in (run.between(0, 1.0), run.between(1.0, 2.0))] == [
        0, 2,
    ]  # fmt: skip
    assert run.between(0, 1.5).requests == () and run.between(1.5, 2.0).requests == records
