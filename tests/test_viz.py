"""The figures, the player and the report show what the trace holds, and nothing from anywhere else."""

import random
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from cbresearch import metrics, policies, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Refusal, Request
from cbresearch.simulator import simulate
from cbresearch.viz import axes, figures, words
from cbresearch.viz.seating import request_colors, sittings
from cbresearch.viz.style import REQUEST_COLORS, ink_on

HOSTILE = "</script><img src=x onerror=alert(1)>\"&'{{7*7}}$x^{2$\u2028"
# What ends a line unseen is written out.
HOSTILE_AS_SHOWN = HOSTILE.replace("\u2028", "⟨U+2028⟩")


def classic(policy):
    generator = random.Random(2024)
    lengths = [generator.randint(4, 12) for _ in range(60)]
    requests = [Request(str(place), 1, length) for place, length in enumerate(lengths)]
    return simulate(requests, policy, scheduler=SchedulerConfig(max_num_seqs=8))


def pressed(policy):
    """Serve requests in a pool so small that some are preempted."""
    requests = [Request(f"r{n}", 20 + 7 * (n % 5), 15 + (n * 13) % 20, arrival=n / 100) for n in range(14)]
    return simulate(
        requests,
        policy,
        cost=Linear(step=0.003, token=0.0001),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64),
        cache=CacheConfig(num_blocks=12),
    )


@pytest.fixture(scope="module")
def traces():
    return {policy: classic(policy) for policy in ("static", "static:release", "fcfs")}


@pytest.fixture(scope="module")
def preempting():
    runs = {policy: pressed(policy) for policy in ("static", "prefill_first", "fcfs")}
    assert all(metrics.num_preemptions(trace) for trace in runs.values())
    return runs


@pytest.fixture(scope="module")
def hostile():
    requests = [
        Request(HOSTILE, 3, 5),
        Request("plain", 3, 2),
        Refusal(f"refused {HOSTILE}", f"why {HOSTILE}"),
    ]
    return simulate(requests, "fcfs", scheduler=SchedulerConfig(max_num_seqs=2))


