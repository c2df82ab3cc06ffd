"""What tells a full block apart from every other."""

from collections.abc import Hashable
from hashlib import blake2b
from typing import NamedTuple

Extra = tuple[tuple[str, Hashable], ...]
"""What beside its tokens tells a prefix apart: (kind, value) pairs, such as ("salt", "x")."""


class Content(NamedTuple):
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
