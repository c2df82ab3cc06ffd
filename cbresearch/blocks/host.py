"""The host's pool, to which preempted requests are swapped out."""

from collections.abc import Iterable

NULL_BLOCK = -1
"""Stands in a block table for a block that fell out of the sliding window; it is never read."""


class HostTier:
    """Tables of the swapped requests, reference counts, and which blocks have a twin on the device.

    Args:
        num_blocks: Blocks in the host's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.ref_counts = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.twin: dict[int, int] = {}
        self.twin_of: dict[int, int] = {}

    def take(self) -> int:
        """Return a free block, which is not free any more."""
        return self.free.pop()

    def pair(self, device_block: int, host_block: int) -> None:
        """Note that two blocks hold the same and will not be written."""
        self.twin[host_block], self.twin_of[device_block] = device_block, host_block

    def part(self, device_block: int) -> None:
        """Forget a device block's twin: its content is about to go."""
        host_block = self.twin_of.pop(device_block, None)
        if host_block is not None:
            del self.twin[host_block]

    def drop(self, request_id: str) -> None:
        """Give back a request's blocks."""
        for block in self.tables.pop(request_id):
            if block == NULL_BLOCK:
                continue
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                twin = self.twin.pop(block, None)
                if twin is not None:
                    del self.twin_of[twin]
                self.free.append(block)

    def check(self) -> None:
        """Prove the pool's invariants; raises AssertionError where one does not hold."""
        references = num_references(self.tables.values(), len(self.ref_counts))
        assert references == self.ref_counts, "the host's reference counts differ from its tables"
        held = {block for block, count in enumerate(references) if count}
        assert len(set(self.free)) == len(self.free), "a host block is in the free list twice"
        assert not held & set(self.free), "a host block is held and free at once"
        assert len(held) + len(self.free) == len(references), "a host block is lost"
        assert {host: device for device, host in self.twin_of.items()} == self.twin, "twins disagree"
        assert self.twin.keys() <= held, "a free host block has a twin"


def num_references(tables: Iterable[list[int]], num_blocks: int) -> list[int]:
    """Return how many of the tables refer to each block."""
    counts = [0] * num_blocks
    for table in tables:
        for block in table:
            if block != NULL_BLOCK:
                counts[block] += 1
    return counts
