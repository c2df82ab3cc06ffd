"""The attention of a step through the Triton kernels."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbresearch import kernels
from cbresearch.attention.pool import PagedCache


class Key(NamedTuple):
    """What layers that share a plan of their work have in common; see `kernels.plan_work`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None


class KernelInputs:
    """What the kernels need to know of a step, made once for all layers.

    Attributes:
        cache: The pool.
        kv: The pool of each layer.
        windows: The windows of the pool's layers.
        max_context: Tokens of the longest context.
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`.
        cu_seqlens_q: int32 `[num_seqs + 1]`.
        slot_mapping: int64 `[num_tokens]`; -1 where nothing is written.

    Args:
        cache: The pool.
        block_tables: int64 `[num_seqs, max_blocks]`.
        contexts: int64 `[num_seqs]`: tokens of each sequence, those of the step included.
        num_tokens: int64 `[num_seqs]`: queries of each sequence.
        slot_mapping: int64 `[num_tokens]`; -1 where nothing is written.
    """

    def __init__(
        self, cache: PagedCache, block_tables: np.ndarray,
        contexts: np.ndarray, num_tokens: np.ndarray, slot_mapping: Tensor,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.kv = tuple(cache.kv)
        self.windows = cache.windows
        self.max_context = int(contexts.max())
        self.slot_mapping = slot_mapping
        self._contexts = contexts
        self._cu_seqlens = np.concatenate(([0], np.cumsum(num_tokens)))
        self.block_tables, self.seq_lens, self.cu_seqlens_q = (
            torch.from_numpy(array.astype(np.int32)).to(slot_mapping.device)
            for array in (block_tables, contexts, self._cu_seqlens)
        )
        self._plans: dict[Key, kernels.WorkPlan] = {}

    def plan(self, query: Tensor, num_kv_heads: int, window: int | None) -> kernels.WorkPlan:
        """Return which program computes what, made when a layer of such heads and window first asks.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            num_kv_heads: KV heads.
            window: Keys that a query sees at most, its own included.
        """
        key = Key(query.shape[1], num_kv_heads, query.shape[2], query.dtype, window)
        if key not in self._plans:
            self._plans[key] = self._plan_work(key, self._contexts)
        return self._plans[key]

    def _plan_work(self, key: Key, contexts: np.ndarray, num_splits: int | None = None) -> kernels.WorkPlan:
        where = self.slot_mapping.device
        return kernels.plan_work(
            contexts, self._cu_seqlens, **key._asdict(), device=where, num_splits=num_splits
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write a layer's keys and values into the pool and attend.

        Args:
            layer: Which layer's pool.
            query: `[1, num_heads, num_tokens, head_dim]`.
            key: `[1, num_kv_heads, num_tokens, head_dim]`.
            value: As `key`.
            scale: Factor on the scores.
            window: Keys that a query sees at most, its own included.
            softcap: Bound of the scores.
            sinks: `[num_heads]`: scores of the attention sinks.

        Returns:
            `[1, num_tokens, num_heads, head_dim]`.
        """
        k_cache, v_cache = self.cache.block_views(layer)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        kernels.write_kv(k, v, k_cache, v_cache, self.slot_mapping)
        if window is not None and window >= self.max_context:
            window = None
        return kernels.paged_attention(
            q, k_cache, v_cache, self.block_tables, self.seq_lens, self.cu_seqlens_q,
            scale=scale, window=window, softcap=softcap, plan=self.plan(q, k.shape[1], window),
            sinks=None if sinks is None else sinks.float().contiguous(),
        )[None]  # fmt: skip
