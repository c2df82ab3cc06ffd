"""Which blocks hold which prefixes (vLLM's automatic prefix caching, by content and verified)."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from cbresearch.kv.interface import NULL_BLOCK, EventLog

ExtraKeys = tuple[tuple[str, Hashable], ...]
"""What beside its tokens tells a prefix apart: (kind, value) pairs, such as ("salt", "x")."""


class Content(NamedTuple):
    """What a full block holds: its tokens, behind the chain of blocks that the parent's digest stands for."""

    parent: bytes
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys


def digest_of(content: Content) -> bytes:
    """Return 16 bytes that stand for a block and all before it, the same in every process."""
    parent, token_ids, extra_keys = content
    digest = blake2b(parent, digest_size=16)
    digest.update(repr((token_ids, extra_keys)).encode())
    return digest.digest()


class PrefixCache:
    """Find a block by what it holds: its own tokens and all before them.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        events: Where blocks that become findable, or cease to be, are logged.
    """

    def __init__(self, num_blocks: int, block_size: int, events: EventLog) -> None:
        self._block_size = block_size
        self._events = events
        self._contents: list[Content | None] = [None] * num_blocks
        # Several blocks may hold one content; the first of those still there is the one that is found.
        self._index: dict[bytes, list[int]] = {}
        self._chains: dict[str, list[bytes]] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no block can be found."""
        return not self._index

    def holds(self, block: int) -> bool:
        """Return whether a block can be found by its content."""
        return self._contents[block] is not None

    def match(self, token_ids: Sequence[int], extra_keys: ExtraKeys) -> tuple[int, ...]:
        """Return the blocks with which some token ids begin, their last token never among them."""
        matched: list[int] = []
        parent = b""
        for end in range(self._block_size, len(token_ids), self._block_size):
            content = Content(parent, tuple(token_ids[end - self._block_size : end]), extra_keys)
            parent = digest_of(content)
            holders = self._index.get(parent)
            if holders is None or self._contents[holders[0]] != content:
                break
            matched.append(holders[0])
        return tuple(matched)

    def begin(self, request_id: str, table: Sequence[int]) -> None:
        """Take note of a request that begins with blocks which may be findable."""
        digests: list[bytes] = []
        for block in table:
            content = self._contents[block] if block != NULL_BLOCK else None
            if content is None:
                break
            digests.append(digest_of(content))
        self._chains[request_id] = digests

    def enter(
        self,
        request_id: str,
        table: Sequence[int],
        token_ids: Sequence[int],
        num_computed: int,
        extra_keys: ExtraKeys,
    ) -> None:
        """Make a request's full blocks findable, as far as its tokens are computed."""
        digests = self._chains.setdefault(request_id, [])
        for place in range(len(digests), num_computed // self._block_size):
            begin = place * self._block_size
            parent = digests[-1] if digests else b""
            content = Content(parent, tuple(token_ids[begin : begin + self._block_size]), extra_keys)
            digest = digest_of(content)
            holders, block = self._index.get(digest), table[place]
            if holders is not None and self._contents[holders[0]] != content:
                # Another content holds the digest: what follows could be mistaken for its continuation.
                break
            # A copy of what is known already is kept as well, as in vLLM.
            if block != NULL_BLOCK and not self.holds(block):
                self._index.setdefault(digest, []).append(block)
                self._contents[block] = content
                self._events.cached.append(block)
            digests.append(digest)

    def leave(self, request_id: str, table: Sequence[int], num_computed: int) -> tuple[int, ...]:
        """Evict those of a request's blocks whose tokens are not all computed, and return them."""
        place = num_computed // self._block_size
        self.cut(request_id, place)
        taken = [block for block in table[place:] if block != NULL_BLOCK and self.holds(block)]
        for block in taken:
            self.evict(block)
        return tuple(taken)

    def cut(self, request_id: str, place: int) -> None:
        """Drop what a request's table holds from a place on, as far as this request is concerned."""
        del self._chains.get(request_id, [])[place:]

    def drop(self, request_id: str) -> None:
        """Drop a request; its blocks can still be found."""
        self._chains.pop(request_id, None)

    def evict(self, block: int) -> None:
        """Make a block unfindable: its content is about to go."""
        content = self._contents[block]
        assert content is not None
        digest = digest_of(content)
        self._index[digest].remove(block)
        if not self._index[digest]:
            del self._index[digest]
        self._contents[block] = None
        self._events.evicted.append(block)

    def check(self) -> set[int]:
        """Prove that the index and the contents agree; return the blocks that can be found."""
        known = {block: content for block, content in enumerate(self._contents) if content is not None}
        held = [block for holders in self._index.values() for block in holders]
        assert sorted(held) == list(known), "the index differs from the blocks' contents"
        for block, content in known.items():
            holders = self._index.get(digest_of(content), [])
            assert block in holders, f"block {block} has a false digest"
            assert self._contents[holders[0]] == content, (
                f"block {block} shares a digest with another content"
            )
        return set(known)
