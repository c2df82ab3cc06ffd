"""Bookkeeping of the paged KV pool (vLLM, SOSP'23, section 4): tables, reference counts, reuse."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from cbresearch.config import CacheConfig
from cbresearch.kv.host import HostPool, check_references
from cbresearch.kv.interface import NULL_BLOCK, EventLog, KVManager
from cbresearch.kv.prefix_cache import ExtraKeys, PrefixCache
from cbresearch.request import Request, RequestState
from cbresearch.step import BlockEvents, Transfer

Pair = tuple[int, int]
"""A block to copy: (source, target)."""


class BlockManager(KVManager):
    """Hand out fixed-size blocks of the KV pool and take them back.

    A request's block table maps its logical blocks, in order, to physical block ids. Blocks are
    taken only as tokens need them, so a request wastes less than one block.

    With prefix caching, a full block whose KV is computed is cached under its content and that of all
    blocks before it. Requests whose prompts begin alike share it. When its last reference is gone it
    stays cached until its room is needed; then the least recently used goes first, and of one request's
    blocks the last.

    A request may be moved whole to a second pool, in the host's memory, and back. While the copy of a full
    block in the one pool and its original in the other are both there, they mirror each other: a mirrored
    block is referred to instead of being copied again.

    Args:
        config: The pools' sizes, and whether prefixes are cached.
        max_chunk: Most tokens of one request that a step computes; it bounds what a sliding window holds.
        recomputes_last: Whether a finished request's last position may be computed over again (a padding
            row), so that what it attends to has to stay.
    """

    num_unusable_blocks = 0
    """Blocks that are neither held nor to be had; paging has none."""

    def __init__(
        self, config: CacheConfig, max_chunk: int | None = None, recomputes_last: bool = False
    ) -> None:
        self.config = config
        self.num_blocks = config.num_blocks
        self._block_size = config.block_size
        self._most_blocks: int | None = None
        if config.sliding_window is not None and max_chunk is not None:
            in_flight = config.sliding_window - 1 + max_chunk
            self._most_blocks = -(-in_flight // config.block_size) + 1
        # A stack: the block freed last is the one most likely still in a CPU's cache.
        self._free = list(range(config.num_blocks - 1, -1, -1))
        self._ref_counts = [0] * config.num_blocks
        self._tables: dict[str, list[int]] = {}
        self._events = EventLog()
        self._prefixes = PrefixCache(config.num_blocks, config.block_size, self._events)
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self.num_shared_blocks = 0
        self._host = HostPool(config.num_host_blocks, self._events)
        self._num_recomputed = int(recomputes_last)
        self._transfers: list[Transfer] = []

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks can be handed out: those without content and those that may be evicted."""
        return len(self._free) + len(self._unreferenced)

    @property
    def num_cached_blocks(self) -> int:
        """Return how many blocks hold a cached prefix and have no reference."""
        return len(self._unreferenced)

    @property
    def cached_block_ids(self) -> tuple[int, ...]:
        """Return the cached blocks without a reference, the next to be evicted first."""
        return tuple(self._unreferenced)

    @property
    def num_held_blocks(self) -> int:
        """Return how many blocks are held, a shared one counted once."""
        return self.num_blocks - len(self._free) - len(self._unreferenced)

    @property
    def num_held_host_blocks(self) -> int:
        """Return how many blocks of the host's pool are held, a shared one counted once."""
        return self.config.num_host_blocks - len(self._host.free)

    def max_blocks_needed(self, request: Request) -> int:
        """Return how many blocks a request holds at its largest, alone; the last token needs no KV."""
        return self._at_most(self.blocks_for(request.num_prompt_tokens + request.max_tokens - 1))

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table; empty if it holds nothing on the device."""
        return tuple(self._tables.get(request_id, ()))

    def num_private_blocks(self, request_id: str) -> int:
        """Return how many blocks would be free if a request gave back its own."""
        return sum(block != NULL_BLOCK and self._ref_counts[block] == 1 for block in self._tables[request_id])

    def host_table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table in the host's pool; empty if it is not swapped out."""
        return tuple(self._host.tables.get(request_id, ()))

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
        """Yield how many blocks a request lacks for `num_tokens` tokens, now and as others leave in turn."""
        if state.id in self._host.tables:
            missing, mirrored = self._missing_on_device(state.id, num_tokens)
            shared = tuple(mirrored.values())
        else:
            shared = () if state.id in self._tables else self._matched(state)
            missing = self._num_missing(state.id, num_tokens, shared)
        yield missing
        # What it shares makes it no more room when others let go of it.
        left = dict.fromkeys((*shared, NULL_BLOCK), -inf)
        for request_id in leaving:
            for block in self._tables[request_id]:
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
        # Of a prompt that is a mere length nothing can ever be found again.
        if token_ids := state.token_ids:
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

    def match(self, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> tuple[int, ...]:
        """Return the cached blocks with which a prompt begins; nothing changes.

        The prompt's last token is never matched, since its logits have to be computed.

        Args:
            token_ids: The prompt, and what was generated behind it before a preemption.
            extra_keys: What beside its tokens tells the prompt apart.
        """
        return self._prefixes.match(token_ids, extra_keys) if self.config.prefix_caching else ()

    def can_allocate(
        self, request_id: str, num_tokens: int, matched: Sequence[int] = (), num_copies: int = 0
    ) -> bool:
        """Return whether a request could get room for `num_tokens` tokens now.

        Args:
            request_id: Id of the request.
            num_tokens: All its known tokens.
            matched: Blocks that it would share first.
            num_copies: Shared blocks that it would have to copy in order to write them.
        """
        return self._num_missing(request_id, num_tokens, matched) + num_copies <= 0

    def _num_missing(self, request_id: str, num_tokens: int, matched: Sequence[int]) -> int:
        """Return how many blocks too few are free for a request; not above 0 where there are enough."""
        begun = self._tables.get(request_id) or matched
        num_in_sight = sum([block != NULL_BLOCK for block in begun])
        num_wanted = self._at_most(self.blocks_for(num_tokens) - len(begun) + num_in_sight) - num_in_sight
        return num_wanted - self.num_free_blocks + sum([block in self._unreferenced for block in matched])

    def fork(self, request_id: str, matched: Sequence[int]) -> None:
        """Begin a request's table with blocks that are there, which cannot be evicted from now on.

        The blocks come from `match`, or are the first ones of another request's table.

        Raises:
            ValueError: The request holds blocks already.
        """
        self._require_new(request_id)
        if not matched:
            return
        for block in matched:
            if block != NULL_BLOCK:
                self._refer(block)
        self._tables[request_id] = list(matched)
        self._prefixes.begin(request_id, matched)

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
        added = self._take(missing)
        if added is None:
            return None
        if table is None:
            self._require_new(request_id)
            self._tables[request_id] = added
        else:
            table.extend(added)
        return tuple(added)

    def capacities(self, request_ids: Sequence[str]) -> list[int]:
        """Return how many tokens requests' tables can hold."""
        tables, size = self._tables, self._block_size
        return [len(tables[request_id]) * size for request_id in request_ids]

    def append_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Grow requests' tables by one block each, in order, as `allocate` would, and return the blocks.

        As many have to be free. A request may be named several times.
        """
        added = self._take(len(request_ids))
        assert added is not None
        for request_id, block in zip(request_ids, added, strict=True):
            self._tables[request_id].append(block)
        return added

    def copy_on_write(self, request_id: str, place: int) -> tuple[Pair, ...] | None:
        """Give a request a block of its own at a place of its table, before it writes there.

        A block with other references, or whose content can be found, is copied; the copy takes its place in
        this request's table only.

        Returns:
            The (source, target) pair to copy, if any, or None if no block is free; then nothing has changed.
        """
        table = self._tables[request_id]
        block = table[place]
        is_known = self._prefixes.holds(block) or block in self._host.host_block
        if self._ref_counts[block] == 1 and not is_known:
            return ()
        taken = self._take(1)
        if taken is None:
            return None
        (table[place],) = taken
        self._prefixes.cut(request_id, place)
        self._release(block)
        return ((block, table[place]),)

    def cache_full_blocks(
        self, request_id: str, token_ids: Sequence[int], num_computed: int, extra_keys: ExtraKeys = ()
    ) -> None:
        """Make a request's full blocks findable, if prefixes are cached, as far as their KV is computed.

        Args:
            request_id: Id of the request.
            token_ids: All its known tokens.
            num_computed: Tokens whose KV is in the pool.
            extra_keys: What beside its tokens tells the request apart.
        """
        if self.config.prefix_caching:
            self._prefixes.enter(request_id, self._tables[request_id], token_ids, num_computed, extra_keys)

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Return how many of a request's first blocks no later token attends to, with a sliding window W.

        The token at position i sees positions i − W + 1 to i.

        Args:
            num_computed: Tokens whose KV is computed: the position of the next one.
        """
        window = self.config.sliding_window
        return 0 if window is None else max(0, num_computed - window + 1) // self._block_size

    def remove_skipped_blocks(self, request_id: str, num_computed: int) -> int:
        """Give back a request's blocks that fell out of its sliding window.

        Args:
            request_id: Id of the request.
            num_computed: Tokens whose KV is computed: the position of the next one.

        Returns:
            How many of the first places of its table are `NULL_BLOCK` now.
        """
        table, num_lost = self._tables[request_id], self.num_skipped_blocks(num_computed)
        for place in range(num_lost - 1, -1, -1):
            if table[place] == NULL_BLOCK:
                break
            self._events.released.append((request_id, table[place]))
            self._release(table[place])
            table[place] = NULL_BLOCK
        return num_lost

    def move_to_host(self, request_id: str, num_computed: int) -> tuple[Pair, ...] | None:
        """Move a request to the host's pool.

        Args:
            request_id: Id of the request.
            num_computed: Tokens whose KV is in its blocks; blocks behind them are given back uncopied.

        Returns:
            The (device block, host block) pairs to copy, or None if the host's pool is absent or has too few
            blocks; then nothing has changed.
        """
        table, host = self._tables[request_id], self._host
        moved = table[: self.blocks_for(num_computed)]
        num_new = sum(block != NULL_BLOCK and block not in host.host_block for block in moved)
        if not moved or num_new > len(host.free):
            return None
        pairs, host_table = [], []
        for place, block in enumerate(moved):
            target = NULL_BLOCK if block == NULL_BLOCK else host.host_block.get(block)
            if target is None:
                target = host.free.pop()
                pairs.append((block, target))
                if (place + 1) * self._block_size <= num_computed:
                    host.mirror(block, target)
            host_table.append(target)
        host.hold(request_id, host_table)
        self._free_table(request_id)
        return tuple(pairs)

    def move_to_device(self, request_id: str, num_tokens: int) -> tuple[Pair, ...] | None:
        """Move a request back to the device's pool; `table` has its blocks then.

        Args:
            request_id: Id of the request.
            num_tokens: All its known tokens, for which there has to be room.

        Returns:
            The (host block, device block) pairs to copy, or None if too few blocks are free; then nothing has
            changed.
        """
        host, table = self._host, self._host.tables[request_id]
        num_missing, mirrored = self._missing_on_device(request_id, num_tokens)
        if num_missing > 0:
            return None
        wanted = [block for block in table if block != NULL_BLOCK and block not in mirrored]
        # Pinned first: what is there already can then not be evicted to make room for the rest.
        for block in mirrored.values():
            self._refer(block)
        pairs = list(zip(wanted, self._take(len(wanted)) or (), strict=True))
        place_of = {NULL_BLOCK: NULL_BLOCK, **mirrored, **dict(pairs)}
        self._tables[request_id] = [place_of[block] for block in table]
        for source, target in pairs:
            if host.is_shared(source):
                # The copy of another request stays, and only what is full is shared.
                host.mirror(target, source)
        host.drop(request_id)
        return tuple(pairs)

    def _missing_on_device(self, request_id: str, num_tokens: int) -> tuple[int, dict[int, int]]:
        """Return how many blocks a swapped request lacks, and those that the device has still."""
        host, table = self._host, self._host.tables[request_id]
        mirrored = {block: host.device_block[block] for block in table if block in host.device_block}
        num_known = len(table) - table.count(NULL_BLOCK)
        num_needed = self._at_most(self.blocks_for(num_tokens) - len(table) + num_known)
        unpinned = sum(block in self._unreferenced for block in mirrored.values())
        num_wanted = max(num_needed, num_known) - len(mirrored)
        return num_wanted - self.num_free_blocks + unpinned, mirrored

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request; what is cached stays until its room is needed.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """
        if request_id in self._tables:
            self._free_table(request_id)
        elif request_id in self._host.tables:
            self._host.drop(request_id)
        else:
            raise ValueError(f"request {request_id!r} holds no blocks: never allocated, or freed already")

    def take_events(self) -> BlockEvents:
        """Return what became of blocks since the last call."""
        return self._events.take()

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

    def _free_table(self, request_id: str) -> None:
        table = self._tables.pop(request_id)
        self._prefixes.drop(request_id)
        table.reverse()
        blocks = table if self.config.sliding_window is None else [block for block in table if block >= 0]
        counts = self._ref_counts
        if self._prefixes.is_empty and not (self.num_shared_blocks or self._host.host_block):
            # Nothing is cached, shared or there twice: the blocks go back as they are.
            for block in blocks:
                if not counts[block]:
                    raise ValueError(f"block {block} is free already")
                counts[block] = 0
            self._free += blocks
            self._events.freed += blocks
            return
        # The tail first: it is evicted before the head, without which it could not be reached.
        for block in blocks:
            self._release(block)

    def _at_most(self, num_blocks: int) -> int:
        """Return how many of the blocks that a request needs it holds at once, its window considered."""
        return num_blocks if self._most_blocks is None else min(num_blocks, self._most_blocks)

    def _require_new(self, request_id: str) -> None:
        if request_id in self._tables or request_id in self._host.tables:
            raise ValueError(
                f"request {request_id!r} holds blocks already; only a new table can share a prefix"
            )

    def _refer(self, block: int) -> None:
        if self._ref_counts[block]:
            self.num_shared_blocks += 1
        else:
            del self._unreferenced[block]
        self._ref_counts[block] += 1

    def _take(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks, for which cached prefixes are evicted if need be; none if too few are free."""
        free, counts = self._free, self._ref_counts
        if num_blocks > self.num_free_blocks:
            return None
        for _ in range(num_blocks - len(free)):
            block, _ = self._unreferenced.popitem(last=False)
            self._prefixes.evict(block)
            self._host.unmirror(block)
            free.append(block)
        begin = len(free) - num_blocks
        added = free[begin:][::-1]
        del free[begin:]
        for block in added:
            counts[block] = 1
        return added

    def _release(self, block: int) -> None:
        count = self._ref_counts[block]
        if count < 1:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] = count - 1
        if count > 1:
            self.num_shared_blocks -= 1
            return
        self._events.freed.append(block)
        if self._prefixes.holds(block):
            self._unreferenced[block] = None
        else:
            self._host.unmirror(block)
            self._free.append(block)

    def check(self) -> None:
        """Prove the invariants of both pools.

        Raises:
            AssertionError: A block is lost, held and free at once, miscounted, or cached under a false name.
        """
        for request_id, table in self._tables.items():
            assert table, f"request {request_id!r} has an empty table"
            held_here = [block for block in table if block != NULL_BLOCK]
            assert len(set(held_here)) == len(held_here), f"request {request_id!r} holds a block twice"
        cached = self._unreferenced.keys()
        held = check_references("device", self._tables.values(), self._ref_counts, [*self._free, *cached])
        assert sum(self._ref_counts) - len(held) == self.num_shared_blocks, "shared blocks are miscounted"
        assert cached <= self._prefixes.check(), "a block without content is kept as cached"
        assert not self._tables.keys() & self._host.tables.keys(), "a request is on both tiers"
        self._host.check()
        assert self._host.host_block.keys() <= held | cached, "a free block is mirrored"


def extra_keys_of(request: Request) -> ExtraKeys:
    """Return what beside its tokens tells a request's prefix apart."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)
