"""Figures of memory, blocks, choices and machines hold what the trace and the formulas say."""

import re
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from test_blockmap import prefixed

from cbresearch import formulas, metrics, policies, viz
from cbresearch.config import CacheConfig, Hardware, ModelShape, SchedulerConfig
from cbresearch.costs import CARDS, Linear, Roofline
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.viz import axes, figures, words
from cbresearch.viz.blockmap import BlockMap
from cbresearch.viz.figures.choice import non_dominated
from cbresearch.viz.figures.machine import roofline_point
from cbresearch.viz.seating import request_colors
from cbresearch.viz.style import INK, REQUEST_COLORS

COST = Linear(step=0.003, token=0.0001)
SHAPE = ModelShape(32, 32, 8, 128, 8_000_000_000, 2)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def by_gid(ax, gid):
    found = [artist for artist in ax.get_children() if artist.get_gid() == gid]
    assert len(found) <= 1
    return found[0] if found else None


def heights(collection):
    """Return how high a filled area is in each interval between its edges, zero-high ones included."""
    (path,) = collection.get_paths()
    x, y = path.vertices[:-1].T
    half = len(x) // 2
    first, second = y[1:half][:-1:2], y[half + 1 :][::-1][:-1:2]
    return np.abs(first - second)


# Memory by category


def test_categories_are_those_of_the_trace_stacked_up_to_the_pool():
    requests = prefixed()
    trace = simulate(
        requests, "fcfs", cost=COST, scheduler=SchedulerConfig(5, 32), cache=CacheConfig(24, 4, True)
    )
    (ax,) = viz.kv_categories(trace, time="step").axes
    uses = list(metrics.memory(trace))
    total = np.zeros(len(uses))
    for name in ("token_states", "reserved", "internal", "external", "cached", "free"):
        expected = [getattr(use, name) for use in uses]
        area = by_gid(ax, name)
        assert (area is None) == (not any(expected))
        if area is not None:
            assert list(heights(area)) == expected
            total += heights(area)
    assert set(total) == {trace.cache.num_tokens} == {by_gid(ax, "pool").get_ydata()[0]}


def test_categories_title_says_the_shares_that_the_metrics_give():
    trace = simulate(
        prefixed(), "fcfs", cost=COST, scheduler=SchedulerConfig(5, 32), cache=CacheConfig(24, 4)
    )
    fig = viz.kv_categories({"mine": trace, "again": trace})
    used = metrics.memory_shares(trace)["token_states"]
    assert f"mine {100 * used:.0f} %" in fig.get_suptitle()
    assert len(fig.axes) == 2
    assert f"in use {100 * used:.0f} %" in fig.axes[0].get_title("left")


def test_a_pool_far_larger_than_needed_is_cut_and_says_so():
    trace = simulate([Request("a", 4, 6)], "fcfs", cache=CacheConfig(1000, 4))
    (ax,) = viz.kv_categories(trace).axes
    needed = max(trace.cache.num_tokens - use.free for use in metrics.memory(trace))
    assert needed < ax.get_ylim()[1] < 2 * needed
    assert [text.get_text() for text in ax.texts] == ["pool\n4,000 ↑"]


# Who holds which block


@pytest.fixture(scope="module")
def shared():
    return simulate(
        prefixed(), "fcfs", cost=COST, scheduler=SchedulerConfig(5, 32), cache=CacheConfig(48, 4, True)
    )


def test_block_map_paints_holders_shared_and_cached_blocks(shared):
    (ax,) = viz.block_map(shared).axes
    pixels = by_gid(ax, "blocks").get_array()
    colors = request_colors([shared])
    # A byte a channel: a pool of 100,000 blocks over 2,000 steps would take 5 GB as float64.
    assert (pixels.shape, pixels.dtype) == ((48, len(shared.steps), 3), np.uint8)
    for step, held in enumerate(BlockMap.of(shared).states()):
        for block in range(48):
            names = held.holders.get(block, ())
            painted = to_hex(pixels[block, step] / 255).upper()
            if len(names) == 1:
                assert painted == REQUEST_COLORS[colors[names[0]]].upper()
            else:
                assert painted == (INK if names else "#BDBDBD" if block in held.cached else "#FFFFFF").upper()
    most = max(record.num_held_blocks for record in shared.steps)
    assert ax.get_title("left").startswith(
        f"fcfs holds up to {most} of 48 KV blocks, and sharing saves up to"
    )


def test_block_map_of_one_step_names_the_holders(shared):
    step = max(range(len(shared.steps)), key=lambda place: shared.steps[place].num_shared_blocks)
    held = BlockMap.of(shared).state(step)
    (ax,) = viz.block_map(shared, step=step).axes
    written = sorted(text.get_text() for text in ax.texts)
    names = held.holders.values()
    assert written == sorted(n[0] if len(n) == 1 else f"{len(n)} share" for n in names)
    num_free = 48 - len(held.holders) - len(held.cached)
    title = re.sub(r"\s+", " ", ax.get_title("left"))
    assert f"hold {len(held.holders)} of 48 KV blocks" in title and title.endswith(f"{num_free} free")


def test_block_map_draws_no_more_steps_than_asked_and_refuses_one_that_is_not_there(shared):
    (ax,) = viz.block_map(shared, max_steps=7).axes
    assert by_gid(ax, "blocks").get_array().shape[1] == 7
    with pytest.raises(
        ValueError, match=f"step is {len(shared.steps)}; the run has {len(shared.steps)} steps"
    ):
        viz.block_map(shared, step=len(shared.steps))


