"""Which blocks hold a cached prefix that nobody refers to, told from the records of a run alone."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cbresearch.step import Scheduled
from cbresearch.request import Request
from cbresearch.trace import StepRecord, Trace

if TYPE_CHECKING:
    from cbresearch.viz.blockmap import BlockTable


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


class Prefixes:
    """Which blocks can be found by their content, and which of them nobody refers to, step by step.

    What a policy admits and displaces again within one step is recorded nowhere, nor what that evicts; then
    other blocks may be told for some steps than were cached.

    Args:
        trace: The run, for its outputs.
        at_once: Whether a block can be found from the moment on in which its computation is planned.

    Attributes:
        num_off: Steps after which more or fewer blocks are cached than were recorded.
    """

    def __init__(self, trace: Trace, at_once: bool) -> None:
        self._size, self._at_once = trace.cache.block_size, at_once
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
        self.num_off = 0

    def advance(
        self, step: int, record: StepRecord, left: Iterable["BlockTable"], tables: Mapping[str, "BlockTable"]
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
            for block in reversed(table.in_sight):
                self._release(block)
        plan = record.plan
        self._requests |= {entry.request.id: entry.request for entry in plan.admitted}
        filled = {target for kind, _, target in plan.transfers if kind != "swap_out"}
        for block in filled.difference(*(entry.new_block_ids for entry in plan.scheduled)):
            self._forget(block)
        for entry in plan.scheduled:
            table = tables[entry.request_id]
            self._extend(entry, len(table.blocks) - len(entry.new_block_ids), filled)
            if self._at_once:
                self._enter(entry, table, step)
        for entry in plan.scheduled:
            table = tables[entry.request_id]
            if entry.request_id in record.finished and entry.request_id in self._failed:
                # Nobody else may read what a failed request wrote.
                for block in table.in_sight:
                    self._forget(block)
                continue
            # The scheduler enters what is full when a block fills up, and not before.
            if entry.context_length // self._size > entry.start // self._size:
                self._enter(entry, table, step)
            for block in table.leaving(step):
                self._release(block)
        # What a request took and lost again within the step is told nowhere; the oldest went for it.
        for block in list(self._unreferenced)[: max(0, len(self._unreferenced) - record.num_cached_blocks)]:
            self._forget(block)
        self.num_off += len(self._unreferenced) != record.num_cached_blocks
        for block in [block for block in self._since if block not in self._unreferenced]:
            self._spans.append(CachedBlock(block, self._since.pop(block), step))
        for block in self._unreferenced:
            self._since.setdefault(block, step)

    def spans(self, num_steps: int) -> tuple[CachedBlock, ...]:
        """Return every block that kept a prefix for nobody, in the order in which that begins.

        Args:
            num_steps: Number of steps taken in.
        """
        there = [CachedBlock(block, first, num_steps) for block, first in self._since.items()]
        return tuple(sorted((*self._spans, *there), key=lambda kept: (kept.first, kept.block)))

    def _extend(self, entry: Scheduled, num_before: int, filled: Container[int]) -> None:
        """Let a request refer to more blocks, which are written anew unless they hold its beginning."""
        # Only a newcomer finds anything, and nothing beyond what it need not compute.
        num_found = 0 if num_before else entry.start // self._size
        contents = self._contents(entry.request_id, num_found)
        for place, block in enumerate(entry.new_block_ids, start=num_before):
            if block < 0:
                continue
            is_alike = self._content_of.get(block) in contents[place : place + 1]
            is_there = place < num_found and (is_alike or self._references[block])
            if block in filled or not is_there:
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

    def _enter(self, entry: Scheduled, table: "BlockTable", step: int) -> None:
        """Let others find a request's full blocks."""
        num_full = entry.context_length // self._size
        num_entered = self._num_entered.get(entry.request_id, 0)
        if num_entered >= num_full:
            return
        blocks = table.before_leaving(step)
        contents = self._contents(entry.request_id, num_full)[:num_full]
        for place in range(num_entered, len(contents)):
            content, block = contents[place], blocks[place]
            if block >= 0 and content not in self._block_of:
                self._block_of[content], self._content_of[block] = block, content
        self._num_entered[entry.request_id] = len(contents)

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if not self._references[block] and block in self._content_of:
            self._unreferenced[block] = None

    def _forget(self, block: int) -> None:
        """Let a block not be found any more: something else is written to it."""
        self._unreferenced.pop(block, None)
        if block in self._content_of:
            del self._block_of[self._content_of.pop(block)]
