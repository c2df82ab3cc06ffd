"""Who holds which physical block of both KV pools in every step, told from the records of a run alone."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from cbresearch.trace import StepRecord, Trace
from cbresearch.viz.prefixes import CachedBlock, Prefixes

NOWHERE = -1
"""Stands in a table for a block that fell out of the sliding window."""


class BlockTable:
    """A request's block table for as long as it lies in one of the two pools.

    A table grows at its end, and with a sliding window it loses blocks at its beginning.

    Attributes:
        request_id: Whose table.
        on_host: Whether it lies in the host's pool; otherwise in the device's.
        first: Index of the first step.
        end: Index after the last one.
        blocks: Physical block ids in table order; `NOWHERE` for what was out of sight from the start.
        since: For each of them the index of the step from which on the table has it.
        lost: Ascending: the index of the step from which on the first, second and so on is out of sight.
    """

    __slots__ = ("blocks", "end", "first", "lost", "on_host", "request_id", "since")

    def __init__(self, request_id: str, on_host: bool, first: int, blocks: Iterable[int]) -> None:
        self.request_id = request_id
        self.on_host = on_host
        self.first = first
        self.end = first
        self.blocks = list(blocks)
        self.since = [first] * len(self.blocks)
        self.lost = [first] * sum(block == NOWHERE for block in self.blocks)

    @property
    def in_sight(self) -> list[int]:
        """Return the blocks that the table refers to now."""
        return self.blocks[len(self.lost) :]

    def table(self, step: int) -> tuple[int, ...]:
        """Return the table in a step, as `BlockManager.table` has it; empty where there is none.

        Args:
            step: Index of the step.
        """
        if not self.first <= step < self.end:
            return ()
        num_lost = bisect_right(self.lost, step)
        num_blocks = bisect_right(self.since, step)
        return (*(NOWHERE,) * min(num_lost, num_blocks), *self.blocks[num_lost:num_blocks])

    def extend(self, step: int, blocks: Iterable[int]) -> None:
        """Append blocks from a step on."""
        self.blocks += blocks
        self.since += [step] * (len(self.blocks) - len(self.since))

    def lose(self, step: int, num_lost: int) -> None:
        """Lose the first blocks from a step on, as far as they are not lost already."""
        self.lost += [step] * (min(num_lost, len(self.blocks)) - len(self.lost))

    def leaving(self, step: int) -> list[int]:
        """Return the blocks that are lost from a step on, the last in the table first."""
        leaving = self.blocks[bisect_left(self.lost, step) : len(self.lost)]
        return [block for block in reversed(leaving) if block != NOWHERE]

    def before_leaving(self, step: int) -> list[int]:
        """Return the blocks in table order, `NOWHERE` for those that were lost before a step."""
        num_lost = bisect_left(self.lost, step)
        return [NOWHERE] * num_lost + self.blocks[num_lost:]


class PoolState(NamedTuple):
    """The device's pool while one step runs.

    Attributes:
        holders: Who refers to a block, by its physical id; whoever came first stands first.
        cached: Blocks that hold a cached prefix which nobody refers to.
    """

    holders: Mapping[int, tuple[str, ...]]
    cached: frozenset[int]


class BlockMap(NamedTuple):
    """The blocks of a run.

    In a step a request has the blocks that the step's counts in `StepRecord` are of: those with which it
    computes, less what has then fallen out of the sliding window. Requests that the step finishes have
    theirs still, and so have the finished rows of a static batch.

    Attributes:
        num_steps: Steps that were read.
        tables: Every table of both pools, in the order in which they begin.
        cached: Every block that keeps a prefix with nobody to refer to it, in the order in which that begins.
    """

    num_steps: int
    tables: tuple[BlockTable, ...]
    cached: tuple[CachedBlock, ...]

    @classmethod
    def of(cls, trace: Trace, max_steps: int | None = None) -> "BlockMap":
        """Read a run.

        Args:
            trace: The run.
            max_steps: Number of steps to read, from the first; by default all.
        """
        num_steps = len(trace.steps) if max_steps is None else min(len(trace.steps), max_steps)
        # When a policy lets blocks be found is not recorded; the counts tell where it matters.
        replay = _Replay(trace, num_steps, at_once=False)
        if replay.num_off:
            replay = min(replay, _Replay(trace, num_steps, at_once=True), key=lambda replay: replay.num_off)
        return cls(num_steps, tuple(replay.tables()), replay.cached(num_steps))

    def states(self) -> Iterator[PoolState]:
        """Yield the device's pool, a state a step."""
        tables = _by_step((table for table in self.tables if not table.on_host), self.num_steps)
        cached = _by_step(self.cached, self.num_steps)
        for step, (held, kept) in enumerate(zip(tables, cached, strict=True)):
            yield _state(step, held, kept)

    def state(self, step: int) -> PoolState:
        """Return the device's pool in a step.

        Args:
            step: Index of the step.
        """
        held = [table for table in self.tables if not table.on_host and table.first <= step < table.end]
        return _state(step, held, [kept for kept in self.cached if kept.first <= step < kept.end])


