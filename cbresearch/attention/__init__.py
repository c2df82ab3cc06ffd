"""The bridge into transformers: a paged KV cache, and an attention function that writes and reads it."""

from cbresearch.attention.backend import NativeStep, choose_backend
from cbresearch.attention.function import ATTENTION_NAME, LatentCache, paged_attention, paged_model
from cbresearch.attention.layout import PagedStep, batch_order
from cbresearch.attention.linear import pack_linear_layers
from cbresearch.attention.pool import PagedCache
from cbresearch.attention.static import StaticStep

__all__ = [
    "ATTENTION_NAME",
    "LatentCache",
    "NativeStep",
    "PagedCache",
    "PagedStep",
    "StaticStep",
    "batch_order",
    "choose_backend",
    "pack_linear_layers",
    "paged_attention",
    "paged_model",
]
