"""The bridge into transformers: a paged KV cache, and an attention function that writes and reads it."""

from cbresearch.attention.backend import NativeStep, choose_backend
from cbresearch.attention.function import ATTENTION_NAME, LatentCache, paged_attention, paged_model
from cbresearch.attention.layout import PagedStep, batch_order
from cbresearch.attention.pool import PagedCache

__all__ = [
    "ATTENTION_NAME",
    "LatentCache",
    "NativeStep",
    "PagedCache",
    "PagedStep",
    "batch_order",
    "choose_backend",
    "paged_attention",
    "paged_model",
]
