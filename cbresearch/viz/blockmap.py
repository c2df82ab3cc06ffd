"""Which physical blocks each request holds in every step, told from the records of a run alone."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice

from cbresearch.trace import StepRecord, Trace, column

NOWHERE = -1
"""Stands in a table for a block that fell out of the sliding window."""


class Holding:
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
        """Return the table in a step, as `BlockManager.table` has it; empty where the holding is not.

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


def holdings(trace: Trace, max_steps: int | None = None) -> list[Holding]:
    """Return every table of a run, in the order in which they begin.

    In a step a request has the blocks that the step's counts in `StepRecord` are of: those with which it
    computes, less what has then fallen out of the sliding window. Requests that the step finishes have
    theirs still.

    Args:
        trace: The run.
        max_steps: Number of steps to read, from the first; by default all.
    """
    failed = {record.id for record in trace.requests if record.finish_reason == "error"}
    replay = _Replay(trace, failed)
    for step, record in enumerate(islice(trace.steps, max_steps)):
        replay.advance(step, record)
    return replay.finish()


class _Replay:
    """The tables of both pools, a step after the other.

    Args:
        trace: The run, for its limits.
        failed: Ids of the requests that ended by an error.
    """

    def __init__(self, trace: Trace, failed: set[str]) -> None:
        self._window, self._size = trace.cache.sliding_window, trace.cache.block_size
        self._failed = failed
        self._device: dict[str, Holding] = {}
        self._host: dict[str, Holding] = {}
        self._computed: dict[str, int] = {}
        # Finished rows that a static batch may go on computing, so that their blocks are held.
        self._kept: dict[str, Holding] = {}
        # Each row kept gives up a block one step later, since its last position is computed again.
        self._keeps_rows = any(column(trace.steps, "num_padding"))
        # The host block that a device block was copied to or from, and the other way round.
        self._twins: dict[int, int] = {}
        self._twins_of_host: dict[int, int] = {}
        self._done: list[Holding] = []

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
            self._device[request_id] = Holding(request_id, False, step, ())
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

    def finish(self) -> list[Holding]:
        open_holdings = (*self._device.values(), *self._kept.values(), *self._host.values())
        return sorted((*self._done, *open_holdings), key=lambda holding: holding.first)

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
                self._host[request_id] = Holding(request_id, True, step, moved)
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
                self._host[request_id] = Holding(request_id, True, step, moved)
            elif surplus > 0 and transfers.brings(holding.blocks):
                # It came, lost its place and has to compute anew.
                surplus -= 1
                self._close(self._host.pop(request_id), step)

    def _empty(self, end: int) -> None:
        """Give back the rows that were kept: nobody of their batch runs any more."""
        for holding in self._kept.values():
            self._close(holding, end)
        self._kept.clear()

    def _close(self, holding: Holding, end: int) -> None:
        holding.end = end
        if holding.end > holding.first:
            self._done.append(holding)


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
