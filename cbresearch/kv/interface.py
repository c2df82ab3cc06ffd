"""What the scheduler asks of a KV manager, whatever its layout."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cbresearch.config import CacheConfig
from cbresearch.request import Request, RequestState
from cbresearch.step import NO_EVENTS, BlockEvents, Transfer

NULL_BLOCK = -1
"""Stands in a block table for a block that fell out of the sliding window; it is never read."""


class KVManager(Protocol):
    """The KV pool's bookkeeping: which request holds which blocks (vLLM: `KVCacheManager`).

    Every block is held, cached without a reference, free, or unusable; these add up to the pool. What has a
    body here is right for a layout that neither caches, shares nor swaps.

    Attributes:
        config: The pool's sizes and what it can do.
        num_blocks: Blocks in the pool.
        num_shared_blocks: References to blocks beyond the first of each.
        num_unusable_blocks: Blocks that are neither held nor to be had.
    """

    config: CacheConfig
    num_blocks: int
    num_shared_blocks: int
    num_unusable_blocks: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones without a reference."""

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold, a shared one counted once."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that hold a cached prefix and have no reference."""

    @property
    def num_held_host_blocks(self) -> int:
        """Blocks of the host's pool that swapped requests hold, a shared one counted once."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.config.block_size)

    def max_blocks_needed(self, request: Request) -> int:
        """Return how many blocks a request takes of an empty pool at its largest, as it is submitted."""

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table; empty if it holds nothing on the device."""

    def host_table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table in the host's pool; empty if it is not swapped out."""
        return ()

    def num_private_blocks(self, request_id: str) -> int:
        """Return how many blocks would be free if a request gave back its own."""

    def missing_blocks(self, state: RequestState, num_tokens: int, leaving: Iterable[str]) -> Iterator[int]:
        """Yield how many blocks a request lacks for `num_tokens` tokens, now and as others leave in turn.

        Args:
            state: The request, running or without a seat.
            num_tokens: Tokens for which there has to be room.
            leaving: Ids of running requests; what several of them share is free when the last has left.
        """

    def num_cached_tokens(self, state: RequestState) -> int:
        """Return the tokens of a waiting request whose KV is in the prefix cache."""
        return 0

    def admit(self, state: RequestState, sibling: RequestState | None) -> bool:
        """Begin the table of a request that holds nothing, if there is room for all its known tokens.

        Args:
            state: The request; its counts of computed tokens are set to what the pool has of its prefix.
            sibling: A parallel sample that has its prompt computed and still holds it, or None.
        """

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Grow a request's table until it can hold `num_tokens` tokens.

        Returns:
            The ids of the blocks added, in table order (empty if it held enough already), or None if
            too few blocks are free; then nothing has changed.
        """

    def capacities(self, request_ids: Sequence[str]) -> list[int]:
        """Return how many tokens requests' tables can hold."""

    def append_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Grow requests' tables by one block each, in order, and return the blocks; as many must be free."""

    def update(self, state: RequestState, start: int) -> None:
        """Take note that a request's tokens from position `start` on are computed."""

    def cache_scheduled(self, state: RequestState, end: int) -> None:
        """Let other requests share a request's full blocks up to a token that is only scheduled yet."""

    def uncache(
        self, state: RequestState, num_computed: int, others: Iterable[RequestState]
    ) -> list[RequestState]:
        """Take a request's blocks behind its first `num_computed` tokens out of the prefix cache.

        Returns:
            Those of the other requests that share one of them, and so share nothing.
        """
        return []

    def swap_out(self, state: RequestState) -> bool:
        """Move a request's KV to the host, if it has any and the host has room."""
        return False

    def swap_in(self, state: RequestState) -> bool:
        """Bring a request's KV back to the device, if there is room for it and its next tokens."""
        return False

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the copies that became necessary since the last call, in their order."""
        return ()

    def take_events(self) -> BlockEvents:
        """Return what became of blocks since the last call."""

    def check(self) -> None:
        """Prove the pool's invariants.

        Raises:
            AssertionError: One does not hold.
        """


class EventLog:
    """Block events as they come about; see `step.BlockEvents` for the lists, which are in its order."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.evicted: list[int] = []
        self.freed: list[int] = []
        self.released: list[tuple[str, int]] = []
        self.host_held: list[tuple[str, int]] = []
        self.host_freed: list[int] = []

    def take(self) -> BlockEvents:
        """Return the events since the last call."""
        lists = vars(self).values()
        if not any(lists):
            return NO_EVENTS
        events = BlockEvents(*map(tuple, lists))
        for happened in lists:
            happened.clear()
        return events
