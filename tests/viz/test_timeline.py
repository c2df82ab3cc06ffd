"""The seat and occupancy figures show what the trace holds."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.artists import area_steps, by_gid
from helpers.demo_runs import HOSTILE, pressed

from cbresearch import export, metrics, viz
from cbresearch.costs import Linear
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.viz.style import REQUEST_COLORS, Clock
from cbresearch.viz.timeline import request_colors, seat_stays


def widths(collection):
    return [np.ptp(path.vertices[:, 0]) for path in collection.get_paths()]


def num_served(trace):
    return sum(len(record.plan.scheduled) for record in trace.steps)


def num_padding(trace):
    return sum(len(record.plan.padding) for record in trace.steps)


def test_seat_stays_cover_their_steps_without_gaps_and_agree_with_the_traces_stays(preempting):
    for trace in preempting.values():
        stays = {(stay.request_id, stay.first_step): stay for stay in export.stays_of(trace)}
        found = seat_stays(trace)
        assert len(found) == len(stays)
        for seated in found:
            stay = stays[seated.request_id, seated.first]
            assert seated.seat == stay.seat
            assert seated.end > stay.last_step
            edges = [seated.first, *(span.end for span in seated.spans)]
            assert [span.first for span in seated.spans] == edges[:-1] and edges[-1] == seated.end
            padding = sum(span.end - span.first for span in seated.spans if span.kind == "padding")
            assert padding == stay.num_padding_steps


def test_request_colors_differ_within_a_seat(traces, preempting):
    for group in (traces, preempting):
        runs = [seat_stays(trace) for trace in group.values()]
        colors = request_colors(runs)
        assert set(colors.values()) == set(range(len(REQUEST_COLORS)))
        for stays in runs:
            rows = {}
            for stay in stays:
                previous = rows.get(stay.seat)
                rows[stay.seat] = stay.request_id
                if previous not in (None, stay.request_id):
                    assert colors[previous] != colors[stay.request_id]


def test_seats_draws_every_row_and_hatches_the_padding(traces):
    fig = viz.seats(traces["static"], time="step")
    (ax,) = fig.axes
    assert sum(widths(by_gid(ax, "served"))) == num_served(traces["static"]) == 510
    padding = by_gid(ax, "padding")
    assert sum(widths(padding)) == num_padding(traces["static"]) > 0
    assert padding.get_hatch()
    assert ax.get_title("left") == "static: 5.6 of 8 seats busy on average over 91 steps"
    assert {text.get_text() for text in ax.texts} == {"done: 91 steps", *(str(n) for n in range(60))}
    legend = {text.get_text() for text in fig.legends[0].get_texts()}
    assert legend == {"served (a colour per request)", "finished, still computed (padding)", "empty seat"}


def test_seats_marks_each_preemption_where_the_stay_ends(preempting):
    trace = preempting["fcfs"]
    marks = by_gid(viz.seats(trace, time="step").axes[0], "preempted")
    expected = [step for step, record in enumerate(trace.steps) for _ in record.plan.preempted]
    assert sorted(marks.get_xdata()) == expected != []


def test_seats_tells_waiting_in_a_seat_from_being_served(preempting):
    trace = preempting["prefill_first"]
    ax = viz.seats(trace, time="step").axes[0]
    seated = sum(record.num_running for record in trace.steps)
    assert sum(widths(by_gid(ax, "served"))) == num_served(trace)
    assert sum(widths(by_gid(ax, "held"))) == seated - num_served(trace) > 0


def test_seats_ends_a_shorter_run_earlier_on_the_shared_axis(traces):
    fig = viz.seats(traces, time="step")
    assert [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes] == [91, 91, 69]
    assert len({ax.get_xlim() for ax in fig.axes}) == 1
    assert fig.get_suptitle() == "fcfs is done after 69 steps, static after 91 steps, 1.32 times as long"


def test_seats_of_an_excerpt_does_not_call_the_run_done(traces):
    fig = viz.seats(traces, time="step", max_steps=80)
    marks = [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes]
    notes = [ax.texts[-1].get_text() for ax in fig.axes]
    assert (marks, notes) == ([80, 80, 69], ["goes on →", "goes on →", "done: 69 steps"])
    assert fig.get_suptitle().startswith("fcfs is done after 69 steps, static after 91 steps")


def test_seats_of_runs_of_different_scale_share_one_unit():
    short = pressed("fcfs")
    long = simulate([Request("a", 1, 50)], "fcfs", cost=Linear(step=0.1))
    fig = viz.seats({"short": short, "long": long})
    ends = [by_gid(ax, "end").get_xdata()[0] for ax in fig.axes]
    assert short.duration < 1 < long.duration
    assert ends == pytest.approx([short.duration, long.duration])


def test_occupancy_holds_the_useful_rows_and_their_mean(traces):
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
    edges, useful = by_gid(viz.occupancy(trace).axes[0], "useful").get_data()
    assert list(useful) == [0, 1, 1, 0, 1, 1, 1]
    assert list(edges) == [0, 3, 4, 5, 10, 11, 12]


def test_occupancy_of_a_long_run_is_averaged_and_keeps_its_integral():
    requests = [Request(str(n), 1, 1 + n % 40, arrival=2.0 * n) for n in range(1200)]
    trace = simulate(requests, "fcfs")
    edges, useful = by_gid(viz.occupancy(trace).axes[0], "useful").get_data()
    assert len(trace.steps) > 1500 == len(edges) - 1
    assert useful[:-1] @ np.diff(edges) == pytest.approx(num_served(trace))


def test_a_moment_of_the_host_between_steps_is_no_dip(traces):
    trace = traces["fcfs"]
    steps = tuple(replace(record, duration=0.9 * record.duration) for record in trace.steps)
    hosted = replace(trace, steps=steps)
    values = np.array([record.num_running for record in steps])
    rows, edges = Clock.of({"": hosted}, "seconds").stairs(hosted, values)
    assert len(edges) == len(rows) + 1
    assert list(rows[rows > 0]) == list(values)
    assert (rows == 0).sum() == sum(not record.num_staying for record in steps[:-1])


def test_a_time_axis_of_another_unit_is_rejected(traces):
    with pytest.raises(ValueError, match="'step' or 'seconds'"):
        viz.seats(traces["fcfs"], time="minutes")


def test_ids_are_not_formulas():
    trace = simulate([Request(HOSTILE, 3, 5)], "fcfs")
    viz.seats(trace, title="cost in $, not $x^{2$ " * 20).canvas.draw()