# Choices


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
        assert [text.get_text() for text in ax.texts] == ["50", "100", "200"] * 2
    assert fig.get_suptitle().startswith("At 200 requests/s, fcfs gives")


def test_tradeoff_of_nothing_is_refused():
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
    assert figures.front({name: metrics.summary(trace) for name, trace in runs.items()}) == ["fcfs"]
    for label, trace in runs.items():
        (x,), (y,) = by_gid(ax, f"run {label}").get_data()
        assert x == metrics.ttft(trace).p99 and y == metrics.output_throughput(trace)
    assert list(by_gid(ax, "front").get_xdata()) == [metrics.ttft(runs["fcfs"]).p99]
    assert {text.get_text() for text in ax.texts} == {"static", "fcfs"}
    assert ax.get_title("left") == "fcfs is best in both"
    assert ax.get_xlabel() == "TTFT p99 (s), less is better"
    with pytest.raises(ValueError, match="no metric 'speed'"):
        viz.pareto(runs, x="speed")


def test_equal_runs_do_not_beat_each_other(loads):
    summary = metrics.summary(loads["fcfs"][50.0])
    assert figures.front({"a": summary, "b": summary}) == ["a", "b"]


# The machine


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
    assert "a decode of 64 requests reaches" in ax.get_title("left").replace("\n", " ")


def test_a_long_prompt_is_bound_by_arithmetic():
    card = CARDS["h100-sxm"]
    point = roofline_point(Roofline(SHAPE, card), "prefill", 8192, 1)
    assert point.flops == pytest.approx(card.peak_flops)


# Looks


def test_every_policy_of_the_package_has_a_look_of_its_own():
    names = [name for name in policies.table() if policies.get(name).__module__.startswith("cbresearch.")]
    assert len(names) >= 26
    looks = [viz.policy_look(name) for name in [*names, "static:release"]]
    assert len({(look.color, look.marker) for look in looks}) == len(looks)
    assert all(viz.policy_look(f"mine {n}") not in looks for n in range(300))


def test_runs_of_a_figure_never_share_a_look_and_known_policies_keep_theirs():
    known = [name for name in policies.table() if policies.get(name).__module__.startswith("cbresearch.")]
    given = {name: name for name in [*known, *(f"mine {n}" for n in range(40))]}
    found = axes.looks_of(given)
    assert list(found) == list(given)
    assert len(set(found.values())) == len(given)
    assert all(found[name] == viz.policy_look(name) for name in known)


def test_times_far_apart_get_an_axis_on_which_all_can_be_read():
    slow = simulate([Request(str(n), 1, 2) for n in range(9)], "fcfs", cost=Linear(step=1.0))
    fast = simulate([Request(str(n), 1, 2) for n in range(9)], "fcfs", cost=Linear(step=0.001))
    assert viz.latency_cdfs({"slow": slow, "fast": fast}).axes[0].get_xscale() == "log"
    assert viz.latency_cdfs({"slow": slow}).axes[0].get_xscale() == "linear"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ttft_p99_s", "TTFT p99 (s)"),
        ("output_throughput_tokens_per_s", "output throughput (tokens/s)"),
        ("goodput_requests_per_s", "goodput (requests/s)"),
        ("utilization", "utilization"),
    ],
)
def test_a_metric_is_named_as_a_reader_knows_it(name, shown):
    assert words.metric(name) == shown


@pytest.mark.filterwarnings("ignore:Glyph")
def test_ids_and_labels_of_any_letters_are_drawn():
    name = "$x^{2$\ud800\x00</b>\u202e"
    trace = simulate([Request(name, 3, 5), Request("$", 9, 3)], "fcfs", cache=CacheConfig(8, 4))
    for fig in (
        viz.kv_categories({name: trace, "$": trace}),
        viz.block_map(trace),
        viz.block_map(trace, step=1),
        viz.tradeoff({name: {1.0: trace}}),
        viz.pareto({name: trace, "$": trace}),
        viz.seats_side_by_side({name: trace}),
    ):
        fig.canvas.draw()


@pytest.mark.parametrize("pair", ["1.38 times", "12 %", "3.5 s", "1 step", "90 steps", "70 tokens/s"])
def test_a_title_breaks_no_number_from_its_unit(pair):
    for width in np.arange(3, 9, 0.25):
        fig, ax = plt.subplots(figsize=(width, 2))
        axes.title(ax, f"one run takes up to {pair} as long as another one does")
        axes.suptitle(fig, f"one run takes up to {pair} as long as another one does")
        plt.close(fig)
        assert pair in ax.get_title("left") and pair in fig.get_suptitle()


def test_runs_without_a_step_can_be_drawn():
    empty = simulate([], "fcfs")
    assert viz.kv_categories(empty).get_suptitle() == "No KV is held"
    assert viz.kv_memory(empty).axes[0].get_title("left") == "fcfs holds no KV"
    assert viz.block_map(empty).axes[0].get_title("left") == "fcfs holds no KV block"
    assert viz.pareto({"a": empty}).axes[0].get_title("left") == "No run defines both"
    assert viz.tradeoff({"a": {1.0: empty}}).get_suptitle() == "No request got a token"
