"""Where the KV pool's memory goes, and who holds which block."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from cbresearch.metrics import MemoryUse, memory
from cbresearch.trace import Trace
from cbresearch.viz import axes, style, words
from cbresearch.viz.axes import Clock, area, line, waste
from cbresearch.viz.blockmap import BlockMap, PoolState
from cbresearch.viz.seating import request_colors
from cbresearch.viz.words import TimeAxis

# From the ground up, as the areas are stacked.
_CATEGORIES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "token_states": ("tokens in use", {"facecolor": "#0072B2"}),
        "reserved": ("reserved for later tokens", {"facecolor": "#56B4E9"}),
        "internal": ("held, never filled", waste()),
        "external": ("out of reach", {"facecolor": "#E69F00"}),
        "cached": ("cached prefixes", {"facecolor": "#009E73"}),
        "free": ("free", {"facecolor": "#F6F6F6", "edgecolor": style.FRAME_COLOR}),
    }
)
_CACHED_COLOR, _FREE_COLOR = "#BDBDBD", "#FFFFFF"
_GRID_COLUMNS = 16


def kv_memory(
    trace: Trace, ax: Axes | None = None, *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw how much of the KV pool is held, and how much of that holds a token that is still needed.

    Args:
        trace: The run.
        ax: Where to draw; a new figure by default.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default how full the held blocks are, and their peak.
    """
    fig, ax = axes.axes(ax, height=4)
    clock = Clock.of([trace], time)
    _draw_kv(ax, trace, clock)
    axes.title(ax, title or words.kv_finding(trace))
    clock.label(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return fig


def kv_memory_side_by_side(
    traces: Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw the KV pool of several runs on one time axis.

    Args:
        traces: The runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default how full each run's held blocks are.
    """
    traces = axes.shortened(traces)
    fig, axs = plt.subplots(
        len(traces), 1, sharex=True, sharey=True, squeeze=False, figsize=(9, 1.5 + 2.1 * len(traces))
    )
    clock = Clock.of(traces.values(), time)
    meanings: dict[str, Any] = {}
    tops = []
    for ax, (label, trace) in zip(axs[:, 0], traces.items(), strict=True):
        _draw_kv(ax, trace, clock)
        tops.append(ax.get_ylim()[1])
        axes.title(ax, words.kv_finding(trace, label), size=12, weight="normal")
        handles, labels = ax.get_legend_handles_labels()
        meanings |= dict(zip(labels, handles, strict=True))
    axs[0, 0].set_ylim(0, max(tops))
    clock.label(axs[-1, 0])
    axes.suptitle(fig, title or words.kv_findings(traces))
    fig.legend(list(meanings.values()), list(meanings), loc="outside lower left", ncols=4)
    return fig


def kv_categories(
    traces: Trace | Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw what each slot of the KV pool is used for over time, stacked up to the pool; a panel a run.

    Args:
        traces: One run, or runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default each run's share of the pool that holds tokens in use, and
            what most of the rest is.

    Returns:
        The figure. Where a pool is over three times what a run ever needs of it, the free rest is cut off.
    """
    traces = {traces.policy: traces} if isinstance(traces, Trace) else traces
    traces = axes.shortened(traces)
    fig, axs = plt.subplots(len(traces), 1, sharex=True, squeeze=False, figsize=(9, 1.7 + 2.0 * len(traces)))
    clock = Clock.of(traces.values(), time)
    drawn: set[str] = set()
    for ax, (label, trace) in zip(axs[:, 0], traces.items(), strict=True):
        uses, pool = list(memory(trace)), trace.cache.num_tokens
        heights, edges = clock.stairs(trace, np.array(uses, dtype=int).reshape(-1, len(MemoryUse._fields)))
        below = np.zeros(len(heights), dtype=int)
        for name, (_, look) in _CATEGORIES.items():
            values = heights[:, MemoryUse._fields.index(name)]
            if values.any():
                area(ax, edges, below, below + values, **{"linewidth": 0, **look}, gid=name)
                drawn.add(name)
            below = below + values
        peak = max((pool - use.free for use in uses), default=0)
        top = pool if pool <= 3 * peak else max(1, peak) * 1.3
        axes.end_label(ax, top, f"pool\n{pool:,}{' ↑' if top < pool else ''}", style.INK)
        ax.axhline(pool, color=style.INK, linestyle="--", linewidth=1.2, gid="pool")
        ax.set_ylim(0, top * 1.02)
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.set_ylabel("KV (tokens)")
        axes.title(ax, words.categories_finding(trace, label), size=12, weight="normal")
    clock.label(axs[-1, 0])
    axes.suptitle(fig, title or words.categories_findings(traces))
    patches = [
        Patch(**{"linewidth": 0.4, **look}, label=name)
        for category, (name, look) in _CATEGORIES.items()
        if category in drawn
    ]
    fig.legend(handles=patches, loc="outside lower left", ncols=3)
    return fig


def block_map(
    trace: Trace,
    ax: Axes | None = None,
    *,
    step: int | None = None,
    title: str | None = None,
    max_steps: int = 2000,
) -> Figure:
    """Draw which request holds which physical block of the KV pool: over the steps, or in one step.

    Args:
        trace: The run.
        ax: Where to draw; a new figure by default.
        step: Draw the pool in this step, a square a block; by default a row a block and a column a step.
        title: What the figure shows; by default how much of the pool is held at most, and how much is shared.
        max_steps: Draw only this many steps, from the first.

    Raises:
        ValueError: The run has no such step.
    """
    num_steps = len(trace.steps)
    if step is not None and not 0 <= step < num_steps:
        raise ValueError(f"step is {step}; the run has {num_steps} steps, counted from 0")
    colors = request_colors([replace(trace, steps=trace.steps[:max_steps] if step is None else trace.steps)])
    seen: set[str] = set()
    if step is not None:
        state = BlockMap.of(trace, step + 1).state(step)
        fig = _block_grid(ax, trace, state, colors, seen)
        axes.title(fig.axes[0] if ax is None else ax, title or words.block_finding(trace, state, step))
    else:
        fig, ax = axes.axes(ax, height=2.0 + min(5.0, 0.09 * trace.cache.num_blocks))
        num_columns = min(num_steps, max_steps)
        pixels = np.full((trace.cache.num_blocks, num_columns, 3), 255, dtype=np.uint8)
        for place, state in enumerate(BlockMap.of(trace, num_columns).states()):
            for block, color in _block_colors(state, colors, seen).items():
                pixels[block, place] = np.rint(255 * np.array(to_rgb(color)))
        if num_columns:
            extent = (0, num_columns, trace.cache.num_blocks - 0.5, -0.5)
            image = ax.imshow(pixels, aspect="auto", interpolation="nearest", extent=extent)
            image.set_gid("blocks")
        ax.set_ylabel("KV block")
        ax.set_xlabel("time (steps)")
        axes.title(ax, title or words.blocks_finding(trace))
    meanings = {
        "one": Patch(facecolor=style.REQUEST_COLORS[0], label="held by one request (a colour each)"),
        "shared": Patch(facecolor=style.INK, label="shared by several"),
        "cached": Patch(facecolor=_CACHED_COLOR, label="cached prefix, held by nobody"),
        "free": Patch(facecolor=_FREE_COLOR, edgecolor="#9A9A9A", label="free"),
    }
    handles = [patch for kind, patch in meanings.items() if kind in seen | {"free"}]
    fig.legend(handles=handles, loc="outside lower left", ncols=2)
    return fig


def _block_colors(state: PoolState, colors: Mapping[str, int], seen: set[str]) -> dict[int, str]:
    """Return the fill of each block that is not free, and note which kinds there are."""
    found = dict.fromkeys(state.cached, _CACHED_COLOR)
    for block, names in state.holders.items():
        found[block] = style.REQUEST_COLORS[colors[names[0]]] if len(names) == 1 else style.INK
        seen.add("one" if len(names) == 1 else "shared")
    if state.cached:
        seen.add("cached")
    return found


def _block_grid(
    ax: Axes | None, trace: Trace, state: PoolState, colors: Mapping[str, int], seen: set[str]
) -> Figure:
    num_blocks = trace.cache.num_blocks
    num_columns = min(_GRID_COLUMNS * (1 + num_blocks // 512), num_blocks)
    num_rows = -(-num_blocks // num_columns)
    fig, ax = axes.axes(ax, height=1.6 + 0.5 * min(num_rows, 16))
    fills = _block_colors(state, colors, seen)
    for block in range(num_blocks):
        row, place = divmod(block, num_columns)
        fill = fills.get(block, _FREE_COLOR)
        box = Rectangle(
            (place, row), 0.94, 0.92, facecolor=fill, edgecolor="#9A9A9A", linewidth=0.6, gid=f"block {block}"
        )
        ax.add_patch(box)
        names = state.holders.get(block, ())
        text = (
            words.visible(names[0], lines=False)
            if len(names) == 1
            else f"{len(names)} share"
            if names
            else ""
        )
        if text and num_columns <= _GRID_COLUMNS and len(text) <= 8:
            center = (place + 0.47, row + 0.46)
            ink = style.ink_on(fill)
            ax.text(*center, text, ha="center", va="center", fontsize=8, color=ink, parse_math=False)
    ax.set_xlim(0, num_columns)
    ax.set_ylim(num_rows, 0)
    ax.set_xticks([place + 0.47 for place in range(0, num_columns, 4)], list(range(0, num_columns, 4)))
    ax.set_yticks([row + 0.46 for row in range(num_rows)], [row * num_columns for row in range(num_rows)])
    if num_rows > 16:
        ax.yaxis.set_major_locator(plt.MaxNLocator(8))
    for side in ax.spines.values():
        side.set_visible(False)
    ax.tick_params(length=0)
    ax.set_ylabel("KV block")
    ax.set_xlabel("number of the block = row + column")
    return fig


def _draw_kv(ax: Axes, trace: Trace, clock: Clock) -> None:
    size, pool = trace.cache.block_size, trace.cache.num_tokens
    held, edges = clock.stairs(trace, [record.num_held_blocks * size for record in trace.steps])
    valid, _ = clock.stairs(trace, [record.num_held_tokens for record in trace.steps])
    area(ax, edges, valid, held, **waste(), gid="waste", label="held without a token in use")
    area(ax, edges, 0, valid, color="#56B4E9", linewidth=0, gid="valid", label="tokens in use")
    line(ax, edges, held, color="#0072B2", linewidth=1.6, gid="held", label="held blocks")
    peak = int(held.max(initial=0))
    top = max(1, peak) * 1.3
    if pool <= 3 * peak:
        top = pool * 1.12
        ax.axhline(pool, color=style.INK, linestyle="--", linewidth=1.2, gid="pool")
        axes.end_label(ax, pool, f"pool\n{pool:,}", style.INK)
    else:
        # Drawn to scale, a pool this large would flatten all the rest.
        axes.end_label(ax, top, f"pool\n{pool:,} ↑", style.INK)
    starts = clock.edges(trace)[0]
    lost = [start for start, record in zip(starts, trace.steps, strict=True) if record.plan.preempted]
    if lost:
        ax.plot(
            lost,
            [top] * len(lost),
            linestyle="none",
            marker="v",
            color=style.INK,
            clip_on=False,
            gid="preempted",
            label="preemption",
        )
    ax.set_ylim(0, top)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel("KV (tokens)")
