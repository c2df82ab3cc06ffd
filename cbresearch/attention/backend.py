"""Which code computes the attention: PyTorch, or the Triton kernels."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbresearch.config import ModelShape
from cbresearch.kernels import native

if TYPE_CHECKING:
    from cbresearch.attention.layout import PagedStep
    from cbresearch.kernels.layout import Layout

BACKENDS = ("torch", "triton", "native")


def choose_backend(
    asked: str | None, shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.float32
) -> str:
    """Return "torch", "triton" or "native": the one place that decides.

    Left to itself, a GPU takes the kernels and a CPU takes PyTorch, where Triton has only its interpreter
    (`TRITON_INTERPRET=1`, set before Triton is imported). The kernels take neither latents nor values of
    another size than keys. "native" is C++ for float32 on a CPU, taken only where it is asked for, since it
    needs a compiler.

    Args:
        asked: What the user wants, or None.
        shape: The model's heads.
        device: Where it runs.
        dtype: Element type of the cache.

    Raises:
        ValueError: The backend is unknown, or was asked for and cannot serve the model, or there is no C++
            compiler.
    """
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"attention backend {asked!r} is unknown; choose one of {BACKENDS}")
    is_plain = shape.latent_dim is None and shape.value_head_dim in (None, shape.head_dim)
    if asked == "triton" and not is_plain:
        raise ValueError(
            "the Triton kernels take neither latents nor values of another size than keys; use the backend "
            "'torch' for this model"
        )
    if asked == "native":
        if device.type != "cpu" or dtype != torch.float32 or shape.latent_dim is not None:
            raise ValueError(
                "the backend 'native' and compiled models are for float32 on a CPU, not for latents; this "
                f"model is {dtype} on {device.type}{'' if shape.latent_dim is None else ', with latents'}"
            )
        native.library()
    return asked or ("triton" if device.type == "cuda" and is_plain else "torch")


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
    step: NativeStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write a layer's keys and values into the pool and attend, in C++; as `attend_with_kernels`."""
    attended: Tensor = torch.ops.cbresearch.native_attention(
        query,
        key,
        value,
        step.kv[layer],
        step.packed,
        sinks,
        step.block_size,
        window or 0,
        query.shape[-1] ** -0.5 if scale is None else scale,
        softcap or 0.0,
    )
    return attended


def attend_with_kernels(
    paged: "PagedStep",
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write a layer's keys and values into the pool and attend, in Triton.

    Args:
        paged: The step.
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
    # Only here: a CPU without the interpreter has no use for Triton.
    from cbresearch.kernels.kv_cache import write
    from cbresearch.kernels.paged_attention import paged_attention

    inputs = paged.kernel_inputs
    k_cache, v_cache = paged.cache.block_views(layer)
    write(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, inputs.slot_mapping)
    by_token = query[0].transpose(0, 1)
    if window is not None and window >= paged.max_context:
        window = None
    return paged_attention(
        by_token,
        k_cache,
        v_cache,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.cu_seqlens_q,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.float().contiguous(),
        layout=inputs.layout(by_token.shape[1], key.shape[1], by_token.shape[2], by_token.dtype, window),
    )[None]


class KernelInputs:
    """What the kernels need to know of a step, made once for all layers.

    Attributes:
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`.
        cu_seqlens_q: int32 `[num_seqs + 1]`.
        slot_mapping: int64 `[num_tokens]`; -1 where nothing is written.
    """

    def __init__(
        self,
        block_tables: np.ndarray,
        contexts: np.ndarray,
        num_tokens: np.ndarray,
        slot_mapping: Tensor,
        stored: Tensor | None,
    ) -> None:
        device = slot_mapping.device
        self._contexts = contexts
        self._cu_seqlens = np.concatenate(([0], np.cumsum(num_tokens)))
        self.block_tables = torch.from_numpy(block_tables.astype(np.int32)).to(device)
        self.seq_lens = torch.from_numpy(contexts.astype(np.int32)).to(device)
        self.cu_seqlens_q = torch.from_numpy(self._cu_seqlens.astype(np.int32)).to(device)
        self.slot_mapping = slot_mapping
        if stored is not None:
            self.slot_mapping = torch.full_like(slot_mapping, -1).index_copy_(0, stored, slot_mapping[stored])
        self._layouts: dict[tuple[int, int, int, torch.dtype, int | None], Layout] = {}

    def layout(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
    ) -> "Layout":
        """Return which program computes what, made when a layer of such heads first asks."""
        from cbresearch.kernels.layout import lay_out

        key = (num_heads, num_kv_heads, head_dim, dtype, window)
        if key not in self._layouts:
            self._layouts[key] = lay_out(
                self._contexts,
                self._cu_seqlens,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                window=window,
                device=self.slot_mapping.device,
            )
        return self._layouts[key]
