"""Figures of latencies, choices and machines hold what the trace and the formulas say."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers.artists import by_gid
from matplotlib.text import Text

from cbresearch import formulas, metrics, viz
from cbresearch.config import Hardware, ModelShape, SchedulerConfig
from cbresearch.costs import CARDS, Linear, Roofline
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.viz.charts import non_dominated, roofline_point

COST = Linear(step=0.003, token=0.0001)
SHAPE = ModelShape(32, 32, 8, 128, 8_000_000_000, 2)


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


@pytest.fixture(scope="module")
def loads():
    def at(policy, rate):
        requests = [Request(str(n), 20, 5 + n % 9, arrival=n / rate) for n in range(30)]
        return simulate(requests, policy, cost=COST, scheduler=SchedulerConfig(4))

    return {
        policy: {rate: at(policy, rate) for rate in (200.0, 50.0, 100.0)} for policy in ("static", "fcfs")
    }


def test_tradeoff_joins_the_points_of_a_policy_in_the_order_of_the_load(loads):
    fig = viz.tradeoff(loads)
    for ax, kind in zip(fig.axes, ("ttft", "tpot"), strict=True):
        for policy, runs in loads.items():
            x, y = by_gid(ax, f"{kind} of {policy}").get_data()
            order = [runs[rate] for rate in sorted(runs)]
            assert list(x) == [metrics.output_throughput(trace) for trace in order]
            times = [[value for r in t.served if (value := getattr(r, kind)) is not None] for t in order]
            assert list(y) == pytest.approx([np.percentile(values, 99) for values in times])
        assert sorted(text.get_text() for text in ax.texts) == sorted(["50", "100", "200"] * 2)
    assert fig.get_suptitle().startswith("Time to first token (p99) at 200 requests/s: fcfs ")


def test_tradeoff_of_nothing_is_rejected():
    with pytest.raises(ValueError, match="no run to draw"):
        viz.tradeoff({"fcfs": {}})


def test_non_dominated_points_are_those_that_none_beats():
    generator = np.random.default_rng(5)
    points = {str(n): tuple(generator.integers(0, 12, 2).tolist()) for n in range(60)}
    found = non_dominated(points, (1.0, -1.0))
    for label, (cost, gain) in points.items():
        beaten = any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in points.values())
        assert (label in found) is not beaten
    ordered = [points[label] for label in found]
    assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(ordered))


def test_pareto_joins_the_runs_that_none_beats_and_names_them(loads):
    runs = {policy: by_load[200.0] for policy, by_load in loads.items()}
    (ax,) = viz.pareto(runs).axes
    for label, trace in runs.items():
        (x,), (y,) = by_gid(ax, f"run {label}").get_data()
        assert x == metrics.ttft(trace).p99 and y == metrics.output_throughput(trace)
    assert list(by_gid(ax, "front").get_xdata()) == [metrics.ttft(runs["fcfs"]).p99]
    assert {text.get_text() for text in ax.texts} == {"static", "fcfs"}
    assert ax.get_title("left") == "fcfs is best in both"
    assert ax.get_xlabel() == "TTFT p99 (s), less is better"
    with pytest.raises(ValueError, match="no metric 'speed'"):
        viz.pareto(runs, x="speed")


def test_equal_runs_do_not_beat_each_other():
    assert non_dominated({"a": (1.0, 2.0), "b": (1.0, 2.0)}) == ["a", "b"]


@pytest.mark.parametrize("size", [1, 16, 400])
@pytest.mark.parametrize("context", [1, 700])
def test_a_decode_lies_where_the_formulas_put_it(size, context):
    card = CARDS["h100-sxm"]
    point = roofline_point(Roofline(SHAPE, card), "decode", size, context)
    flop = size * formulas.flops_per_token(SHAPE, context)
    seconds = sum(formulas.decode_step_seconds(SHAPE, size, context, card.peak_flops, card.bandwidth))
    assert point.flops == pytest.approx(flop / seconds)
    moved = SHAPE.num_parameters * 2 + size * context * formulas.kv_bytes_per_token(SHAPE)
    assert point.intensity == pytest.approx(flop / moved)


def test_no_step_lies_above_the_roof_and_marks_are_where_the_points_are():
    machine = Hardware("card", 1e14, 1e12)
    cost = Roofline(SHAPE, machine)
    (ax,) = viz.roofline(cost, batch_sizes=(1, 64), prompt_lengths=(32, 4096), context_length=512).axes
    assert by_gid(ax, "ridge").get_xdata()[0] == 100
    for kind, sizes in (("decode", (1, 64)), ("prefill", (32, 4096))):
        x, y = by_gid(ax, kind).get_data()
        points = [roofline_point(cost, kind, size, 512) for size in sizes]
        assert list(zip(x, y, strict=True)) == [(point.intensity, point.flops) for point in points]
        assert all(y <= np.minimum(x * machine.bandwidth, machine.peak_flops) * (1 + 1e-9))
    roof_x, roof_y = by_gid(ax, "roof").get_data()
    assert list(roof_y) == pytest.approx([min(x * 1e12, 1e14) for x in roof_x])
    assert "decode of 64 " in ax.get_title("left").replace("\n", " ")


def test_a_long_prompt_is_bound_by_arithmetic():
    card = CARDS["h100-sxm"]
    point = roofline_point(Roofline(SHAPE, card), "prefill", 8192, 1)
    assert point.flops == pytest.approx(card.peak_flops)


def test_labels_of_close_points_do_not_overlap():
    fig, ax = plt.subplots()
    generator = np.random.default_rng(3)
    points = [(f"policy {n}", float(x), float(y)) for n, (x, y) in enumerate(generator.random((14, 2)) * 0.3)]
    ax.plot(*zip(*((x, y) for _, x, y in points), strict=True), "o")
    viz.label_points(ax, points, bold=["policy 3"])
    fig.canvas.draw()
    # Without the arrows.
    boxes = [Text.get_window_extent(note) for note in ax.texts]
    assert len(boxes) == 14
    assert not any(one.overlaps(other) for one, other in pairwise(sorted(boxes, key=lambda box: box.y0)))


def test_times_far_apart_get_an_axis_on_which_all_can_be_read():
    slow = simulate([Request(str(n), 1, 2) for n in range(9)], "fcfs", cost=Linear(step=1.0))
    fast = simulate([Request(str(n), 1, 2) for n in range(9)], "fcfs", cost=Linear(step=0.001))
    assert viz.latency_cdfs({"slow": slow, "fast": fast}).axes[0].get_xscale() == "log"
    assert viz.latency_cdfs({"slow": slow}).axes[0].get_xscale() == "linear"
