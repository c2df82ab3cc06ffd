"""The host's pool, to which preempted requests are swapped out."""

from collections import Counter
from collections.abc import Iterable, Sequence

from cbresearch.kv.interface import NULL_BLOCK, EventLog


class HostPool:
    """Tables of the swapped requests, reference counts, and which host blocks mirror which device blocks.

    Args:
        num_blocks: Blocks in the host's pool.
        events: Where references to host blocks that come and go are logged.
    """

    def __init__(self, num_blocks: int, events: EventLog) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.tables: dict[str, list[int]] = {}
        # Full blocks that are on both tiers, each by the other.
        self.device_block: dict[int, int] = {}
        self.host_block: dict[int, int] = {}
        self._ref_counts = [0] * num_blocks
        self._events = events

    def is_shared(self, host_block: int) -> bool:
        """Return whether several swapped requests refer to a block."""
        return self._ref_counts[host_block] > 1

    def mirror(self, device_block: int, host_block: int) -> None:
        """Note that two blocks hold the same and will not be written."""
        self.device_block[host_block], self.host_block[device_block] = device_block, host_block

    def unmirror(self, device_block: int) -> None:
        """Drop the pair that a device block is in, if any: the content of one of them is about to go."""
        self.device_block.pop(self.host_block.pop(device_block, NULL_BLOCK), None)

    def hold(self, request_id: str, table: Sequence[int]) -> None:
        """Give a request its table."""
        self.tables[request_id] = list(table)
        for block in table:
            if block != NULL_BLOCK:
                self._ref_counts[block] += 1
                self._events.host_held.append((request_id, block))

    def drop(self, request_id: str) -> None:
        """Give back a request's blocks."""
        for block in self.tables.pop(request_id):
            if block == NULL_BLOCK:
                continue
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self.unmirror(self.device_block.get(block, NULL_BLOCK))
                self.free.append(block)
                self._events.host_freed.append(block)

    def check(self) -> None:
        """Prove the pool's invariants; raises AssertionError where one does not hold."""
        held = check_references("host", self.tables.values(), self._ref_counts, self.free)
        mirrored = {host: device for device, host in self.host_block.items()}
        assert mirrored == self.device_block, "mirrored blocks disagree"
        assert self.device_block.keys() <= held, "a free host block is mirrored"


def check_references(
    pool: str, tables: Iterable[list[int]], ref_counts: Sequence[int], free: Sequence[int]
) -> set[int]:
    """Prove that each block of a pool is held or free, once; return those that tables refer to.

    Raises:
        AssertionError: A block is miscounted, free twice, held and free at once, or lost.
    """
    found = Counter([block for table in tables for block in table if block != NULL_BLOCK])
    counted = {block: count for block, count in enumerate(ref_counts) if count}
    assert found == counted, f"the {pool}'s reference counts differ from its tables"
    assert len(set(free)) == len(free), f"a block of the {pool} is free, or free and cached, twice"
    assert not found.keys() & set(free), f"a block of the {pool} is held and free at once"
    assert len(found) + len(free) == len(ref_counts), f"a block of the {pool} is lost"
    return set(found)
