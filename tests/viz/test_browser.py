"""The demo and the report as a person meets them: in a real browser, without a network."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from importlib.util import find_spec

import pytest
from helpers.block_events import recorded
from helpers.demo_runs import HOSTILE, classic, hostile, pressed, seats_by_step, swapping_case
from hygiene import ROOT
from set_up_browser import REMEDY, find_browser

from cbresearch import metrics, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.viz.memory import BlockMap
from cbresearch.viz.player import player_data

pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make browser installs it")
from playwright.sync_api import Page, sync_playwright

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason=REMEDY)
IN_FULL = pytest.mark.skipif("CBRESEARCH_BROWSER" not in os.environ, reason="runs under make browser alone")

ID = "cbresearch-player"
TABS = ("start", "execute", "monitor", "complete")
PREDICTIONS = [("speed-up, this queue, equal steps", 1.319, 1.3188, -0.00015)]

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>demo</title></head>
<body><main><h1>Demo</h1>{}</main></body></html>
"""


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Demo:
    """A page in a browser, and what went wrong in it.

    Args:
        page: The browser's page.
        path: The file that it shows.
    """

    def __init__(self, page: Page, path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())

    def part(self, name):
        return self.page.locator(f"#{ID}-{name}")

    def open(self, tab):
        self.part(f"tab-{tab}").click()
        return self.part(tab)

    def go(self, step, run=0):
        """Jump to a step of a run, on the Execute tab."""
        self.open("execute")
        if self.part("whose").count():
            self.part("whose").select_option(str(run))
        self.part("step").fill(str(step))
        self.part("step").press("Enter")

    def clock(self):
        return self.part("clock").inner_text()

    def card(self, run):
        return self.part("execute").locator(".cbr-run").nth(run)

    def seats(self, run):
        return [
            tile.get_attribute("aria-label").partition(": ")[2]
            for tile in self.card(run).locator("button.cbr-seat").all()
        ]

    def value(self, run, name):
        return self.card(run).locator(f"[data-name={name}]").inner_text()

    def story(self, run):
        return self.card(run).locator(".cbr-story").inner_text()


def page_of(chromium, tmp_path_factory, traces, **options):
    path = tmp_path_factory.mktemp("demo") / "demo.html"
    path.write_text(PAGE.format(viz.player_html(traces, **options)), encoding="utf-8")

    def show(width=1100, height=900, scheme="light"):
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        return Demo(context.new_page(), path)

    return show


@pytest.fixture(scope="module")
def simple_traces():
    return {policy: classic(policy) for policy in ("static", "fcfs")}


@pytest.fixture(scope="module")
def swapped_traces():
    requests, limits, cache = swapping_case()
    cost = Linear(step=0.003, token=0.0001)
    return {name: recorded(requests, name, limits, cache, cost=cost)[0] for name in ("static", "fcfs", "sjf")}


@pytest.fixture(scope="module")
def show_simple(chromium, tmp_path_factory, simple_traces):
    return page_of(chromium, tmp_path_factory, simple_traces, predictions=PREDICTIONS)


@pytest.fixture(scope="module")
def show_swapped(chromium, tmp_path_factory, swapped_traces):
    return page_of(chromium, tmp_path_factory, swapped_traces)


@pytest.fixture(scope="module")
def show_hostile(chromium, tmp_path_factory):
    return page_of(chromium, tmp_path_factory, {f"label {HOSTILE}\ud800": hostile()})


# One story under four tabs


def test_each_tab_shows_its_part_and_the_page_is_quiet(show_simple):
    demo = show_simple()
    for tab in TABS:
        panel = demo.open(tab)
        assert panel.is_visible()
        assert sum(demo.part(other).is_visible() for other in TABS) == 1
    assert "60 requests want 510 tokens from 8 seats" in demo.part("start").text_content()
    assert demo.part("monitor").locator("svg[role=img]").count() == 6
    assert not demo.page.locator(".cbr-plain").is_visible()
    assert demo.errors == []
    assert len(demo.requests) == 1, "the page asks for nothing beyond itself"


