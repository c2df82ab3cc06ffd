"""The attention of a step in C++, for float32 on a CPU."""

from typing import NamedTuple

import torch
from torch import Tensor


class NativeStep(NamedTuple):
    """What the C++ kernel needs to know of a step; nothing but tensors and constants, so that it compiles.

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


def attend_natively(
    step: NativeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write a layer's keys and values into the pool and attend; arguments as `attend_with_triton`."""
    attended: Tensor = torch.ops.cbresearch.native_attention(
        *(query, key, value, step.kv[layer], step.packed, sinks),
        *(step.block_size, window or 0, scale, softcap or 0.0),
    )
    return attended
