"""The paged KV manager: what one request takes, shares, swaps and gives back."""

from collections.abc import Iterable, Iterator
from math import inf

from cbresearch.config import CacheConfig
from cbresearch.kv.block_manager import BlockManager, Pair
from cbresearch.kv.interface import NULL_BLOCK
from cbresearch.kv.prefix_cache import ExtraKeys
from cbresearch.request import Request, RequestState
from cbresearch.step import Transfer


class PagedKV(BlockManager):
    """Give requests their blocks and take them back, and note what has to be copied for it.

    Args:
        config: The pools' sizes, and whether prefixes are cached.
        max_chunk: Most tokens of one request that a step computes; it bounds what a sliding window holds.
        recomputes_last: Whether a finished request's last position may be computed over again (a padding
            row), so that what it attends to has to stay.
    """

    def __init__(
        self, config: CacheConfig, max_chunk: int | None = None, recomputes_last: bool = False
    ) -> None:
        super().__init__(config, max_chunk)
        self._num_recomputed = int(recomputes_last)
        self._transfers: list[Transfer] = []

    def num_cached_tokens(self, state: RequestState) -> int:
        """Return the tokens of a waiting request whose KV is in the prefix cache."""
        return len(self.match(state.token_ids, extra_keys_of(state.request))) * self.config.block_size

    def admit(self, state: RequestState, sibling: RequestState | None) -> bool:
        """Begin the table of a request that holds nothing, if there is room for all its known tokens.

        Args:
            state: The request; its counts of computed tokens are set to what the pool has of its prefix.
            sibling: A parallel sample that has its prompt computed and still holds it, or None.
        """
        size, num_transferred = self.config.block_size, state.num_transferred_tokens
        matched = self._matched(state)
        if not (num_transferred or matched or sibling):
            return self.can_allocate(state.id, state.num_tokens)
        num_cached = num_transferred or len(matched) * size
        # Its last prompt token is computed again, since the answer begins with that one's logits.
        forked = state.num_prompt_tokens - 1
        if sibling is not None and forked > num_cached:
            table = self.table(sibling.id)[: self.blocks_for(forked)]
            # What fell out of the sibling's window must be out of this one's as well.
            if NULL_BLOCK not in table[self.num_skipped_blocks(forked) :]:
                matched, num_cached = table, forked
        num_skipped = self.num_skipped_blocks(num_cached)
        matched = (NULL_BLOCK,) * num_skipped + matched[num_skipped:]
        num_copies = int(not num_transferred and num_cached % size > 0)
        if not self.can_allocate(state.id, state.num_tokens, matched, num_copies):
            return False
        # Shared first: what was matched can then not be evicted to make room for the rest.
        self.fork(state.id, matched)
        state.num_computed_tokens, state.num_transferred_tokens = num_cached, 0
        state.num_skipped_tokens = size * num_skipped
        if num_copies:
            # The one block that it shares and writes: the copy stands in its table before anything reads it.
            is_copied = self._note("copy", self.copy_on_write(state.id, num_cached // size))
            assert is_copied
        return True

    def missing_blocks(self, state: RequestState, num_tokens: int, leaving: Iterable[str]) -> Iterator[int]:
        """Yield how many blocks a request lacks for `num_tokens` tokens, now and as others leave one by one."""
        tables, shared = self._tables, ()
        if state.id in tables:
            missing = self.blocks_for(num_tokens) - len(tables[state.id]) - self.num_free_blocks
        elif state.id in self._host.tables:
            missing, mirrored = self._missing_on_device(state.id, num_tokens)
            shared = tuple(mirrored.values())
        else:
            shared = self._matched(state)
            missing = self._num_missing(state.id, num_tokens, shared)
        yield missing
        # What it shares makes it no more room when others let go of it.
        left = dict.fromkeys((*shared, NULL_BLOCK), -inf)
        for request_id in leaving:
            for block in tables[request_id]:
                left[block] = left.get(block, 0) + 1
                missing -= left[block] == self._ref_counts[block]
            yield missing

    def update(self, state: RequestState, start: int) -> None:
        """Cache the blocks that tokens from position `start` on filled; free those out of the window."""
        config, end = self.config, state.num_computed_tokens
        size = config.block_size
        if config.prefix_caching and end // size > start // size:
            self.cache_scheduled(state, end)
        if config.sliding_window is not None:
            skipped = self.remove_skipped_blocks(state.id, end - self._num_recomputed)
            state.num_skipped_tokens = size * skipped

    def cache_scheduled(self, state: RequestState, end: int) -> None:
        """Let other requests share a request's full blocks up to a token, if prefixes are cached."""
        token_ids = state.token_ids
        # Of a prompt that is a mere length nothing can ever be found again.
        if self.config.prefix_caching and token_ids:
            self.cache_full_blocks(state.id, token_ids, end, extra_keys_of(state.request))

    def uncache(
        self, state: RequestState, num_computed: int, others: Iterable[RequestState]
    ) -> list[RequestState]:
        """Take a request's blocks behind its first `num_computed` tokens out of the prefix cache."""
        if not self.config.prefix_caching:
            return []
        taken = set(self._prefixes.leave(state.id, self._tables[state.id], num_computed))
        return [other for other in others if other is not state and taken & {*self.table(other.id)}]

    def swap_out(self, state: RequestState) -> bool:
        """Move a request's KV to the host, if it has any and the host has room."""
        return self._note("swap_out", self.move_to_host(state.id, state.num_computed_tokens))

    def swap_in(self, state: RequestState) -> bool:
        """Bring a request's KV back to the device, if there is room for it and its next tokens."""
        return self._note("swap_in", self.move_to_device(state.id, state.num_tokens))

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the copies that became necessary since the last call, in their order."""
        taken, self._transfers = tuple(self._transfers), []
        return taken

    def _matched(self, state: RequestState) -> tuple[int, ...]:
        """Return the cached blocks with which a waiting request begins, those out of its window left out."""
        if state.num_transferred_tokens:
            return ()
        matched = self.match(state.token_ids, extra_keys_of(state.request))
        num_skipped = self.num_skipped_blocks(len(matched) * self.config.block_size)
        return (NULL_BLOCK,) * num_skipped + matched[num_skipped:]

    def _note(self, kind: str, pairs: Iterable[Pair] | None) -> bool:
        """Note that blocks have to be copied; None, which is no room, is False."""
        self._transfers += [Transfer(kind, *pair) for pair in pairs or ()]
        return pairs is not None


def extra_keys_of(request: Request) -> ExtraKeys:
    """Return what beside its tokens tells a request's prefix apart."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)
