"""The KV side of the scheduler: what requests need, in blocks and in transfers that fill them."""

from collections.abc import Iterable

from cbresearch.blocks import NULL_BLOCK, BlockManager, Extra
from cbresearch.plan import Transfer
from cbresearch.request import Request, RequestState
from cbresearch.reservation import ReservationManager


class Memory:
    """Give requests their blocks and take them back, and note what has to be copied for it.

    Args:
        blocks: The pool's bookkeeping.
        repeats_last: Whether a finished request's last position may be computed over again, so that what it
            attends to has to stay.
    """

    def __init__(self, blocks: BlockManager | ReservationManager, repeats_last: bool) -> None:
        self.blocks = blocks
        self.num_repeated = int(repeats_last)
        self.transfers: list[Transfer] = []
        self.num_referred_tokens = 0
        self._has_more_to_settle = blocks.config.prefix_caching or blocks.config.sliding_window is not None

    def begin(self, state: RequestState, sibling: RequestState | None) -> bool:
        """Begin a newcomer's table with what others hold of its prompt, if there is room for all of it.

        Args:
            state: A request that holds nothing.
            sibling: A parallel sample that has its prompt computed and still holds it, or None.
        """
        blocks, size = self.blocks, self.blocks.config.block_size
        if state.num_carried_tokens:
            if not blocks.can_allocate(state.id, state.num_tokens):
                return False
            state.num_computed_tokens, state.num_carried_tokens = state.num_carried_tokens, 0
            self.num_referred_tokens += num_kept_tokens(state)
            return True
        matched = blocks.match(state.token_ids, extra_of(state.request))
        if not matched and sibling is None:
            return blocks.can_allocate(state.id, state.num_tokens)
        num_cached = len(matched) * size
        # Its last prompt token is computed again, since the answer begins with that one's logits.
        forked = state.num_prompt_tokens - 1
        if sibling is not None and forked > num_cached:
            table = blocks.table(sibling.id)[: blocks.blocks_for(forked)]
            # What the sibling has given back must be out of this one's sight as well.
            if NULL_BLOCK not in table[blocks.num_out_of_sight(forked) :]:
                matched, num_cached = table, forked
        num_lost = blocks.num_out_of_sight(num_cached)
        matched = (NULL_BLOCK,) * num_lost + matched[num_lost:]
        num_copies = int(num_cached % size > 0)
        if not blocks.can_allocate(state.id, state.num_tokens, matched, num_copies):
            return False
        # Shared first: what was matched can then not be evicted to make room for the rest.
        blocks.share(state.id, matched)
        state.num_computed_tokens = num_cached
        state.num_forgotten_tokens = size * num_lost
        self.num_referred_tokens += num_kept_tokens(state)
        if num_copies:
            # The one block that it shares and writes: the copy stands in its table before anyone reads it.
            pairs = blocks.make_writable(state.id, num_cached // size)
            assert pairs is not None
            self.transfers += [Transfer("copy", source, target) for source, target in pairs]
        return True

    def swap_in(self, state: RequestState) -> bool:
        """Bring a request's KV back to the device, if there is room for it and its next tokens."""
        if not self.blocks.can_swap_in(state.id, state.num_tokens):
            return False
        pairs = self.blocks.swap_in(state.id)
        assert pairs is not None
        self.transfers += [Transfer("swap_in", source, target) for source, target in pairs]
        self.num_referred_tokens += num_kept_tokens(state)
        return True

    def swap_out(self, state: RequestState) -> bool:
        """Move a request's KV to the host, if it has any and the host has room."""
        pairs = self.blocks.swap_out(state.id, state.num_computed_tokens)
        if pairs is None:
            return False
        self.transfers += [Transfer("swap_out", source, target) for source, target in pairs]
        self.num_referred_tokens -= num_kept_tokens(state)
        return True

    def discard(self, state: RequestState) -> None:
        """Give back a request's blocks; its KV has to be computed again."""
        self.release(state)
        self.num_referred_tokens -= num_kept_tokens(state)
        state.num_computed_tokens = state.num_forgotten_tokens = 0

    def release(self, state: RequestState) -> None:
        """Give back a request's blocks, if it holds any."""
        if self.blocks.holds(state.id):
            self.blocks.free(state.id)

    def settle(self, state: RequestState, start: int) -> None:
        """Take note that a request's tokens from `start` on are computed: cache and forget what is due."""
        cache, end = self.blocks.config, state.num_computed_tokens
        self.num_referred_tokens += end - start
        if not self._has_more_to_settle:
            return
        size = cache.block_size
        if cache.prefix_caching and end // size > start // size:
            self.enter(state, end)
        if cache.sliding_window is not None:
            forgotten = size * self.blocks.forget(state.id, end - self.num_repeated)
            self.num_referred_tokens -= forgotten - state.num_forgotten_tokens
            state.num_forgotten_tokens = forgotten

    def enter(self, state: RequestState, end: int) -> None:
        """Let others share a request's full blocks up to a token, if prefixes are cached."""
        token_ids = state.token_ids
        # Of a prompt that is a mere length nothing can ever be found again.
        if self.blocks.config.prefix_caching and token_ids:
            self.blocks.enter(state.id, token_ids, end, extra_of(state.request))

    def leave(self, state: RequestState, others: Iterable[RequestState]) -> list[RequestState]:
        """Undo an early `enter`; return who of the others shares what will now not be computed."""
        taken = set(self.blocks.leave(state.id, state.num_computed_tokens))
        return [other for other in others if other is not state and taken & {*self.blocks.table(other.id)}]

    def disown(self, state: RequestState) -> None:
        """Take a failed request's blocks out of the prefix cache: nobody else may read what is in them."""
        if self.blocks.config.prefix_caching:
            self.blocks.leave(state.id, 0)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers noted since the last call, in their order."""
        taken, self.transfers = tuple(self.transfers), []
        return taken

    def num_held_tokens(self, running: Iterable[RequestState], are_all: bool) -> int:
        """Count the tokens of unfinished requests in held blocks, shared ones once.

        Args:
            running: The unfinished requests.
            are_all: Whether nobody else holds blocks.
        """
        size = self.blocks.config.block_size
        if are_all:
            # Whatever is shared is full: a block filled in part is copied by whoever comes to write it.
            return self.num_referred_tokens - self.blocks.num_shared_blocks * size
        # Some references are those of finished rows, whose tokens do not count.
        in_block: dict[int, int] = {}
        for state in running:
            for place, block in enumerate(self.blocks.table(state.id)):
                filled = min(size, state.num_computed_tokens - size * place)
                if block != NULL_BLOCK and filled > in_block.get(block, 0):
                    in_block[block] = filled
        return sum(in_block.values())


def num_kept_tokens(state: RequestState) -> int:
    """Return the tokens whose KV a request refers to."""
    return state.num_computed_tokens - state.num_forgotten_tokens


def extra_of(request: Request) -> Extra:
    """Return what beside its tokens tells a request's prefix apart."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)
