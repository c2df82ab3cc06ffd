"""What the KV pool is used for over time, and which request holds which physical block."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbresearch import metrics
from cbresearch.step import BlockEvents, Plan
from cbresearch.trace import StepRecord, Trace
from cbresearch.viz import style
from cbresearch.viz.style import Array, Clock, TimeAxis, area, line

NOWHERE = -1
"""Stands in a table for a block that fell out of the sliding window before the request was admitted."""

# Fill, and the words for it in the legend and in a sentence; from the ground up, as the areas are stacked.
_CATEGORIES: Mapping[str, tuple[Mapping[str, Any], str, str]] = MappingProxyType(
    {
        "token_states": ({"facecolor": "#0072B2"}, "tokens in use", "in use"),
        "reserved": ({"facecolor": "#56B4E9"}, "reserved for later tokens", "reserved"),
        "internal": (style.WASTE, "held, never filled", "never filled"),
        "external": ({"facecolor": "#E69F00"}, "out of reach", "out of reach"),
        "cached": ({"facecolor": "#009E73"}, "cached prefixes", "cached"),
        "free": ({"facecolor": "#F6F6F6", "edgecolor": style.FRAME_COLOR}, "free", "free"),
    }
)


@dataclass(slots=True)
class BlockTable:
    """A request's block table for as long as it lies in one of the two pools.

    A table grows at its end, and with a sliding window it loses blocks at its beginning.

    Attributes:
        request_id: The request.
        on_host: Whether the table lies in the host's pool; otherwise in the device's.
        first: Index of the first step.
        blocks: Physical block ids in table order.
        since: For each of them the index of the step from which on the table has it.
        lost: Ascending: the index of the step from which on the first, second and so on is not held any more.
        end: Index after the last step.
    """

    request_id: str
    on_host: bool
    first: int
    blocks: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    end: int = 0

    def extend(self, step: int, blocks: Sequence[int]) -> None:
        """Append blocks from a step on."""
        self.blocks += blocks
        self.since += [step] * len(blocks)

    def held(self, step: int) -> list[int]:
        """Return the physical blocks that the request refers to in a step, in table order."""
        if not self.first <= step < self.end:
            return []
        number, lost = (sum(when <= step for when in steps) for steps in (self.since, self.lost))
        return self.blocks[lost:number]


class CachedSpan(NamedTuple):
    """A block for as long as it holds a cached prefix that no request refers to.

    Attributes:
        block: Physical id, in the device's pool.
        first: Index of the first step.
        end: Index after the last one.
    """

    block: int
    first: int
    end: int


class BlockMap(NamedTuple):
    """The blocks of both pools in every step, as the records tell them.

    In a step a request has the blocks that the step's counts are of: those with which it computes, less what
    has then fallen out of the sliding window. Requests that the step finishes have theirs still, and so have
    the finished rows that a static batch computes.

    Attributes:
        tables: Every table of both pools, in the order in which they begin.
        cached: Every stretch of steps in which a block keeps a prefix that no request refers to.
    """

    tables: list[BlockTable]
    cached: list[CachedSpan]

    @classmethod
    def of(cls, steps: Iterable[StepRecord], first: int = 0) -> "BlockMap":
        """Read the records of a run, from its first step on.

        Args:
            steps: The records.
            first: Number of the first; steps below 0 come before those that are mapped.
        """
        pools = _Pools()
        for step, record in enumerate(steps, first):
            pools.advance(step, record)
        return cls([table for table in pools.tables if table.first < table.end], pools.cached_spans())


class _Pools:
    """Both pools while the records are read, one step after the other."""

    def __init__(self) -> None:
        self.tables: list[BlockTable] = []
        self._device: dict[str, BlockTable] = {}
        self._host: dict[str, BlockTable] = {}
        self._ended: set[str] = set()
        self._references: Counter[int] = Counter()
        self._findable: Counter[int] = Counter()
        # Blocks whose references or contents changed in the step.
        self._touched: set[int] = set()
        self._cached_since: dict[int, int] = {}
        self._cached: list[CachedSpan] = []
        self._num_steps = 0

    def advance(self, number: int, record: StepRecord) -> None:
        events, step = record.events, max(number, 0)
        self._end_tables(step, record.plan)
        self._grow_tables(step, record.plan)
        for request_id, block in events.released:
            if table := self._device.get(request_id):
                table.lost.append(step)
                self._refer([block], -1)
        self._move_host_tables(step, record.plan, events)
        # Within a step a block may be evicted and cached anew, or the other way round: they take turns.
        self._findable.update(events.cached)
        self._findable.subtract(events.evicted)
        self._follow_cached(step, self._touched.union(events.evicted, events.cached))
        self._touched.clear()
        self._ended.update(record.finished)
        self._num_steps = number + 1
        for table in (*self._device.values(), *self._host.values()):
            table.end = number + 1

    def cached_spans(self) -> list[CachedSpan]:
        last = [CachedSpan(block, first, self._num_steps) for block, first in self._cached_since.items()]
        return sorted((*self._cached, *last), key=lambda span: (span.first, span.block))

    def _end_tables(self, step: int, plan: Plan) -> None:
        self._ended.update(plan.aborted)
        # A static batch keeps the blocks of the finished rows that it computes.
        kept = {row.request_id for row in plan.padding}
        for request_id in (*plan.preempted, *(self._ended - kept)):
            if table := self._device.pop(request_id, None):
                self._refer(table.blocks[len(table.lost) :], -1)
        self._ended &= kept

    def _grow_tables(self, step: int, plan: Plan) -> None:
        for admission in plan.admitted:
            self._device[admission.request.id] = self._begin(admission.request.id, False, step)
        for entry in plan.scheduled:
            if entry.new_block_ids:
                table = self._device[entry.request_id]
                table.extend(step, entry.new_block_ids)
                table.lost += [step] * entry.new_block_ids.count(NOWHERE)
                self._refer(entry.new_block_ids, 1)

    def _move_host_tables(self, step: int, plan: Plan, events: BlockEvents) -> None:
        freed = set(events.host_freed)
        for request_id, table in list(self._host.items()):
            if not freed.isdisjoint(table.blocks):
                del self._host[request_id]
        for request_id, pairs in groupby(sorted(events.host_held, key=itemgetter(0)), key=itemgetter(0)):
            self._host[request_id] = self._begin(request_id, True, step)
            self._host[request_id].extend(step, [block for _, block in pairs])
        for request_id in self._host.keys() & {*self._device, *plan.aborted}:
            del self._host[request_id]

    def _begin(self, request_id: str, on_host: bool, step: int) -> BlockTable:
        table = BlockTable(request_id, on_host, step)
        self.tables.append(table)
        return table

    def _refer(self, blocks: Iterable[int], number: int) -> None:
        for block in blocks:
            self._references[block] += number
            self._touched.add(block)

    def _follow_cached(self, step: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            is_cached = self._findable[block] and not self._references[block]
            if is_cached:
                self._cached_since.setdefault(block, step)
            elif block in self._cached_since:
                span = CachedSpan(block, self._cached_since.pop(block), step)
                self._cached += [span] if span.first < step else []


def kv_memory(
    traces: Trace | Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw how much of the KV pool is held, and how much of that holds a token that is still needed.

    Args:
        traces: One run, or runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default how full the held blocks are.

    Returns:
        The figure, a panel a run. A pool over three times what the run ever holds is cut off.
    """
    traces = style.labelled(traces)
    fig, axs = style.panels(len(traces), 2.3, sharey=True)
    clock = Clock.of(traces, time)
    findings, tops = {}, []
    for ax, (label, trace) in zip(axs, traces.items(), strict=True):
        columns, size = trace.step_columns, trace.cache.block_size
        values = np.stack([columns["num_held_blocks"] * size, columns["num_held_tokens"]], axis=1)
        heights, edges = clock.stairs(trace, values)
        held, valid = heights.T
        area(ax, edges, valid, held, **style.WASTE, gid="waste", label="held without a token in use")
        area(ax, edges, 0, valid, color="#56B4E9", gid="valid", label="tokens in use")
        line(ax, edges, held, color="#0072B2", gid="held", label="held blocks")
        peak = float(values[:, 0].max(initial=0))
        top = _mark_pool(ax, trace, peak)
        tops.append(top)
        lost = clock.edges(trace)[0][columns["num_preempted"] > 0]
        if len(lost):
            look: dict[str, Any] = {"linestyle": "none", "marker": "v", "color": style.INK, "clip_on": False}
            ax.plot(lost, np.full(len(lost), top), **look, gid="preempted", label="preemption")
        used = metrics.fragmentation(trace)
        most = f"at most {peak / size:,.0f} of {trace.cache.num_blocks:,} blocks held"
        in_use = "" if used is None else f"{100 * (1 - used):.0f} % of held KV is in use, {most}"
        findings[label] = in_use or "no KV is held"
    axs[0].set_ylim(0, max(tops))
    clock.label(axs[-1])
    shares = ", ".join(f"{label} {finding.partition(' of')[0]}" for label, finding in findings.items())
    style.headings(fig, axs, findings, title, f"Held KV in use: {shares}")
    marks = {label: mark for ax in axs for mark, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    style.legend(fig, list(marks.values()))
    return fig


def kv_categories(
    traces: Trace | Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw what each slot of the KV pool is used for over time, stacked up to the pool.

    Args:
        traces: One run, or runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default the share of each run's pool that holds tokens in use.

    Returns:
        The figure, a panel a run. Where a pool is over three times what a run ever needs, the free rest is
        cut off.
    """
    traces = style.labelled(traces)
    fig, axs = style.panels(len(traces), 2.0)
    clock = Clock.of(traces, time)
    drawn: set[str] = set()
    findings = {}
    for ax, (label, trace) in zip(axs, traces.items(), strict=True):
        columns = metrics.memory_columns(trace)
        uses = np.stack([columns[name] for name in _CATEGORIES], axis=1)
        heights, edges = clock.stairs(trace, uses)
        tops = np.cumsum(heights, axis=1)
        for place, (name, (look, _, _)) in enumerate(_CATEGORIES.items()):
            if heights[:, place].any():
                area(ax, edges, tops[:, place] - heights[:, place], tops[:, place], **look, gid=name)
                drawn.add(name)
        pool = trace.cache.num_tokens
        ax.set_ylim(0, _mark_pool(ax, trace, pool - float(uses[:, -1].min(initial=pool))))
        findings[label] = _shares(uses, trace.step_columns["duration_s"])
    clock.label(axs[-1])
    most = ", ".join(f"{label} {finding.partition(',')[0]}" for label, finding in findings.items())
    style.headings(fig, axs, findings, title, f"Most of the KV pool: {most}")
    patches = [
        Patch(**{"linewidth": 0.4, **look}, label=words)
        for name, (look, words, _) in _CATEGORIES.items()
        if name in drawn
    ]
    style.legend(fig, patches, ncols=3)
    return fig


def _shares(uses: Array, seconds: Array) -> str:
    """Return what a pool is used for on average over time, the largest share first.

    Args:
        uses: Tokens a step and category, in the order of `_CATEGORIES`.
        seconds: Duration of each step.
    """
    whole = seconds.sum() * uses[:1].sum()
    shares = 100 * seconds @ uses / whole if whole else np.zeros(len(_CATEGORIES))
    named = [(share, words) for share, (_, _, words) in zip(shares, _CATEGORIES.values(), strict=True)]
    parts = [f"{share:.0f} % {words}" for share, words in sorted(named, reverse=True) if share >= 0.5]
    return ", ".join(parts) or "no KV is held"


def _mark_pool(ax: Axes, trace: Trace, peak: float) -> float:
    """Mark the pool's size; return the axis's upper end, below the pool where it would flatten the rest."""
    pool = trace.cache.num_tokens
    is_cut = pool > 3 * peak
    top = max(1.0, peak) * 1.3 if is_cut else pool * 1.08
    if not is_cut:
        ax.axhline(pool, color=style.INK, linestyle="--", linewidth=1.2, gid="pool")
    style.end_label(ax, top if is_cut else pool, f"pool\n{pool:,}{' ↑' if is_cut else ''}")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel("KV (tokens)")
    return top