def test_start_lists_every_request_with_its_lengths(show_simple, simple_traces):
    demo = show_simple()
    rows = demo.part("start").locator("tbody tr").all_inner_texts()
    shown = [tuple(row.split()) for row in rows]
    assert shown == [
        (record.id, f"{record.num_prompt_tokens}", f"{len(record.tokens)}")
        for record in simple_traces["static"].requests
    ]


def test_tabs_follow_the_arrow_keys(show_simple):
    demo = show_simple()
    demo.part("tab-start").focus()
    for key, tab in (
        ("ArrowRight", "execute"),
        ("ArrowRight", "monitor"),
        ("End", "complete"),
        ("ArrowRight", "start"),
        ("ArrowLeft", "complete"),
        ("Home", "start"),
    ):
        demo.page.keyboard.press(key)
        assert demo.page.evaluate("document.activeElement.id") == f"{ID}-tab-{tab}"
        assert demo.part(f"tab-{tab}").get_attribute("aria-selected") == "true"
        assert demo.part(tab).is_visible()
    reachable = [demo.part(f"tab-{tab}").get_attribute("tabindex") for tab in TABS]
    assert reachable == ["0", "-1", "-1", "-1"]


# Playback


def test_play_runs_to_the_end_and_pause_stops_it(show_simple):
    demo = show_simple()
    demo.part("begin").click()
    assert demo.part("execute").is_visible()
    demo.page.wait_for_function(f"document.getElementById('{ID}-moment').value > 2")
    demo.part("play").click()
    stopped = demo.clock()
    demo.page.wait_for_timeout(700)
    assert demo.clock() == stopped != "91 s of 91 s"
    assert "Play" in demo.part("play").inner_text()
    demo.part("speed").select_option("10")
    demo.part("play").click()
    demo.page.wait_for_function(f"document.getElementById('{ID}-clock').textContent.startsWith('91 s')")
    demo.page.wait_for_function(f"document.getElementById('{ID}-play').textContent.includes('Play')")
    assert demo.card(1).locator(".cbr-where").inner_text().startswith("done after 69 steps")
    assert demo.errors == []


def test_buttons_slider_and_number_go_to_a_step(show_simple):
    demo = show_simple()
    demo.open("execute")
    assert demo.part("back").is_disabled()
    demo.part("forward").click()
    demo.part("forward").click()
    assert demo.clock() == "2 s of 91 s"
    demo.part("back").click()
    assert demo.clock() == "1 s of 91 s"
    demo.go(40, run=1)
    assert "step 40 of 0–68" in demo.card(1).inner_text()
    demo.part("moment").fill("55")
    assert demo.clock() == "55 s of 91 s"
    demo.part("last").click()
    assert demo.clock() == "91 s of 91 s"
    assert demo.part("forward").is_disabled()
    demo.part("first").click()
    assert demo.clock() == "0 s of 91 s"


def test_playback_follows_the_keyboard(show_simple):
    demo = show_simple()
    demo.open("execute")
    demo.part("execute").focus()
    for key, clock in (
        ("ArrowRight", "1 s"),
        ("ArrowRight", "2 s"),
        ("ArrowLeft", "1 s"),
        ("PageDown", "11 s"),
        ("PageUp", "1 s"),
        ("End", "91 s"),
        ("Home", "0 s"),
    ):
        demo.page.keyboard.press(key)
        assert demo.clock() == f"{clock} of 91 s"
    demo.page.keyboard.press("Space")
    assert "Pause" in demo.part("play").inner_text()
    demo.page.keyboard.press("Space")
    assert "Play" in demo.part("play").inner_text()


# What is shown is what was recorded


