"""The model on a CPU in float32: its linear layers and its attention in C++, as they are or compiled into one graph."""

import copy
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cbresearch.attention import PagedCache, PagedStep
from cbresearch.cpu.library import library, native_attention, native_linear

ATTENTION_NAME = "cbresearch_cpu"


class CpuStep(NamedTuple):
    """What the C++ attention needs to know of a step; nothing but tensors and constants, so that it compiles.

    Attributes:
        kv: The pool of each layer.
        packed: int64, in one row: the number of sequences; the columns of the block tables; each sequence's
            first token, tokens, start, and whether they are written; the block tables, row by row.
        block_size: Tokens of a block.
        windows: Tokens that each layer attends to at most, None for the whole context.
    """

    kv: tuple[Tensor, ...]
    packed: Tensor
    block_size: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, step: PagedStep) -> "CpuStep":
        """Return a step as the C++ attention takes it."""
        num_seqs, width = step.block_tables.shape
        is_stored = np.ones(num_seqs, dtype=bool) if step.is_stored is None else step.is_stored
        firsts = np.cumsum(step.num_tokens) - step.num_tokens
        sequences = np.stack((firsts, step.num_tokens, step.starts, is_stored), axis=1)
        packed = np.concatenate(((num_seqs, width), sequences.ravel(), step.block_tables.ravel()))
        cache = step.cache
        return cls(tuple(cache.kv), torch.from_numpy(packed), cache.config.block_size, cache.windows)
