"""Bookkeeping of the paged KV pool on two tiers."""

from cbresearch.blocks.content import Extra, digest_of
from cbresearch.blocks.host import NULL_BLOCK
from cbresearch.blocks.manager import BlockManager, Pair

__all__ = ["NULL_BLOCK", "BlockManager", "Extra", "Pair", "digest_of"]