@pytest.fixture(scope="module")
def hostile_report(hostile, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    traces = {f"label {HOSTILE}": hostile}
    viz.write_report(
        path,
        title=f"title {HOSTILE}",
        note=f"note {HOSTILE}",
        traces=traces,
        kpi=metrics.kpi_table(traces),
        predictions=[(f"quantity {HOSTILE}", 2.0, 2.5, 0.25)],
        answers=[(f"prompt {HOSTILE}", {f"label {HOSTILE}": f"answer {HOSTILE}"})],
        environment={f"name {HOSTILE}": f"value {HOSTILE}"},
    )
    return path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


class Page(HTMLParser):
    """What a browser would see in a page: its elements, and the text inside each kind."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.text = Counter()
        self.scripts = []
        self._open = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text[data] += 1

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def by_gid(ax, gid):
    (artist,) = [artist for artist in ax.get_children() if artist.get_gid() == gid]
    return artist


def widths(collection):
    return [np.ptp(path.vertices[:, 0]) for path in collection.get_paths()]


def area_steps(collection):
    """Return the two values of a filled area in each interval between its edges."""
    (path,) = collection.get_paths()
    x, y = path.vertices[:-1].T
    half = len(x) // 2
    sides = (x[1:half], y[1:half]), (x[half + 1 :][::-1], y[half + 1 :][::-1])
    # Two corners an interval, at its left and at its right edge, and the last edge once more.
    assert all(list(x[:-1:2]) == list(np.unique(x))[:-1] for x, _ in sides)
    first, second = (y[:-1:2] for _, y in sides)
    return np.minimum(first, second), np.maximum(first, second)


def num_served(trace):
    return sum(len(record.plan.scheduled) for record in trace.steps)


def num_padding(trace):
    return sum(len(record.plan.padding) for record in trace.steps)


# The report as a file


def test_report_needs_nothing_from_outside(hostile_report):
    page = Page(hostile_report)
    assert "://" not in hostile_report
    assert not page.all("link") and not page.all("iframe") and "@import" not in hostile_report
    assert not re.search(r"\burl\(", hostile_report)
    for _, attributes in page.elements:
        assert "href" not in attributes
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    assert len(page.all("img")) == 4


def test_report_says_in_words_what_its_figures_show(hostile_report):
    page = Page(hostile_report)
    assert all(len(image["alt"]) > 40 for image in page.all("img"))
    assert len(page.all("figcaption")) == len(page.all("figure")) == 4


def test_report_is_readable_by_machine_phone_and_in_the_dark(hostile_report):
    page = Page(hostile_report)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in hostile_report
    # A table for each question and each figure, and four of their own.
    assert len(page.all("caption")) == len(page.all("table")) == 3 + 4 + 4
    assert all(cell["scope"] in ("row", "col") for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(deeper - level <= 1 for level, deeper in pairwise(levels))


def test_text_from_users_stays_text_in_the_report(hostile_report):
    page = Page(hostile_report)
    assert len(page.scripts) == 2
    assert not any("onerror" in attributes for _, attributes in page.elements)
    shown = "\n".join(page.text)
    for what in ("title", "note", "label", "quantity", "prompt", "answer", "name", "value", "refused", "why"):
        assert f"{what} {HOSTILE_AS_SHOWN}" in shown, what


def test_report_shows_tables_as_given(traces, tmp_path):
    path = viz.write_report(
        tmp_path / "new folder" / "report.html",
        title="t",
        traces=traces,
        kpi=[
            ("speed", "tokens/s", 1234.5678, None, 0.000123456),
            metrics.KpiRow("wait", "s", ("1", "2", "3"), ("60",) * 3),
        ],
        predictions=[("ratio", 1.3, 1.319, 0.0146), ("other", 2, None, None)],
        answers=[
            ("same?", {"static": "yes", "fcfs": "yes"}),
            ("different?", {"static": "one", "fcfs": "two"}),
        ],
    )
    text = Page(path.read_text(encoding="utf-8")).text
    assert {"1,235", "–", "0.0001235", "n = 60", "1.319", "+1.46 %"} <= set(text)
    assert text["The same answer in static, fcfs:"] == text["yes"] == text["one"] == text["two"] == 1


def test_same_traces_give_the_same_report_under_any_style_of_the_caller(hostile, tmp_path):
    def write():
        return viz.write_report(tmp_path / "report.html", title="t", traces={"a": hostile}).read_bytes()

    first = write()
    with plt.style.context("dark_background"):
        assert write() == first


def test_report_leaves_style_and_open_figures_as_they_were(hostile, tmp_path):
    before = dict(plt.rcParams)
    viz.write_report(tmp_path / "report.html", title="t", traces={"a": hostile})
    assert dict(plt.rcParams) == before
    assert not plt.get_fignums()


def test_report_is_absent_if_it_cannot_be_made(traces, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no ink")

    monkeypatch.setattr(figures, "latency_cdfs", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        viz.write_report(tmp_path / "report.html", title="t", traces={"a": traces["fcfs"]})
    assert not list(tmp_path.iterdir())


def test_report_of_runs_without_a_step_names_the_refusals(tmp_path):
    empty = simulate([Refusal("too long", "needs 9 blocks, there are 4")], "fcfs")
    path = viz.write_report(
        tmp_path / "report.html", title="t", traces={"a": empty}, kpi=metrics.kpi_table({"a": empty})
    )
    text = Page(path.read_text(encoding="utf-8")).text
    assert text["needs 9 blocks, there are 4"] == 1
    assert text["a: no step was run, so there is nothing to play."] == 1


def test_wrong_arguments_are_named(traces, tmp_path):
    path = tmp_path / "report.html"
    with pytest.raises(ValueError, match="at least one trace"):
        viz.write_report(path, title="t", traces={})
    with pytest.raises(ValueError, match="'speed' has 1 values for 3 runs"):
        viz.write_report(path, title="t", traces=traces, kpi=[("speed", "s", 1)])
    with pytest.raises(ValueError, match="relative error"):
        viz.write_report(path, title="t", traces=traces, predictions=[("speed", 1, 2)])
    with pytest.raises(ValueError, match="'step' or 'seconds'"):
        viz.seats(traces["fcfs"], time="minutes")


# The seats


def test_a_sitting_covers_its_steps_without_gaps_and_agrees_with_the_stays(preempting):
    for trace in preempting.values():
        stays = {(stay.request_id, stay.first_step): stay for stay in trace.stays()}
        found = sittings(trace.steps)
        assert len(found) == len(stays)
        for sitting in found:
            stay = stays[sitting.request_id, sitting.first]
            assert sitting.seat == stay.seat
            assert sitting.end > stay.last_step
            edges = [sitting.first, *(span.end for span in sitting.spans)]
            assert [span.first for span in sitting.spans] == edges[:-1] and edges[-1] == sitting.end
            padding = sum(span.end - span.first for span in sitting.spans if span.kind == "padding")
            assert padding == stay.num_padding_steps


def test_requests_that_follow_one_another_in_a_seat_differ_in_colour(traces, preempting):
    for group in (traces, preempting):
        colors = request_colors(group.values())
        assert set(colors.values()) == set(range(len(REQUEST_COLORS)))
        for trace in group.values():
            rows = {}
            for sitting in sittings(trace.steps):
                previous = rows.get(sitting.seat)
                rows[sitting.seat] = sitting.request_id
                if previous not in (None, sitting.request_id):
                    assert colors[previous] != colors[sitting.request_id]


def test_seats_figure_draws_every_row_and_hatches_the_padding(traces):
    fig = viz.seats(traces["static"])
    (ax,) = fig.axes
    assert sum(widths(by_gid(ax, "served"))) == num_served(traces["static"]) == 510
    padding = by_gid(ax, "padding")
    assert sum(widths(padding)) == num_padding(traces["static"]) > 0
    assert padding.get_hatch()
    assert ax.get_title("left") == "static keeps 5.6 of 8 seats busy on average over 91 steps"
    assert {text.get_text() for text in ax.texts} == {str(n) for n in range(60)}
    legend = {text.get_text() for text in fig.legends[0].get_texts()}
    assert legend == {"served (a colour per request)", "finished, still computed (padding)", "empty seat"}


def test_seats_figure_marks_each_preemption_where_the_stay_ends(preempting):
    trace = preempting["fcfs"]
    marks = by_gid(viz.seats(trace).axes[0], "preempted")
    expected = [step for step, record in enumerate(trace.steps) for _ in record.plan.preempted]
    assert sorted(marks.get_xdata()) == expected


def test_seats_figure_tells_waiting_in_a_seat_from_being_served(preempting):
    trace = preempting["prefill_first"]
    ax = viz.seats(trace).axes[0]
    seated = sum(record.num_running for record in trace.steps)
    assert sum(widths(by_gid(ax, "served"))) == num_served(trace)
    assert sum(widths(by_gid(ax, "held"))) == seated - num_served(trace) > 0


def test_shorter_run_ends_earlier_on_the_shared_axis(traces):
    fig = viz.seats_side_by_side(traces, time="step")
    assert [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes] == [91, 91, 69]
    assert len({ax.get_xlim() for ax in fig.axes}) == 1
    assert fig.get_suptitle() == "fcfs is done after 69 steps, static after 91 steps, 1.32 times as long"


def test_a_run_drawn_in_part_is_not_called_done(traces):
    fig = viz.seats_side_by_side(traces, time="step", max_steps=80)
    marks = [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes]
    notes = [ax.texts[-1].get_text() for ax in fig.axes]
    assert (marks, notes) == ([80, 80, 69], ["goes on →", "goes on →", "done: 69 steps"])
    assert fig.get_suptitle().startswith("fcfs is done after 69 steps, static after 91 steps")


def test_runs_of_different_scale_share_one_unit(preempting):
    short = pressed("fcfs")
    long = simulate([Request("a", 1, 50)], "fcfs", cost=Linear(step=0.1))
    fig = viz.seats_side_by_side({"short": short, "long": long})
    ends = [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes]
    assert short.duration < 1 < long.duration
    assert ends == pytest.approx([short.duration, long.duration])


def test_ids_and_labels_with_formula_signs_are_drawn_as_they_are(hostile):
    label = "cost in $, not $x^{2$ " * 20
    for fig in (
        viz.seats_side_by_side({label: hostile}),
        viz.occupancy({label: hostile}),
        viz.kv_memory_side_by_side({label: hostile}),
        viz.latency_cdfs({label: hostile}),
        viz.seats(hostile, title=label),
    ):
        fig.canvas.draw()


# The other figures


def test_occupancy_figure_holds_the_useful_rows_and_their_mean(traces):
    fig = viz.occupancy(traces, time="step")
    for ax, trace in zip(fig.axes, traces.values(), strict=True):
        edges, useful = by_gid(ax, "useful").get_data()
        assert list(useful[:-1]) == [len(record.plan.scheduled) for record in trace.steps]
        assert list(edges) == list(range(len(trace.steps) + 1))
        mean = metrics.occupancy(trace)
        assert by_gid(ax, "mean").get_ydata()[0] == mean
        assert by_gid(ax, "seat limit").get_ydata()[0] == 8
        assert {text.get_text() for text in ax.texts} == {"8 seats", f"mean {mean:.1f}"}
        low, high = area_steps(by_gid(ax, "padding"))
        assert list(low) == list(useful[:-1])
        assert sum(high - low) == num_padding(trace)
    assert fig.get_suptitle() == "Useful rows on average: static 5.6, static:release 5.6, fcfs 7.4"


def test_occupancy_falls_to_zero_while_nothing_runs():
    trace = simulate([Request("a", 1, 2, arrival=3.0), Request("b", 1, 2, arrival=10.0)], "fcfs")
    edges, useful = by_gid(viz.occupancy({"a": trace}).axes[0], "useful").get_data()
    assert list(useful) == [0, 1, 1, 0, 1, 1, 1]
    assert list(edges) == [0, 3, 4, 5, 10, 11, 12]


def test_kv_figure_holds_blocks_tokens_pool_and_preemptions(preempting):
    trace = preempting["fcfs"]
    fig = viz.kv_memory(trace, time="step")
    (ax,) = fig.axes
    held, valid = [16 * r.num_held_blocks for r in trace.steps], [r.num_held_tokens for r in trace.steps]
    assert list(by_gid(ax, "held").get_ydata()[:-1]) == held
    assert [list(side) for side in area_steps(by_gid(ax, "valid"))] == [[0] * len(valid), valid]
    assert [list(side) for side in area_steps(by_gid(ax, "waste"))] == [valid, held]
    assert by_gid(ax, "pool").get_ydata()[0] == trace.cache.num_tokens
    assert len(by_gid(ax, "preempted").get_xdata()) == sum(bool(r.plan.preempted) for r in trace.steps)
    used = 1 - metrics.fragmentation(trace)
    assert (
        ax.get_title("left") == f"fcfs: {100 * used:.0f} % of held KV is in use, at most 12 of 12 blocks held"
    )


def test_latency_figure_marks_the_percentiles_and_tells_their_sample_size(preempting):
    fig = viz.latency_cdfs(preempting)
    for ax, kind, scale in zip(fig.axes, ("ttft", "tpot"), (1e3, 1e3), strict=True):
        for label, trace in preempting.items():
            times = [getattr(request, kind) * scale for request in trace.served]
            marks = by_gid(ax, f"{kind} percentiles of {label}")
            assert marks.get_xdata() == pytest.approx(np.percentile(times, (50, 99)))
            assert list(marks.get_ydata()) == [0.5, 0.99]
            assert sorted(set(by_gid(ax, f"{kind} of {label}").get_xdata()[1:])) == pytest.approx(
                sorted(set(times))
            )
        assert all(text.get_text().endswith("n = 14") for text in ax.get_legend().get_texts())
        assert ax.get_xlabel().endswith("(ms)")


def test_latency_figure_says_where_there_is_no_value():
    one_token = simulate([Request("a", 1, 1)], "fcfs")
    legend = viz.latency_cdfs({"a": one_token}).axes[1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["a: no value, n = 0"]


def test_every_axis_names_its_unit(traces, preempting):
    drawn = [
        viz.seats(traces["static"]),
        viz.seats(preempting["fcfs"], time="seconds"),
        viz.seats_side_by_side(preempting),
        viz.occupancy(traces),
        viz.kv_memory(traces["fcfs"]),
        viz.kv_memory_side_by_side(preempting),
        viz.latency_cdfs(traces),
    ]
    for fig in drawn:
        assert re.search(r"\((s|ms|steps)\)$", fig.axes[-1].get_xlabel())
        assert re.search(r"seat|fraction of requests|\((requests|tokens)\)", fig.axes[0].get_ylabel())


def test_a_given_title_stands_in_for_the_computed_one(traces):
    assert viz.seats(traces["fcfs"], title="Mine").axes[0].get_title("left") == "Mine"
    assert viz.latency_cdfs(traces, title="Mine").get_suptitle() == "Mine"


def test_a_figure_goes_into_the_axis_given(traces):
    fig, axs = plt.subplots(2)
    assert viz.seats(traces["fcfs"], ax=axs[0]) is fig
    assert viz.kv_memory(traces["fcfs"], ax=axs[1]) is fig
    assert plt.get_fignums() == [fig.number]


# Looks and words


def test_each_known_policy_has_a_look_of_its_own_beside_colour():
    looks = [viz.policy_look(name) for name in ("static", "static:release", "fcfs", "prefill_first", "sjf")]
    assert set(policies.available()) >= {"static", "fcfs", "prefill_first", "sjf"}
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)
    other = viz.policy_look("a policy of mine")
    assert other.color not in {look.color for look in looks}
    assert other.marker not in {look.marker for look in looks}


def test_long_labels_are_shortened_but_stay_apart(traces):
    fig = viz.occupancy({"x" * 60: traces["fcfs"], "x" * 61: traces["static"]})
    assert [ax.get_title("left") for ax in fig.axes] == ["x" * 31 + "…", "x" * 31 + "… (2)"]


def test_a_label_that_looks_like_a_shortened_one_loses_no_run(traces):
    given = {"x (3)": traces["fcfs"], "x": traces["static"], "x ": traces["fcfs"], " x": traces["static"]}
    found = axes.shortened(given)
    assert list(found.values()) == list(given.values())


def test_a_moment_of_the_host_between_steps_is_no_dip(traces):
    trace = traces["fcfs"]
    steps = tuple(replace(record, duration=0.9 * record.duration) for record in trace.steps)
    hosted = replace(trace, steps=steps)
    values = [record.num_running for record in steps]
    rows, edges = axes.Clock.of([hosted], "seconds").stairs(hosted, values)
    assert len(edges) == len(rows) + 1
    assert list(rows[rows > 0]) == values
    assert (rows == 0).sum() == sum(not record.num_staying for record in steps[:-1])


def test_two_runs_of_one_policy_look_different(traces):
    fig = viz.latency_cdfs({"first": traces["fcfs"], "second": traces["fcfs"]})
    first, second = (by_gid(fig.axes[0], f"ttft of {label}") for label in ("first", "second"))
    assert first.get_color() != second.get_color()


def test_style_is_fixed_and_large_enough_to_read():
    with plt.rc_context():
        viz.use_style()
        assert plt.rcParams["svg.hashsalt"] == "cbresearch"
        assert min(plt.rcParams[f"{key}.labelsize"] for key in ("axes", "xtick", "ytick")) >= 11
        assert all(contrast(color, ink_on(color)) > 4.5 for color in REQUEST_COLORS)


def contrast(one, other):
    def luminance(color):
        channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (words.number(None), "–"),
        (words.number(float("nan")), "–"),
        (words.number(0), "0"),
        (words.number(12345), "12,345"),
        (words.number(0.123456), "0.1235"),
        (words.duration(None), "–"),
        (words.duration(0.0123), "12.3 ms"),
        (words.duration(0.00004), "40 µs"),
        (words.duration(91.0), "91 s"),
        (words.percent(-0.0312), "−3.12 %"),
        (words.percent(None), "–"),
    ],
)
def test_a_number_is_shown_with_its_unit_or_a_dash(shown, text):
    assert shown == text
