"""Who holds which physical block of the KV pool, step by step: the ground of the block map."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cbresearch.request import Request
from cbresearch.trace import Trace, column


class Holding(NamedTuple):
    """The KV pool while one step runs.

    Attributes:
        holders: Who refers to a block, by its physical id; whoever came first stands first.
        cached: Blocks that hold a cached prefix which nobody refers to.
    """

    holders: Mapping[int, tuple[str, ...]]
    cached: frozenset[int]


class _Prefixes:
    """Which blocks can be found by their content, as the prefix cache knows them."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...], str | None], int] = {}
        self._block_of: dict[int, int] = {}
        self._content_of: dict[int, int] = {}
        self._chains: dict[str, list[int]] = {}

    def enter(
        self, request: Request, outputs: tuple[int, ...], table: list[int | None], num_computed: int
    ) -> None:
        chain = self._chains.setdefault(request.id, [])
        if not isinstance(request.prompt, tuple) or len(chain) >= num_computed // self._size:
            return
        tokens = request.prompt + outputs
        for place in range(len(chain), num_computed // self._size):
            begin = place * self._size
            content = (chain[-1] if chain else -1, tokens[begin : begin + self._size], request.cache_salt)
            number = self._numbers.setdefault(content, len(self._numbers))
            chain.append(number)
            block = table[place]
            if block is not None and number not in self._block_of:
                self._block_of[number], self._content_of[block] = block, number

    def holds(self, block: int) -> bool:
        return block in self._content_of

    def forget(self, block: int) -> None:
        if block in self._content_of:
            del self._block_of[self._content_of.pop(block)]

    def drop(self, request_id: str) -> None:
        self._chains.pop(request_id, None)


def holdings(trace: Trace) -> Iterator[Holding]:
    """Yield who holds which block, a holding a step, finished rows of a static batch included.

    Args:
        trace: The run.
    """
    size, window = trace.cache.block_size, trace.cache.sliding_window
    # A row that may be computed for nothing repeats its last position, and must see what that one saw.
    num_repeated = int(any(column(trace.steps, "num_padding")))
    outputs = trace.outputs
    failed = {record.id for record in trace.served if record.finish_reason == "error"}
    requests: dict[str, Request] = {}
    tables: dict[str, list[int | None]] = {}
    holders: dict[int, tuple[str, ...]] = {}
    cached: set[int] = set()
    finished: list[str] = []
    prefixes = _Prefixes(size)

    def let_go(request_id: str, block: int | None) -> None:
        if block is None:
            return
        left = tuple(name for name in holders[block] if name != request_id)
        if left:
            holders[block] = left
            return
        del holders[block]
        if prefixes.holds(block):
            cached.add(block)

    def release(request_id: str) -> None:
        for block in tables.pop(request_id, ()):
            let_go(request_id, block)
        prefixes.drop(request_id)

    for record in trace.steps:
        plan = record.plan
        rows = {row.request_id for row in plan.padding}
        for request_id in finished:
            if request_id not in rows:
                release(request_id)
        finished = [request_id for request_id in finished if request_id in rows]
        for request_id in (*plan.aborted, *plan.preempted):
            release(request_id)
        requests |= {entry.request.id: entry.request for entry in plan.admitted}
        filled = {transfer.target for transfer in plan.transfers if transfer.kind != "swap_out"}
        for scheduled in plan.scheduled:
            table = tables.setdefault(scheduled.request_id, [])
            for block in scheduled.new_block_ids:
                # The prompt's beginning that was there already is shared as it is; all else is written anew.
                is_found = len(table) < scheduled.start // size and block not in filled
                if block < 0:
                    table.append(None)
                    continue
                if not is_found and block not in holders:
                    prefixes.forget(block)
                table.append(block)
                cached.discard(block)
                holders[block] = (*holders.get(block, ()), scheduled.request_id)
        for scheduled in plan.scheduled:
            request_id, table = scheduled.request_id, tables[scheduled.request_id]
            # The scheduler enters what is full when a block fills up, and not before.
            fills = scheduled.context_length // size > scheduled.start // size
            if trace.cache.prefix_caching and fills:
                prefixes.enter(requests[request_id], outputs[request_id], table, scheduled.context_length)
            if window is not None:
                for place in range(max(0, scheduled.context_length - num_repeated - window + 1) // size):
                    if table[place] is not None:
                        let_go(request_id, table[place])
                        table[place] = None
        yield Holding(dict(holders), frozenset(cached))
        for request_id in record.finished:
            if request_id in failed:
                for block in tables.get(request_id, ()):
                    if block is not None:
                        prefixes.forget(block)
        finished += record.finished