_Span = TypeVar("_Span", BlockTable, CachedBlock)


def _by_step(spans: Iterable[_Span], num_steps: int) -> Iterator[list[_Span]]:
    """Yield those of some spans that cover a step, in their order, step by step."""
    coming: dict[int, list[_Span]] = defaultdict(list)
    for span in spans:
        coming[span.first].append(span)
    there: list[_Span] = []
    for step in range(num_steps):
        there = [span for span in there if step < span.end] + coming.pop(step, [])
        yield there


def _state(step: int, tables: Iterable[BlockTable], cached: Iterable[CachedBlock]) -> PoolState:
    holders: dict[int, tuple[str, ...]] = {}
    for table in tables:
        for block in table.table(step):
            if block != NOWHERE:
                holders[block] = (*holders.get(block, ()), table.request_id)
    return PoolState(holders, frozenset(kept.block for kept in cached))


class _Replay:
    """The tables of both pools, a step after the other.

    Args:
        trace: The run, for its limits and how its requests ended.
    """

    def __init__(self, trace: Trace, num_steps: int, at_once: bool) -> None:
        self._window, self._size = trace.cache.sliding_window, trace.cache.block_size
        self._failed = {record.id for record in trace.requests if record.finish_reason == "error"}
        self._prefixes = Prefixes(trace, at_once) if trace.cache.prefix_caching else None
        self._device: dict[str, BlockTable] = {}
        self._host: dict[str, BlockTable] = {}
        self._computed: dict[str, int] = {}
        # Finished rows that a static batch may go on computing, so that their blocks are held.
        self._kept: dict[str, BlockTable] = {}
        # Each row kept gives up a block one step later, since its last position is computed again.
        self._keeps_rows = bool(trace.step_columns["num_padding_rows"].any())
        # The host block that a device block was copied to or from, and the other way round.
        self._twins: dict[int, int] = {}
        self._twins_of_host: dict[int, int] = {}
        self._done: list[BlockTable] = []
        # What the prefix cache has still to hear of.
        self._left: list[BlockTable] = []
        for step, record in enumerate(islice(trace.steps, num_steps)):
            self._advance(step, record)

    def _advance(self, step: int, record: StepRecord) -> None:
        plan = record.plan
        self._swap(step, record)
        # Whoever was preempted between two steps may have been aborted thereafter.
        for request_id in plan.aborted:
            if request_id in self._device:
                self._kept[request_id] = self._device.pop(request_id)
            elif request_id in self._host:
                self._close(self._host.pop(request_id), step)
        if not self._device:
            self._empty(step)
        for admission in plan.admitted:
            request_id = admission.request.id
            if request_id in self._host:
                self._close(self._host.pop(request_id), step)
            self._device[request_id] = BlockTable(request_id, False, step, ())
        for entry in plan.scheduled:
            table = self._device[entry.request_id]
            table.extend(step, entry.new_block_ids)
            if table.first == step:
                table.lost = [step] * sum(block == NOWHERE for block in table.blocks)
            self._computed[entry.request_id] = entry.context_length
            num_found = -(-entry.start // self._size) if table.first == step else 0
            for block in entry.new_block_ids[num_found:]:
                self._part(block)
        referring = (*self._device.values(), *self._kept.values())
        surplus = sum(len(table.in_sight) for table in referring)
        surplus -= record.num_held_blocks + record.num_shared_blocks
        surplus -= self._forget(step, record, surplus)
        while surplus > 0 and self._kept:
            # The row that was finished last gives way first.
            _, table = self._kept.popitem()
            surplus -= len(table.in_sight)
            self._close(table, step)
        if self._prefixes is not None:
            self._prefixes.advance(step, record, self._left, self._device)
        self._left = []
        for request_id in record.finished:
            table = self._device.pop(request_id)
            if request_id in self._failed:
                self._close(table, step + 1)
            else:
                self._kept[request_id] = table
        if not self._device:
            self._empty(step + 1)
        for table in self._open():
            table.end = step + 1

    def _open(self) -> tuple[BlockTable, ...]:
        return (*self._device.values(), *self._kept.values(), *self._host.values())

    @property
    def num_off(self) -> int:
        """Return in how many steps there are more or fewer cached blocks than were recorded."""
        return 0 if self._prefixes is None else self._prefixes.num_off

    def tables(self) -> list[BlockTable]:
        return sorted((*self._done, *self._open()), key=lambda table: table.first)

    def cached(self, num_steps: int) -> tuple[CachedBlock, ...]:
        return () if self._prefixes is None else self._prefixes.spans(num_steps)

    def _forget(self, step: int, record: StepRecord, most: int) -> int:
        """Let tables lose what fell out of the window, at most so many blocks; return how many."""
        if self._window is None:
            return 0
        lost: dict[str, int] = {}
        for keeps_rows in (self._keeps_rows, True):
            lost.clear()
            for entry in record.plan.scheduled:
                if entry.request_id not in record.finished or entry.request_id not in self._failed:
                    position = entry.context_length - keeps_rows
                    lost[entry.request_id] = max(0, position - self._window + 1) // self._size
            number = sum(max(0, num - len(self._device[name].lost)) for name, num in lost.items())
            if number <= most:
                break
        # A batch that keeps its rows may be told from this alone, where all of them end together.
        self._keeps_rows = keeps_rows
        for request_id, num_lost in lost.items():
            self._device[request_id].lose(step, num_lost)
        return number

    def _swap(self, step: int, record: StepRecord) -> None:
        """Take the preempted requests from the device, and move the swapped ones' tables to the host."""
        plan = record.plan
        transfers = _Transfers(plan.transfers)
        for request_id in reversed(plan.preempted):
            table = self._device.pop(request_id)
            if request_id in plan.swapped:
                filled = table.table(step - 1)[: -(-self._computed[request_id] // self._size)]
                # What is not copied lies in the host's pool already.
                moved = [NOWHERE if block == NOWHERE else self._copy_of(block, transfers) for block in filled]
                self._host[request_id] = BlockTable(request_id, True, step, moved)
            self._close(table, step)
        self._move_again(step, record, transfers)
        for kind, source, target in plan.transfers:
            device_block, host_block = (source, target) if kind == "swap_out" else (target, source)
            self._part(device_block)
            if kind != "copy":
                self._part(self._twins_of_host.get(host_block, NOWHERE))
                self._twins[device_block], self._twins_of_host[host_block] = host_block, device_block

    def _part(self, device_block: int) -> None:
        """Forget a device block's twin: it holds something else now."""
        self._twins_of_host.pop(self._twins.pop(device_block, NOWHERE), None)

    def _copy_of(self, block: int, transfers: "_Transfers") -> int:
        left = transfers.left(block)
        return self._twins[block] if left is None else left

    def _move_again(self, step: int, record: StepRecord, transfers: "_Transfers") -> None:
        """Follow the requests that came from the host and had to go back within the same step."""
        admitted = {admission.request.id for admission in record.plan.admitted}
        surplus = len(self._host.keys() - admitted) - record.num_swapped
        for request_id, table in list(self._host.items()):
            if request_id in admitted or not transfers:
                continue
            # Who was swapped out between the steps may have come and gone once more.
            left_now = table.first == step
            moved = [transfers.follow(block, left_now, self._twins_of_host) for block in table.blocks]
            if moved != table.blocks:
                self._close(self._host.pop(request_id), step)
                self._host[request_id] = BlockTable(request_id, True, step, moved)
            elif surplus > 0 and transfers.brings(table.blocks):
                # It came, lost its place and has to compute anew.
                surplus -= 1
                self._close(self._host.pop(request_id), step)

    def _empty(self, end: int) -> None:
        """Give back the rows that were kept: nobody of their batch runs any more."""
        for table in self._kept.values():
            self._close(table, end)
        self._kept.clear()

    def _close(self, table: BlockTable, end: int) -> None:
        table.end = end
        if table.end > table.first:
            self._done.append(table)
        if not table.on_host:
            self._left.append(table)


class _Transfers:
    """The copies of a step, in their order.

    Args:
        transfers: The plan's.
    """

    def __init__(self, transfers: Iterable[tuple[str, int, int]]) -> None:
        self._out: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._in: dict[int, tuple[int, int]] = {}
        self._to_host: dict[int, tuple[int, int]] = {}
        self._written: dict[int, list[int]] = defaultdict(list)
        for place, (kind, source, target) in enumerate(transfers):
            if kind == "swap_out":
                self._out[source].append((place, target))
                self._to_host.setdefault(target, (place, source))
                continue
            self._written[target].append(place)
            if kind == "swap_in":
                self._in[source] = place, target

    def __bool__(self) -> bool:
        return bool(self._out)

    def left(self, block: int) -> int | None:
        """Return where the content that a device block had before the step went, or None."""
        return self._next(block, -1)

    def brings(self, blocks: Iterable[int]) -> bool:
        """Return whether one of some host blocks comes to the device."""
        return not self._in.keys().isdisjoint(blocks)

    def follow(self, block: int, left_now: bool, twins: Mapping[int, int]) -> int:
        """Return the host block in which the content of a host block is in the end.

        Args:
            block: Where it was, before the step or since it left the device in this step.
            left_now: Whether it left in this step.
            twins: The device block that holds the same before the step, by host block.
        """
        origin = self._in.get(block) or (self._to_host.get(block) if left_now else None)
        place, device_block = origin or (-1, twins.get(block))
        later = None if device_block is None else self._next(device_block, place)
        return block if later is None else later

    def _next(self, device_block: int, after: int) -> int | None:
        for place, target in self._out.get(device_block, ()):
            if place > after:
                overwritten = any(after < when < place for when in self._written.get(device_block, ()))
                return None if overwritten else target
        return None
