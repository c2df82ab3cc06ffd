"""The bridge into transformers: a paged KV cache, and an attention function that writes and reads it."""

from cbresearch.attention.function import ATTENTION_NAME, attention_function, choose_backend, paged_model
from cbresearch.attention.pool import PagedCache
from cbresearch.attention.static import StaticStep
from cbresearch.attention.step import PagedStep, batch_order
from cbresearch.attention.torch_backend import LatentCache

__all__ = [
    "ATTENTION_NAME",
    "LatentCache",
    "PagedCache",
    "PagedStep",
    "StaticStep",
    "attention_function",
    "batch_order",
    "choose_backend",
    "paged_model",
]
