"""The player carries what the trace holds, says what it leaves out, and shows any text as text."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from helpers.block_events import recorded
from helpers.demo_runs import Page, classic, hostile, pairs, pressed, seats_by_step, swapping_case, triples
from hygiene import printed_by_two_processes

from cbresearch import metrics, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Rejected, Request
from cbresearch.simulator import simulate
from cbresearch.viz.memory import BlockMap
from cbresearch.viz.player import TRANSFERS, Bounds, packed, player_data


def swapping(policy):
    requests, limits, cache = swapping_case()
    return recorded(requests, policy, limits, cache, cost=Linear(step=0.003, token=0.0001))[0]


def unpacked(column):
    if column and isinstance(column[0], list):
        (flat,) = column
        return [value for place in range(0, len(flat), 2) for value in [flat[place]] * flat[place + 1]]
    return column


def grown(growth, offset):
    return max((number for begin, number in pairs(growth) if begin <= offset), default=0)


RUNS = [
    (workload, policy)
    for workload in (classic, pressed, swapping)
    for policy in ("static", "static:release", "prefill_first", "sjf", "fcfs")
]


@pytest.mark.parametrize(("workload", "policy"), RUNS)
def test_each_step_is_carried_as_it_was_planned(workload, policy):
    trace = workload(policy)
    data = player_data({"a": trace})
    (run,) = data["runs"]
    tokens = Counter()
    for record, shown in zip(trace.steps, seats_by_step(run, data["ids"]), strict=True):
        for entry in record.plan.scheduled:
            tokens[entry.request_id] += entry.samples
            prompt = entry.num_tokens if entry.is_prefill else 0
            assert shown[entry.seat] == (entry.request_id, "served", prompt, tokens[entry.request_id])
        padding = {row.seat: row.request_id for row in record.plan.padding}
        assert {seat: cell[0] for seat, cell in shown.items() if cell[1] == "padding"} == padding
        served = {entry.seat for entry in record.plan.scheduled}
        held = [seat for seat, cell in shown.items() if cell[1] == "held"]
        assert len(served) + len(held) >= record.num_running
        assert not served & set(held)
    assert sum(stay[3] == 1 for stay in run["stays"]) == metrics.num_preemptions(trace)
    for name, value in (
        ("waiting", lambda record: record.num_waiting),
        ("held", lambda record: record.num_held_blocks),
        ("kv", lambda record: record.num_held_tokens),
        ("cached", lambda record: record.num_cached_blocks),
        ("swapped", lambda record: record.num_swapped),
        ("hosted", lambda record: record.num_held_host_blocks),
    ):
        assert unpacked(run[name]) == [value(record) for record in trace.steps], name
    ends = [time for request in trace.requests for time in request.token_times]
    assert unpacked(run["out"]) == [sum(time <= record.end for time in ends) for record in trace.steps]
    assert run["tokens"] == len(ends)
    assert run["end"] == pytest.approx([record.end for record in trace.steps], rel=1e-8)


@pytest.mark.parametrize("policy", ["static", "fcfs", "sjf"])
def test_tables_cached_blocks_and_transfers_are_carried_whole(policy):
    trace = swapping(policy)
    data = player_data({"a": trace})
    (run,) = data["runs"]
    carried = [Counter() for _ in trace.steps]
    for request, on_host, first, end, blocks, growth, losses in run["tables"]:
        for step in range(first, end):
            number, lost = grown(growth, step - first), grown(losses, step - first)
            carried[step][data["ids"][request], on_host, tuple(blocks[lost:number])] += 1
    expected = [Counter() for _ in trace.steps]
    blocks = BlockMap.of(trace.steps)
    for table in blocks.tables:
        for step in range(table.first, table.end):
            expected[step][table.request_id, table.on_host, tuple(table.held(step))] += 1
    assert carried == expected
    cached = [set() for _ in trace.steps]
    for first, *flat in run["prefixes"]:
        for block, number in pairs(flat):
            for step in range(first, first + number):
                assert block not in cached[step]
                cached[step].add(block)
    assert [len(found) for found in cached] == unpacked(run["cached"]) and any(cached)
    transfers = {
        step: [(TRANSFERS[kind], source, target) for kind, source, target in triples(flat)]
        for step, *flat in run["transfers"]
    }
    assert transfers == {
        step: [tuple(transfer) for transfer in record.plan.transfers]
        for step, record in enumerate(trace.steps)
        if record.plan.transfers
    }
    assert {kind for moved in transfers.values() for kind, _, _ in moved} >= {"swap_out", "swap_in"}


@pytest.mark.parametrize(("workload", "policy"), RUNS)
def test_reasons_add_up_to_everyone_who_is_not_served(workload, policy):
    trace = workload(policy)
    (run,) = player_data({"a": trace})["runs"]
    said = {step: (idle, waiting) for step, idle, waiting in run["reasons"]}
    idle = waiting = {}
    for step, record in enumerate(trace.steps):
        idle, waiting = said.get(step, (idle, waiting))
        served = {entry.request_id for entry in record.plan.scheduled}
        lost = set(record.plan.preempted) - served
        assert sum(waiting.values()) == record.num_waiting - len(lost)
        assert sum(idle.values()) == record.num_running - len(served)
        assert Counter(idle) + Counter(waiting) == +record.num_skipped()


def test_key_figures_and_predictions_are_those_of_the_report():
    traces = {policy: classic(policy) for policy in ("static", "fcfs")}
    data = player_data(traces, [("speed-up", 1.3, 1.319, 0.0146), ("other", 2, None, None)])
    table = metrics.kpi_table(traces)
    assert data["kpi"] == [[row.name, row.unit, list(row.values), list(row.sizes)] for row in table]
    assert data["predictions"] == [["speed-up", "1.3", "1.319", "+1.46 %"], ["other", "2", "–", "–"]]
    backwards = player_data(dict(reversed(traces.items())))
    assert backwards["speedups"] == data["speedups"]
    assert data["speedups"] == [["fcfs", "static", f"{metrics.speed_up(*traces.values()):.4g}"]]


def test_the_workload_is_that_of_all_runs():
    requests = [Request("long", 40, 9), *(Request(f"r{n}", 4, 5) for n in range(3))]
    pools = (CacheConfig(4), CacheConfig(2), CacheConfig(1, 4))
    roomy, small, none = (simulate(requests, cache=pool) for pool in pools)
    other = simulate([Request("x", 4, 7)])
    for traces, expected in (
        ([roomy, roomy], (4, 24, True, True)),
        ([small, roomy], (4, 24, True, False)),
        ([none, small], (3, 15, True, False)),
        ([none], (0, 0, True, True)),
        ([other, small], (4, 22, False, False)),
    ):
        work = player_data({str(place): trace for place, trace in enumerate(traces)})["workload"]
        assert (work["requests"], work["output"], work["is_shared"], work["is_served_by_all"]) == expected


def test_a_moment_of_the_host_between_steps_is_no_idle_time():
    requests = [Request("a", 4, 3), Request("b", 4, 3), Request("c", 4, 2, arrival=100.0)]
    trace = simulate(requests, "fcfs", cost=Linear(step=1.0))
    steps = tuple(replace(record, duration=0.9) for record in trace.steps)
    (run,) = player_data({"a": replace(trace, steps=steps)})["runs"]
    assert list(pairs(run["start"])) == [(0, 0), (3, 100)]


def test_a_run_of_leaps_is_carried_like_one_of_steps():
    requests = [Request(f"r{n}", 5 + n, 30 + n, arrival=7.0 * n) for n in range(12)]
    limits, cache = SchedulerConfig(4, 64), CacheConfig(14, 4)
    one, other = (
        player_data({"a": simulate(requests, "fcfs", scheduler=limits, cache=cache, fast_forward=leaps)})
        for leaps in (True, False)
    )
    assert one == other


def test_a_long_run_is_bounded_and_says_what_is_left_out():
    traces = {policy: classic(policy) for policy in ("static", "fcfs")}
    bounds = Bounds(steps=70, requests=5, table_entries=20)
    data = player_data(traces, bounds=bounds)
    static, fcfs = data["runs"]
    assert (len(static["end"]), static["steps"]) == (70, 91)
    assert len(fcfs["end"]) == fcfs["steps"] == 69
    assert all(end <= 70 for *_, end, _, _, _ in static["tables"])
    for run in data["runs"]:
        assert sum(len(blocks) for *_, blocks, _, _ in run["tables"]) <= 20
        assert 0 < run["tables_until"] < 69
    text = Page(viz.player_html(traces, max_steps=70)).text
    assert text["static: the first 70 of 91 steps are shown; the other 21 are left out."] == 1
    assert not any(sentence.startswith("fcfs: the first") for sentence in text)


def test_tables_and_cached_blocks_are_bounded_together():
    trace = swapping("fcfs")
    (run,) = player_data({"a": trace}, bounds=Bounds(table_entries=100))["runs"]
    spans = [(first, number) for first, *flat in run["prefixes"] for _, number in pairs(flat)]
    assert spans
    assert sum(len(blocks) for *_, blocks, _, _ in run["tables"]) + len(spans) <= 100
    assert all(first + number <= run["tables_until"] < len(trace.steps) for first, number in spans)


def test_a_page_of_a_long_run_stays_small():
    requests = [Request(f"r{n}", 500, 300, arrival=3.0 * n) for n in range(600)]
    trace = simulate(requests, "fcfs", scheduler=SchedulerConfig(64, 512))
    html = viz.player_html({"fcfs": trace})
    assert len(trace.steps) > 2000
    assert len(html) < 500_000
    assert "fcfs: the first 200 of 600 requests are listed" in html


def test_columns_are_packed_without_loss():
    for values in ([], [1], [1, 1, 1], [1, 2, 3], [5, 5, 5, 2, 2, 2, 2, 0]):
        assert unpacked(packed(values)) == values
    assert packed([7] * 1000) == [[7, 1000]]


def test_any_text_stays_text():
    html = viz.player_html({"label <b>\ud800": hostile()})
    html.encode("utf-8")
    page = Page(html)
    assert len(page.scripts) == 2
    assert not any("onerror" in attributes for _, attributes in page.elements)
    data = page.scripts[0]
    assert not set("<>&") & set(data) and data.isascii()
    ids = json.loads(data)["ids"]
    assert ids[0].startswith("</script><img src=x onerror=alert(1)>\"&'{{7*7}}$x^{2$⟨U+2028⟩")
    assert ids[0].endswith("⟨U+001B⟩[31m⟨U+202E⟩")


def test_names_have_no_lines():
    trace = simulate([Request("槽位 👩\u200d🚀\n\tb", 3, 5), Rejected("c\n", "why\nnot")], "fcfs")
    data = player_data({"one\ntwo": trace})
    assert data["ids"] == ["槽位 👩\u200d🚀⟨U+000A⟩⟨U+0009⟩b"]
    assert data["runs"][0]["label"] == "one⟨U+000A⟩two"
    assert data["runs"][0]["rejected"] == [["c⟨U+000A⟩", "why⟨U+000A⟩not"]]


def test_wrong_arguments_are_named():
    traces = {"a": classic("fcfs")}
    with pytest.raises(ValueError, match="element_id"):
        viz.player_html(traces, element_id='x" onload="')
    with pytest.raises(ValueError, match="max_steps"):
        viz.player_html(traces, max_steps=0)
    with pytest.raises(ValueError, match="at least one trace"):
        viz.player_html({})
    with pytest.raises(ValueError, match="relative error"):
        viz.player_html(traces, predictions=[("speed", 1, 2)])


def test_a_run_without_a_step_is_named():
    empty = simulate([Rejected("too long", "needs 9 blocks")], "fcfs")
    text = Page(viz.player_html({"a": empty})).text
    assert text["a: no step was run, so there is nothing to play."] == 1


def test_the_page_needs_nothing_from_outside():
    html = viz.player_html({"a": classic("static")})
    assert "://" not in html and "@import" not in html and not re.search(r"\burl\(", html)
    for tag, attributes in Page(html).elements:
        assert tag not in ("link", "iframe") and "href" not in attributes
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")


def test_two_players_on_a_page_do_not_share_an_id():
    trace = {"a": classic("fcfs")}
    html = viz.player_html(trace, element_id="one") + viz.player_html(trace, element_id="two")
    ids = [attributes["id"] for _, attributes in Page(html).elements if "id" in attributes]
    assert sorted(ids) == ["one", "one-data", "two", "two-data"]


def test_same_traces_give_the_same_bytes_in_any_process():
    first, second = printed_by_two_processes(
        "import hashlib, sys; sys.path.insert(0, 'tests')\n"
        "from helpers.demo_runs import classic, pressed\n"
        "from cbresearch import viz\n"
        "runs = {'a': classic('static'), 'b': pressed('fcfs'), 'c': pressed('sjf')}\n"
        "print(hashlib.sha256(viz.player_html(runs).encode()).hexdigest(), viz.policy_look('mine'))"
    )
    assert first == second and len(first) > 64


def test_no_script_passes_a_list_as_arguments():
    # A browser takes some 100,000 of them, and a run may have more steps or requests.
    script = Page(viz.player_html({"a": classic("fcfs")})).scripts[1]
    assert "Math.max" in script
    assert not re.search(r"\bMath\.\w+\([^()]*\.\.\.|\.push\(\.\.\.|\.apply\(", script)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_valid(tmp_path):
    script = tmp_path / "player.js"
    script.write_text(Page(viz.player_html({"a": classic("fcfs")})).scripts[1], encoding="utf-8")
    subprocess.run(["node", "--check", script], check=True)


def test_a_sentence_a_run_stands_in_where_scripts_are_removed():
    traces = {policy: classic(policy) for policy in ("static", "fcfs")}
    text = Page(viz.player_html(traces)).text
    assert text["static: 5.6 of 8 seats busy on average over 91 s."] == 1
    assert text["fcfs: 7.4 of 8 seats busy on average over 69 s."] == 1
    assert not Page(viz.player_html(traces)).all("img")


def test_key_figures_that_are_given_are_shown():
    trace = classic("fcfs")
    rows = metrics.kpi_table({"a": trace})[:2]
    assert [row[0] for row in player_data({"a": trace}, kpi=rows)["kpi"]] == [row.name for row in rows]
