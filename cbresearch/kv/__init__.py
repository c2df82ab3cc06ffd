"""Bookkeeping of the KV pool: paged blocks on two tiers, and the contiguous baselines."""

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.kv.block_manager import BlockManager as BlockManager
from cbresearch.kv.contiguous import BuddyAllocator as BuddyAllocator
from cbresearch.kv.contiguous import ContiguousKV as ContiguousKV
from cbresearch.kv.contiguous import reserved_tokens as reserved_tokens
from cbresearch.kv.interface import NULL_BLOCK as NULL_BLOCK
from cbresearch.kv.interface import KVManager as KVManager


def build(cache: CacheConfig, limits: SchedulerConfig, recomputes_last: bool) -> KVManager:
    """Return the manager that a cache configuration asks for.

    Args:
        cache: The pool.
        limits: The limits of a step, which bound what a request can hold.
        recomputes_last: Whether a finished request's last position may be computed over again.
    """
    if cache.reservation is not None:
        return ContiguousKV(cache, limits.max_model_len)
    return BlockManager(cache, limits.max_num_batched_tokens, recomputes_last=recomputes_last)