@pytest.mark.parametrize("workload", ["simple", "swapped"])
def test_numbers_of_a_step_are_those_of_the_trace(request, workload):
    traces = request.getfixturevalue(f"{workload}_traces")
    demo = request.getfixturevalue(f"show_{workload}")()
    data = player_data(traces)
    for place, trace in enumerate(traces.values()):
        seated = seats_by_step(data["runs"][place], data["ids"])
        blocks = BlockMap.of(trace.steps)
        ends = [when for record in trace.requests for when in record.token_times]
        num_steps = len(trace.steps)
        for step in sorted({0, 1, 13, 19, 20, 35, 48, num_steps // 2, num_steps - 1}):
            record = trace.steps[step]
            demo.go(step, run=place)
            for seat, text in enumerate(demo.seats(place)):
                cell = seated[step].get(seat)
                if cell is None:
                    assert text == "empty"
                    continue
                name, kind, _, tokens = cell
                kind = {"padding": "finished, still computed", "held": "seated, not served"}.get(kind, kind)
                assert text.startswith(f"{name}, {kind}, ")
                assert f"{tokens} of " in text
            assert demo.value(place, "waiting") == str(record.num_waiting)
            assert demo.value(place, "held") == f"{record.num_held_blocks} of {trace.cache.num_blocks}"
            out = sum(when <= record.end * (1 + 1e-12) for when in ends)
            assert demo.value(place, "out") == f"{out} of {len(ends)}"
            maps = demo.card(place).locator(".cbr-map")
            for pool in range(maps.count()):
                held = [table for table in blocks.tables if table.on_host is bool(pool) and table.held(step)]
                cached = {block for block, begin, end in blocks.cached if not pool and begin <= step < end}
                owners = {}
                for table in held:
                    for block in table.held(step):
                        owners.setdefault(block, []).append(table.request_id)
                cells = maps.nth(pool).locator(".cbr-cell")
                states = cells.evaluate_all("cells => cells.map(cell => [cell.dataset.state, cell.title])")
                for block, (state, title) in enumerate(states):
                    assert (state == "cached") == (block in cached)
                    assert ("no request refers to it" in title) == (block in cached)
                    assert (state == "free") == (block not in owners and block not in cached)
                    assert (state == "shared") == (len(owners.get(block, ())) > 1)
                    assert all(f"{owner} (its block " in title for owner in owners.get(block, ()))
                shown = f"{len(owners)} of {trace.cache.num_host_blocks if pool else trace.cache.num_blocks}"
                label = maps.nth(pool).get_attribute("aria-label")
                assert f"{shown} blocks held" in label
                found = re.search(r"cached, no request refers to them: (.*)$", label)
                named = re.findall(r"\d+", re.sub(r" and \d+ more", "", found[1])) if found else []
                assert set(map(int, named)) <= cached
                assert len(named) == min(16, len(cached))
    assert demo.errors == []


def test_a_cached_block_without_a_reference_looks_like_no_other_and_is_in_the_legend(
    show_simple, show_swapped
):
    demo = show_swapped()
    demo.go(35, run=1)
    legend = demo.part("execute").locator(".cbr-key li", has_text="cached prefix, no request refers to it")
    assert legend.count() == 1
    look = "cells => cells.map(cell => getComputedStyle(cell).backgroundImage)"
    (sample,) = legend.locator(".cbr-cell").evaluate_all(look)
    cells = demo.page.locator(".cbr-map .cbr-cell")
    looks = dict(cells.evaluate_all(f"cells => cells.map(cell => [cell.dataset.state, ({look})([cell])[0]])"))
    assert looks["cached"] == sample
    assert len({"cached", "held", "free"} & looks.keys()) == 3
    assert all(look != sample for state, look in looks.items() if state != "cached")
    plain = show_simple()
    plain.open("execute")
    assert "cached" not in plain.part("execute").locator(".cbr-key").inner_text()


def test_the_story_says_what_happens_and_why(show_swapped, swapped_traces):
    demo = show_swapped()
    trace = swapped_traces["fcfs"]
    step = next(step for step, record in enumerate(trace.steps) if record.plan.swapped)
    (victim,) = trace.steps[step].plan.swapped
    number = trace.steps[step].plan.num_transfers("swap_out")
    demo.go(step, run=1)
    story = demo.story(1)
    assert f"{victim} loses seat" in story and "(swap)" in story
    assert f"moved: {number} blocks to the host (swap out)" in story
    assert "the KV pool has no room" in story
    marked = demo.card(1).locator(".cbr-map").nth(1).locator('.cbr-cell[data-mark="↓"]')
    assert marked.count() == number
    assert victim in demo.card(1).locator(".cbr-queue").inner_text()
    back = next(
        step
        for step, record in enumerate(trace.steps)
        if victim in {a.request.id for a in record.plan.admitted} and record.plan.num_transfers("swap_in")
    )
    demo.go(back, run=1)
    assert re.search(rf"{victim} takes seat \d again", demo.story(1))
    assert "back to the device (swap in)" in demo.story(1)
    first = demo.go(0, run=0) or demo.story(0)
    assert "takes seat 0" in first


def test_a_request_that_one_run_rejects_does_not_wait_there(chromium, tmp_path_factory):
    requests = [Request("long", 40, 9), *(Request(f"r{n}", 4, 5) for n in range(3))]
    limits = SchedulerConfig(max_num_seqs=1)
    traces = {
        name: simulate(requests, "fcfs", scheduler=limits, cache=CacheConfig(num_blocks))
        for name, num_blocks in (("roomy", 4), ("small", 2))
    }
    assert [record.is_rejected for record in traces["small"].requests] == [True, False, False, False]
    demo = page_of(chromium, tmp_path_factory, traces)()
    demo.go(0)
    queues = [demo.card(run).locator(".cbr-queue .cbr-chip").all_inner_texts() for run in (0, 1)]
    assert queues == [["r0", "r1", "r2"], ["r1", "r2"]]


def test_start_names_the_requests_of_all_runs(chromium, tmp_path_factory):
    requests = [Request("long", 40, 9), *(Request(f"r{n}", 4, 5) for n in range(3))]
    small, roomy = (simulate(requests, cache=CacheConfig(number)) for number in (2, 4))
    other = simulate([Request("x", 4, 7)])
    for traces, want, together in (
        ({"small": small, "roomy": roomy}, "4 requests want 24 tokens", "are given the same requests"),
        ({"small": small, "again": small}, "3 requests want 15 tokens", "serve the same requests"),
        ({"small": small, "other": other}, "4 requests want 22 tokens", "each is given requests of its own"),
    ):
        lead = page_of(chromium, tmp_path_factory, traces)().part("start").locator(".cbr-lead").inner_text()
        assert lead.startswith(want)
        assert together in lead


def test_who_waits_for_a_batch_to_gather_is_not_called_absent(chromium, tmp_path_factory):
    arrivals = {"a": 0, "b": 3, "c": 30, "d": 32, "e": 33, "f": 60}
    requests = [Request(name, 4, 2, arrival=float(when)) for name, when in arrivals.items()]
    traces = {name: simulate(requests, name) for name in ("static:wait=5", "fcfs")}
    demo = page_of(chromium, tmp_path_factory, traces)()
    gathered, served = traces["static:wait=5"], traces["fcfs"]
    said = []
    for step, record in enumerate(served.steps):
        demo.go(step, run=1)
        now, story = record.start, demo.story(0)
        if any(one.start <= now < one.end for one in gathered.steps):
            continue
        waiting = [one.id for one in gathered.requests if one.arrival <= now < one.first_scheduled]
        assert demo.value(0, "waiting") == str(len(waiting))
        assert demo.card(0).locator(".cbr-queue .cbr-chip").all_inner_texts() == waiting
        if waiting:
            begin = min(one.start for one in gathered.steps if one.start > now)
            assert f"{len(waiting)} wait" in story and f"begins at {begin:.0f} s" in story
        else:
            first = min(one.arrival for one in gathered.requests if one.arrival > now)
            assert f"no request arrives before {first:.0f} s" in story
        said.append(len(waiting))
    assert {1, 2, 3} <= set(said)
    # A run that gathers nothing is idle for want of requests alone.
    demo.go(0, run=0)
    assert demo.story(1).endswith("idle: no request arrives before 30 s")


def test_computing_lost_output_again_is_not_called_a_prompt(chromium, tmp_path_factory):
    trace = pressed("fcfs")
    demo = page_of(chromium, tmp_path_factory, {"fcfs": trace})()
    tokens, seen = Counter(), set()
    for step, record in enumerate(trace.steps):
        sums = Counter()
        for entry in record.plan.scheduled:
            if entry.is_prefill:
                sums["token" if tokens[entry.request_id] else "prompt token"] += entry.num_tokens
            tokens[entry.request_id] += entry.samples
        if not sums or tuple(sums) in seen:
            continue
        seen.add(tuple(sums))
        demo.go(step)
        shown = re.findall(r" (re)?computes? ([\d,]+) ((?:prompt )?token)s?\b", demo.story(0))
        assert {what: int(number) for _, number, what in shown} == sums
        assert all(bool(again) == (what == "token") for again, _, what in shown)
        tiles = demo.card(0).locator("button.cbr-seat small").all_inner_texts()
        assert any(text.startswith("again") for text in tiles) == ("token" in sums)
    assert {kind for kinds in seen for kind in kinds} == {"token", "prompt token"}


def test_static_rows_that_are_computed_for_nothing_are_told(show_simple, simple_traces):
    demo = show_simple()
    trace = simple_traces["static"]
    step = next(step for step, record in enumerate(trace.steps) if record.plan.padding)
    demo.go(step, run=0)
    assert "for nothing" in demo.story(0)
    assert f"{trace.steps[step].num_waiting} wait: no seat is free" in demo.story(0)
    padded = demo.card(0).locator('[data-kind="padding"]')
    assert padded.count() == len(trace.steps[step].plan.padding)


def test_monitor_ends_on_the_key_figures(show_simple, simple_traces):
    demo = show_simple()
    demo.open("execute")
    demo.part("last").click()
    demo.open("monitor")
    charts = demo.part("monitor").locator(".cbr-chart")
    for place, trace in enumerate(simple_traces.values()):
        for title, value in (
            ("Utilization so far", f"{100 * metrics.utilization(trace):.4g} %"),
            ("Throughput so far", f"{metrics.output_throughput(trace):.4g}"),
            ("Fragmentation", f"so far {100 * metrics.fragmentation(trace):.4g} %"),
        ):
            chart = charts.filter(has_text=title)
            assert value in chart.locator(".cbr-gauge").nth(place).inner_text()


def test_monitor_hides_what_is_still_to_come(show_simple):
    demo = show_simple()
    demo.go(13)
    demo.open("monitor")
    veil = demo.part("monitor").locator(".cbr-veil").first
    assert float(veil.get_attribute("x")) == pytest.approx(300 * 13 / 91)
    assert float(veil.get_attribute("x")) + float(veil.get_attribute("width")) >= 300


def test_complete_shows_the_key_figures_and_the_prediction(show_simple, simple_traces):
    demo = show_simple()
    panel = demo.open("complete")
    shown, predicted = (
        [row.split("\t") for row in table.locator("tr").all_inner_texts()]
        for table in panel.locator("tbody").all()
    )
    for row, cells in zip(metrics.kpi_table(simple_traces), shown, strict=True):
        assert cells[:2] == [row.name, row.unit]
        for place, value in enumerate(row.values):
            size = f" n = {row.sizes[place]}" if row.sizes else ""
            assert cells[2 + place] == value + size
    assert predicted == [["speed-up, this queue, equal steps", "1.319", "1.319", "−0.015 %"]]
    assert f"{metrics.speed_up(*simple_traces.values()):.4g}×" in panel.inner_text()


def test_following_a_request_marks_its_seat_its_blocks_and_its_place_in_the_queue(show_simple):
    demo = show_simple()
    demo.go(13)
    chip = demo.card(0).locator(".cbr-queue .cbr-chip").first
    name = chip.inner_text()
    chip.click()
    assert name in demo.part("following").inner_text()
    assert "static: waits" in demo.part("following").inner_text()
    tile = demo.card(1).locator("button.cbr-seat:not([disabled])").first
    tile.click()
    assert tile.get_attribute("aria-pressed") == "true"
    assert "#0" in demo.card(1).locator(".cbr-map").inner_text()


# Any reader


@pytest.mark.parametrize("show", ["show_simple", "show_swapped", "show_hostile"])
def test_nothing_runs_over_the_edge_of_a_phone(request, show):
    demo = request.getfixturevalue(show)(width=360, height=740)
    for tab in TABS:
        demo.open(tab)
        assert demo.page.evaluate("document.documentElement.scrollWidth") <= 360, tab


def lightness(color):
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    return (red + green + blue) / 765


def test_the_dark_scheme_is_dark_and_a_notebooks_theme_wins(show_simple):
    for scheme, theme, is_dark in (
        ("light", None, False),
        ("dark", None, True),
        ("dark", "true", False),
        ("light", "false", True),
    ):
        demo = show_simple(scheme=scheme)
        if theme is not None:
            demo.page.evaluate("theme => { document.body.dataset.jpThemeLight = theme; }", theme)
        paper, ink = (
            demo.page.evaluate(f"getComputedStyle(document.getElementById('{ID}')).{name}")
            for name in ("backgroundColor", "color")
        )
        assert (lightness(paper) < 0.2) is is_dark
        assert (lightness(ink) > 0.8) is is_dark


def test_hostile_text_is_shown_as_text(show_hostile):
    demo = show_hostile()
    for tab in TABS:
        demo.open(tab)
    demo.go(1)
    assert "</script><img src=x onerror=alert(1)>" in demo.card(0).inner_text()
    assert demo.page.locator("main img").count() == 0
    assert "why </script>" in demo.part("start").text_content()
    assert demo.errors == [] and len(demo.requests) == 1


def test_without_scripts_a_sentence_a_run_stands_in(chromium, tmp_path, simple_traces):
    path = tmp_path / "demo.html"
    path.write_text(PAGE.format(viz.player_html(simple_traces)), encoding="utf-8")
    page = chromium.new_context(java_script_enabled=False).new_page()
    page.goto(path.as_uri())
    assert page.locator(".cbr-plain").is_visible()
    assert "fcfs: 7.4 of 8 seats busy on average over 69 s." in page.locator(".cbr-plain").inner_text()
    assert not page.locator(".cbr-app").is_visible()


def test_two_players_on_a_page_play_apart(chromium, tmp_path, simple_traces):
    path = tmp_path / "demo.html"
    both = [viz.player_html(simple_traces, element_id=name) for name in ("one", "two")]
    path.write_text(PAGE.format("".join(both)), encoding="utf-8")
    page = chromium.new_page()
    page.goto(path.as_uri())
    for name in ("one", "two"):
        page.locator(f"#{name}-tab-execute").click()
    page.locator("#two-last").click()
    clocks = [page.locator(f"#{name}-clock").inner_text() for name in ("one", "two")]
    assert clocks == ["0 s of 91 s", "91 s of 91 s"]


def findings(page):
    """Return what axe-core finds that is serious or critical, by rule."""
    axe = find_spec("axe_playwright_python").submodule_search_locations[0]
    page.add_script_tag(path=f"{axe}/axe.min.js")
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return {
        found["id"]: [node["html"][:200] for node in found["nodes"][:3]]
        for found in result["violations"]
        if found["impact"] in ("serious", "critical")
    }


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="axe-core is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_demo(show_swapped, scheme):
    demo = show_swapped(scheme=scheme)
    for tab in TABS:
        demo.open(tab)
        if tab == "execute":
            demo.go(19, run=1)
            demo.card(1).locator("button.cbr-seat:not([disabled])").first.click()
        assert findings(demo.page) == {}, tab


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="axe-core is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_report(chromium, tmp_path, simple_traces, scheme):
    path = viz.write_report(
        tmp_path / "report.html",
        title="static and fcfs",
        traces=simple_traces,
        kpi=metrics.kpi_table(simple_traces),
        predictions=PREDICTIONS,
        answers=[("Why?", {"static": "Because.", "fcfs": "Because."})],
        environment={"python": "3"},
    )
    context = chromium.new_context(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
    demo = Demo(context.new_page(), path)
    assert findings(demo.page) == {}
    demo.open("complete")
    assert "1.319" in demo.part("complete").inner_text()
    assert demo.errors == [] and len(demo.requests) == 1
    narrow = chromium.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = Demo(narrow.new_page(), path).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# JupyterLab itself


@pytest.fixture
def lab(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "00_start_here.ipynb").write_bytes((ROOT / "notebooks/00_start_here.ipynb").read_bytes())
    paths = {
        f"JUPYTER_{name}": str(tmp_path / name.lower()) for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    }
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with (tmp_path / "lab.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--allow-root",
                    "--expose-app-in-browser",
                ),
                *(
                    f"--port={port}",
                    "--ServerApp.port_retries=0",
                    "--IdentityProvider.token=",
                    f"--ServerApp.root_dir={folder}",
                ),
                "--ServerApp.disable_check_xsrf=True",
            ],
            stdout=log,
            stderr=log,
            env=os.environ | paths | settings,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(120):
                try:
                    with urllib.request.urlopen(f"{address}/api/status", timeout=5) as answer:
                        assert json.load(answer)["started"]
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "lab.log").read_text()
                    time.sleep(0.5)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@IN_FULL
def test_the_first_notebook_runs_in_jupyterlab_and_its_demo_plays(chromium, lab):
    context = chromium.new_context(viewport={"width": 1300, "height": 900})
    page = context.new_page()
    page.goto(f"{lab}/lab/tree/00_start_here.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    page.wait_for_function(
        "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=90_000,
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    notebook = json.loads((ROOT / "notebooks/00_start_here.ipynb").read_text())
    number = sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    # The notebook is drawn cell by cell as one scrolls, so the model in memory is asked.
    page.wait_for_function(
        """number => {
          const widget = window.jupyterapp.shell.currentWidget;
          const cells = Array.from(widget.content.model.cells).filter(cell => cell.type === "code");
          return cells.length === number && cells.every(cell => cell.executionCount > 0)
            && widget.sessionContext.session.kernel.status === "idle";
        }""",
        arg=number,
        timeout=240_000,
    )
    outputs = page.evaluate(
        """() => Array.from(window.jupyterapp.shell.currentWidget.content.model.cells)
          .filter(cell => cell.type === "code").flatMap(cell => cell.outputs.toJSON())"""
    )
    assert not [output for output in outputs if output["output_type"] == "error"]
    play_in_lab(page)


def play_in_lab(page):
    for _ in range(60):
        if page.locator(f"#{ID} .cbr-app").count():
            break
        page.locator(".jp-WindowedPanel-outer").hover()
        page.mouse.wheel(0, 500)
        page.wait_for_timeout(150)
    player = page.locator(f"#{ID}")
    player.scroll_into_view_if_needed()
    player.locator(f"#{ID}-tab-execute").click()
    player.locator(f"#{ID}-execute").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    # JupyterLab leaves the keys to the demo while that has the focus.
    assert player.locator(f"#{ID}-clock").inner_text() == "2 s of 90 s"
    assert player.locator(".cbr-story").first.inner_text()
