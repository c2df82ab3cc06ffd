"""Bookkeeping of the paged KV pool (vLLM, SOSP'23, section 4): who holds which block."""

from cbresearch.config import CacheConfig


class BlockManager:
    """Hand out fixed-size blocks of the KV pool and take them back.

    A request's block table maps its logical blocks, in order, to physical block ids. Blocks are
    taken only as tokens need them, so a request wastes less than one block.

    Args:
        config: The pool's size.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._block_size = config.block_size
        # A stack: the block freed last is the one most likely still in a CPU's cache.
        self._free = list(range(config.num_blocks - 1, -1, -1))
        self._ref_counts = [0] * config.num_blocks
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool."""
        return self.config.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks nobody holds."""
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        """Return how many blocks are held, each counted once."""
        return self.config.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table; empty if it holds nothing."""
        return tuple(self._tables.get(request_id, ()))

    def can_allocate(self, request_id: str, num_tokens: int) -> bool:
        """Return whether `allocate` would succeed now."""
        held = len(self._tables.get(request_id, ()))
        return self.blocks_for(num_tokens) - held <= len(self._free)

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Grow a request's table until it can hold `num_tokens` tokens.

        Returns:
            The ids of the blocks added, in table order (empty if it held enough already), or None if
            too few blocks are free; then nothing has changed.
        """
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self._block_size) - (len(table) if table is not None else 0)
        if missing <= 0:
            return ()
        free = self._free
        if missing > len(free):
            return None
        added = free[-missing:][::-1]
        del free[-missing:]
        for block in added:
            self._ref_counts[block] = 1
        if table is None:
            self._tables[request_id] = added
        else:
            table.extend(added)
        return tuple(added)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            raise ValueError(
                f"request {request_id!r} holds no blocks; it was never allocated or already freed"
            )
        for block in reversed(table):
            self._release(block)

    def _release(self, block: int) -> None:
        count = self._ref_counts[block]
        if count < 1:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] = count - 1
        if count == 1:
            self._free.append(block)

    def check(self) -> None:
        """Prove the pool's invariants.

        Raises:
            AssertionError: A block is lost, held and free at once, or miscounted.
        """
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            assert table, f"request {request_id!r} has an empty table"
            assert len(set(table)) == len(table), f"request {request_id!r} holds a block twice: {table}"
            for block in table:
                references[block] += 1
        assert references == self._ref_counts, "reference counts differ from the tables"
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert all(references[block] == 0 for block in self._free), "a block is held and free at once"
        assert len(self._free) + sum(count > 0 for count in references) == self.num_blocks, "a block is lost"
