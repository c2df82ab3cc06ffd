"""Bookkeeping of the paged KV pool (vLLM, SOSP'23, section 4): who holds what, and what may be reused."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from cbresearch.config import CacheConfig

Extra = tuple[tuple[str, Hashable], ...]
"""What beside its tokens tells a prefix apart: (kind, value) pairs, such as ("salt", "x")."""


class _Content(NamedTuple):
    """What a full block holds: its tokens, behind the chain of blocks that the parent's digest stands for."""

    parent: bytes
    token_ids: tuple[int, ...]
    extra: Extra


def digest_of(content: tuple[bytes, tuple[int, ...], Extra]) -> bytes:
    """Return 16 bytes that stand for a block and all before it, the same in every process."""
    parent, token_ids, extra = content
    digest = blake2b(parent, digest_size=16)
    digest.update(repr((token_ids, extra)).encode())
    return digest.digest()


class BlockManager:
    """Hand out fixed-size blocks of the KV pool and take them back.

    A request's block table maps its logical blocks, in order, to physical block ids. Blocks are
    taken only as tokens need them, so a request wastes less than one block.

    With prefix caching, a full block whose KV is computed is entered under its content and that of all
    blocks before it. Requests whose prompts begin alike share it. When nobody refers to it any more it
    stays cached until its room is needed; then the least recently used goes first, and of one request's
    blocks the last.

    Args:
        config: The pool's size, and whether it caches prefixes.
        digest: Maps a block's content to its digest; a test may give a bad one.
    """

    def __init__(self, config: CacheConfig, digest: Callable[[_Content], bytes] = digest_of) -> None:
        self.config = config
        self._digest = digest
        self._block_size = config.block_size
        # A stack: the block freed last is the one most likely still in a CPU's cache.
        self._free = list(range(config.num_blocks - 1, -1, -1))
        self._ref_counts = [0] * config.num_blocks
        self._tables: dict[str, list[int]] = {}
        self._chains: dict[str, list[bytes]] = {}
        self._contents: list[_Content | None] = [None] * config.num_blocks
        self._index: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._num_extra_references = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool."""
        return self.config.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks can be handed out: those without content and those that may be evicted."""
        return len(self._free) + len(self._unreferenced)

    @property
    def num_cached_blocks(self) -> int:
        """Return how many blocks hold a cached prefix that nobody refers to."""
        return len(self._unreferenced)

    @property
    def num_held_blocks(self) -> int:
        """Return how many blocks are held, a shared one counted once."""
        return self.config.num_blocks - self.num_free_blocks

    @property
    def num_shared_tokens(self) -> int:
        """Return the tokens that requests hold beyond the first holder of each block."""
        return self._num_extra_references * self._block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's block table; empty if it holds nothing."""
        return tuple(self._tables.get(request_id, ()))

    def match(self, token_ids: Sequence[int], extra: Extra = ()) -> tuple[int, ...]:
        """Return the cached blocks with which a prompt begins; nothing changes.

        The prompt's last token is never matched, since its logits have to be computed.

        Args:
            token_ids: The prompt, and what was generated behind it before a preemption.
            extra: What beside its tokens tells the prompt apart.
        """
        if not self.config.prefix_caching:
            return ()
        matched: list[int] = []
        parent = b""
        for end in range(self._block_size, len(token_ids), self._block_size):
            content = _Content(parent, tuple(token_ids[end - self._block_size : end]), extra)
            parent = self._digest(content)
            block = self._index.get(parent)
            if block is None or self._contents[block] != content:
                break
            matched.append(block)
        return tuple(matched)

    def can_allocate(self, request_id: str, num_tokens: int, matched: Sequence[int] = ()) -> bool:
        """Return whether room for `num_tokens` tokens could be had now, `matched` blocks shared first."""
        held = len(self._tables.get(request_id, ())) or len(matched)
        evictable = self.num_free_blocks - sum(self._ref_counts[block] == 0 for block in matched)
        return self.blocks_for(num_tokens) - held <= evictable

    def share(self, request_id: str, matched: Sequence[int]) -> None:
        """Begin a request's table with cached blocks, which nobody can evict from now on.

        Raises:
            ValueError: The request holds blocks already.
        """
        if request_id in self._tables:
            raise ValueError(
                f"request {request_id!r} holds blocks already; only a new table can share a prefix"
            )
        if not matched:
            return
        digests = []
        for block in matched:
            if self._ref_counts[block]:
                self._num_extra_references += 1
            else:
                del self._unreferenced[block]
            self._ref_counts[block] += 1
            content = self._contents[block]
            assert content is not None
            digests.append(self._digest(content))
        self._tables[request_id] = list(matched)
        self._chains[request_id] = digests

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
            if missing > self.num_free_blocks:
                return None
            self._evict(missing - len(free))
        added = free[-missing:][::-1]
        del free[-missing:]
        for block in added:
            self._ref_counts[block] = 1
        if table is None:
            self._tables[request_id] = added
        else:
            table.extend(added)
        return tuple(added)

    def enter(self, request_id: str, token_ids: Sequence[int], num_computed: int, extra: Extra = ()) -> None:
        """Enter a request's full blocks into the prefix cache, as far as their KV is computed.

        Args:
            request_id: Whose blocks.
            token_ids: All its known tokens.
            num_computed: Tokens whose KV is in the pool.
            extra: What beside its tokens tells the request apart.
        """
        digests = self._chains.setdefault(request_id, [])
        for place in range(len(digests), num_computed // self._block_size):
            begin = place * self._block_size
            parent = digests[-1] if digests else b""
            content = _Content(parent, tuple(token_ids[begin : begin + self._block_size]), extra)
            digest = self._digest(content)
            holder = self._index.get(digest)
            if holder is None:
                block = self._tables[request_id][place]
                self._index[digest] = block
                self._contents[block] = content
            elif self._contents[holder] != content:
                # Another content holds the digest: what follows could be mistaken for its continuation.
                break
            digests.append(digest)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request; what is cached stays until its room is needed.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            raise ValueError(
                f"request {request_id!r} holds no blocks; it was never allocated or already freed"
            )
        self._chains.pop(request_id, None)
        # The tail first: it is evicted before the head, without which it could not be reached.
        for block in reversed(table):
            self._release(block)

    def _release(self, block: int) -> None:
        count = self._ref_counts[block]
        if count < 1:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] = count - 1
        if count > 1:
            self._num_extra_references -= 1
        elif self._contents[block] is None:
            self._free.append(block)
        else:
            self._unreferenced[block] = None

    def _evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block, _ = self._unreferenced.popitem(last=False)
            content = self._contents[block]
            assert content is not None
            del self._index[self._digest(content)]
            self._contents[block] = None
            self._free.append(block)

    def check(self) -> None:
        """Prove the pool's invariants.

        Raises:
            AssertionError: A block is lost, held and free at once, miscounted, or cached under a false name.
        """
        references = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            assert table, f"request {request_id!r} has an empty table"
            assert len(set(table)) == len(table), f"request {request_id!r} holds a block twice: {table}"
            for block in table:
                references[block] += 1
        assert references == self._ref_counts, "reference counts differ from the tables"
        free, cached = set(self._free), set(self._unreferenced)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached, "a block is free and cached at once"
        assert all(references[block] == 0 for block in free | cached), "a block is held and free at once"
        held = {block for block, count in enumerate(references) if count}
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert sum(references) - len(held) == self._num_extra_references, "shared blocks are miscounted"
        named = {block for block, content in enumerate(self._contents) if content is not None}
        assert cached <= named, "a block without content is kept as cached"
        assert sorted(self._index.values()) == sorted(named), "the index differs from the blocks' contents"
        for block in named:
            content = self._contents[block]
            assert content is not None
            assert self._index[self._digest(content)] == block, (
                f"block {block} is indexed under a false digest"
            )
            assert references[block] <= 1 or block in named, f"block {block} is shared but not full"
