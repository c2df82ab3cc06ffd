"""Who holds which physical block of both KV pools in every step, told from the records of a run alone."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from cbresearch.request import Request
from cbresearch.trace import StepRecord, Trace, column

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
    def num_references(self) -> int:
        """Return how many blocks the table refers to now."""
        return len(self.blocks) - len(self.lost)

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


class CachedBlock(NamedTuple):
    """A block for as long as it holds a cached prefix that nobody refers to.

    Attributes:
        block: Physical id, in the device's pool.
        first: Index of the first step.
        end: Index after the last one.
    """

    block: int
    first: int
    end: int


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
        replay, num_steps = _Replay(trace), 0
        for step, record in enumerate(islice(trace.steps, max_steps)):
            replay.advance(step, record)
            num_steps = step + 1
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

    def __init__(self, trace: Trace) -> None:
        self._window, self._size = trace.cache.sliding_window, trace.cache.block_size
        self._failed = {record.id for record in trace.requests if record.finish_reason == "error"}
        self._prefixes = _Prefixes(trace) if trace.cache.prefix_caching else None
        self._device: dict[str, BlockTable] = {}
        self._host: dict[str, BlockTable] = {}
        self._computed: dict[str, int] = {}
        # Finished rows that a static batch may go on computing, so that their blocks are held.
        self._kept: dict[str, BlockTable] = {}
        # Each row kept gives up a block one step later, since its last position is computed again.
        self._keeps_rows = any(column(trace.steps, "num_padding"))
        # The host block that a device block was copied to or from, and the other way round.
        self._twins: dict[int, int] = {}
        self._twins_of_host: dict[int, int] = {}
        self._done: list[BlockTable] = []
        # What the prefix cache has still to hear of.
        self._left: list[BlockTable] = []

    def advance(self, step: int, record: StepRecord) -> None:
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
            holding = self._device[entry.request_id]
            holding.extend(step, entry.new_block_ids)
            if holding.first == step:
                holding.lost = [step] * sum(block == NOWHERE for block in holding.blocks)
            self._computed[entry.request_id] = entry.context_length
            num_found = -(-entry.start // self._size) if holding.first == step else 0
            for block in entry.new_block_ids[num_found:]:
                self._part(block)
        tables = (*self._device.values(), *self._kept.values())
        surplus = sum(holding.num_references for holding in tables)
        surplus -= record.num_held_blocks + record.num_shared_blocks
        surplus -= self._forget(step, record, surplus)
        while surplus > 0 and self._kept:
            # The row that was finished last gives way first.
            _, holding = self._kept.popitem()
            surplus -= holding.num_references
            self._close(holding, step)
        if self._prefixes is not None:
            self._prefixes.advance(step, record, self._left, self._device)
        self._left = []
        for request_id in record.finished:
            holding = self._device.pop(request_id)
            if request_id in self._failed:
                self._close(holding, step + 1)
            else:
                self._kept[request_id] = holding
        if not self._device:
            self._empty(step + 1)
        for holding in (*self._device.values(), *self._kept.values(), *self._host.values()):
            holding.end = step + 1

    def tables(self) -> list[BlockTable]:
        there = (*self._device.values(), *self._kept.values(), *self._host.values())
        return sorted((*self._done, *there), key=lambda table: table.first)

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
            holding = self._device.pop(request_id)
            if request_id in plan.swapped:
                table = holding.table(step - 1)[: -(-self._computed[request_id] // self._size)]
                # What is not copied lies in the host's pool already.
                moved = [NOWHERE if block == NOWHERE else self._copy_of(block, transfers) for block in table]
                self._host[request_id] = BlockTable(request_id, True, step, moved)
            self._close(holding, step)
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
        for request_id, holding in list(self._host.items()):
            if request_id in admitted or not transfers:
                continue
            # Who was swapped out between the steps may have come and gone once more.
            left_now = holding.first == step
            moved = [transfers.follow(block, left_now, self._twins_of_host) for block in holding.blocks]
            if moved != holding.blocks:
                self._close(self._host.pop(request_id), step)
                self._host[request_id] = BlockTable(request_id, True, step, moved)
            elif surplus > 0 and transfers.brings(holding.blocks):
                # It came, lost its place and has to compute anew.
                surplus -= 1
                self._close(self._host.pop(request_id), step)

    def _empty(self, end: int) -> None:
        """Give back the rows that were kept: nobody of their batch runs any more."""
        for holding in self._kept.values():
            self._close(holding, end)
        self._kept.clear()

    def _close(self, holding: BlockTable, end: int) -> None:
        holding.end = end
        if holding.end > holding.first:
            self._done.append(holding)
        if not holding.on_host:
            self._left.append(holding)


class _Prefixes:
    """Which blocks can be found by their content, and which of them nobody refers to, step by step.

    Args:
        trace: The run, for its outputs.
    """

    def __init__(self, trace: Trace) -> None:
        self._size = trace.cache.block_size
        self._outputs = trace.outputs
        self._failed = {record.id for record in trace.requests if record.finish_reason == "error"}
        self._requests: dict[str, Request] = {}
        self._numbers: dict[tuple[int, tuple[int, ...], str | None], int] = {}
        self._block_of: dict[int, int] = {}
        self._content_of: dict[int, int] = {}
        self._contents_of: dict[str, list[int]] = {}
        self._num_entered: dict[str, int] = {}
        self._references: Counter[int] = Counter()
        # In the order in which they came to be so: the first one goes first.
        self._unreferenced: dict[int, None] = {}
        self._since: dict[int, int] = {}
        self._spans: list[CachedBlock] = []

    def advance(
        self, step: int, record: StepRecord, left: Iterable[BlockTable], tables: Mapping[str, BlockTable]
    ) -> None:
        """Take in a step.

        Args:
            step: Its index.
            record: Its record.
            left: Tables that were given back before it.
            tables: Those with which it computes, less what is then out of sight.
        """
        for table in left:
            self._num_entered.pop(table.request_id, None)
            for block in reversed(table.blocks[len(table.lost) :]):
                self._release(block)
        plan = record.plan
        self._requests |= {entry.request.id: entry.request for entry in plan.admitted}
        for kind, _, target in plan.transfers:
            if kind != "swap_out":
                self._forget(target)
        for entry in plan.scheduled:
            self._extend(entry.request_id, entry.new_block_ids, tables[entry.request_id], entry.start)
        for entry in plan.scheduled:
            table, num_full = tables[entry.request_id], entry.context_length // self._size
            if entry.request_id in record.finished and entry.request_id in self._failed:
                # Nobody else may read what a failed request wrote.
                for block in table.blocks[len(table.lost) :]:
                    self._forget(block)
                continue
            # The scheduler enters what is full when a block fills up, and not before.
            if num_full > entry.start // self._size:
                num_lost = bisect_right(table.lost, step - 1)
                self._enter(entry.request_id, num_full, [NOWHERE] * num_lost + table.blocks[num_lost:])
            for place in range(len(table.lost) - 1, -1, -1):
                if table.lost[place] < step:
                    break
                if table.blocks[place] != NOWHERE:
                    self._release(table.blocks[place])
        # What a request took that had to go within the step is told nowhere; the oldest went for it.
        for block in list(self._unreferenced)[: max(0, len(self._unreferenced) - record.num_cached_blocks)]:
            self._forget(block)
        for block in [block for block in self._since if block not in self._unreferenced]:
            self._spans.append(CachedBlock(block, self._since.pop(block), step))
        for block in self._unreferenced:
            self._since.setdefault(block, step)

    def spans(self, num_steps: int) -> tuple[CachedBlock, ...]:
        there = [CachedBlock(block, first, num_steps) for block, first in self._since.items()]
        return tuple(sorted((*self._spans, *there), key=lambda kept: (kept.first, kept.block)))

    def _extend(self, request_id: str, blocks: tuple[int, ...], table: BlockTable, start: int) -> None:
        """Let a request refer to more blocks, which are written anew unless they hold its beginning."""
        num_before = len(table.blocks) - len(blocks)
        # Only a newcomer finds anything, and nothing beyond what it need not compute.
        num_found = 0 if num_before else start // self._size
        contents = self._contents(request_id, num_found)
        for place, block in enumerate(blocks, start=num_before):
            if block == NOWHERE:
                continue
            found = place < num_found and (
                self._references[block] or self._content_of.get(block) in contents[place : place + 1]
            )
            if not found:
                self._forget(block)
            self._unreferenced.pop(block, None)
            self._references[block] += 1

    def _contents(self, request_id: str, num_blocks: int) -> list[int]:
        """Return numbers of what a request's first blocks hold, each told apart by all before it too."""
        request, contents = self._requests[request_id], self._contents_of.setdefault(request_id, [])
        # Of a prompt that is a mere length nothing is ever found again.
        if len(contents) < num_blocks and isinstance(request.prompt, tuple):
            tokens = request.prompt + self._outputs[request_id]
            for end in range((len(contents) + 1) * self._size, num_blocks * self._size + 1, self._size):
                before = contents[-1] if contents else -1
                content = before, tokens[end - self._size : end], request.cache_salt
                contents.append(self._numbers.setdefault(content, len(self._numbers)))
        return contents

    def _enter(self, request_id: str, num_full: int, blocks: list[int]) -> None:
        contents = self._contents(request_id, num_full)[:num_full]
        for place in range(self._num_entered.get(request_id, 0), len(contents)):
            content, block = contents[place], blocks[place]
            if block != NOWHERE and content not in self._block_of:
                self._block_of[content], self._content_of[block] = block, content
        self._num_entered[request_id] = len(contents)

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block] and block in self._content_of:
            self._unreferenced[block] = None

    def _forget(self, block: int) -> None:
        """Let a block not be found any more: something else is written to it."""
        self._unreferenced.pop(block, None)
        if block in self._content_of:
            del self._block_of[self._content_of.pop(block)]


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
