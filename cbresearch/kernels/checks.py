"""Check the arguments of the kernels before a launch; every ValueError names the argument."""

import torch
from torch import Tensor

from cbresearch.kernels.float8 import MANTISSA_BITS
from cbresearch.kernels.layout import Layout

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_pool(name: str, cache: Tensor) -> None:
    """Refuse a pool of another form."""
    if cache.dim() != 4 or cache.stride(3) != 1 or 0 in cache.shape[1:]:
        raise ValueError(
            f"{name} must be [num_blocks, block_size, num_kv_heads, head_dim] with a last stride of 1, and "
            f"has shape {tuple(cache.shape)} and strides {cache.stride()}"
        )


def check_vector(name: str, vector: Tensor | None, sizes: tuple[int, ...]) -> None:
    """Refuse what is not contiguous float32 of one of some sizes."""
    if vector is None:
        return
    if vector.dtype != torch.float32 or vector.numel() not in sizes or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous float32 with {' or '.join(map(str, sizes))} elements, and is "
            f"{vector.dtype} of shape {tuple(vector.shape)}"
        )


def check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    """Refuse a scale that does not fit its cache `[..., num_kv_heads, head_dim]`."""
    if scale is not None and cache.dtype not in MANTISSA_BITS:
        raise ValueError(f"{name} is for a float8 cache, and this one is {cache.dtype}")
    check_vector(name, scale, (1, cache.shape[2]))


def check_devices(named: dict[str, Tensor | None], first: str) -> None:
    """Refuse a tensor that is not where the one named `first` is."""
    for name, tensor in named.items():
        if tensor is not None and tensor.device != named[first].device:
            raise ValueError(f"{name} is on {tensor.device}, and {first} on {named[first].device}")


def check_tensors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, out: Tensor, others: dict[str, Tensor]
) -> None:
    """Refuse tensors that `paged_attention` cannot take.

    Args:
        q: As there.
        k_cache: As there.
        v_cache: As there.
        block_tables: As there.
        out: As there.
        others: `alibi`, `sinks`, `k_scale` and `v_scale`, each a tensor or None.
    """
    if q.dim() != 3 or q.dtype not in _DTYPES:
        raise ValueError(
            f"q must be [num_tokens, num_heads, head_dim] in float32, float16 or bfloat16, and is {q.dtype} "
            f"of shape {tuple(q.shape)}"
        )
    num_heads, head_dim = q.shape[1:]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_pool(name, cache)
        if cache.shape[3] != head_dim or cache.shape != k_cache.shape:
            raise ValueError(
                f"{name} must be [num_blocks, block_size, num_kv_heads, {head_dim}] like its twin, and has "
                f"shape {tuple(cache.shape)}"
            )
        if cache.dtype not in (q.dtype, *MANTISSA_BITS) or cache.dtype != k_cache.dtype:
            raise ValueError(f"{name} is {cache.dtype}: it must be {q.dtype} as q, or float8, like its twin")
    num_kv_heads = k_cache.shape[2]
    if not num_heads or num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is no multiple of the {num_kv_heads} of k_cache")
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(
            f"out must be {q.dtype} of shape {tuple(q.shape)}, and is {out.dtype} of {tuple(out.shape)}"
        )
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} must have a last stride of 1, and its strides are {tensor.stride()}")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables must be int32 [num_seqs, max_blocks] with a last stride of 1, and is "
            f"{block_tables.dtype} of shape {tuple(block_tables.shape)}, strides {block_tables.stride()}"
        )
    for name in ("alibi", "sinks"):
        check_vector(name, others[name], (num_heads,))
    for name in ("k_scale", "v_scale"):
        check_scale(name, others[name], k_cache)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables, "out": out}
    check_devices({**tensors, **others}, "q")


def check_layout(
    layout: Layout, q: Tensor, k_cache: Tensor, block_tables: Tensor, window: int | None
) -> None:
    """Refuse lengths, or a layout made for others, that do not fit the tensors of `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    if layout.num_tokens != num_tokens:
        raise ValueError(f"cu_seqlens_q ends at {layout.num_tokens}, and q has {num_tokens} tokens")
    if layout.num_seqs != len(block_tables):
        raise ValueError(f"block_tables has {len(block_tables)} rows, and seq_lens {layout.num_seqs}")
    needed = -(-layout.longest // k_cache.shape[1])
    if needed > block_tables.shape[1]:
        raise ValueError(
            f"block_tables has {block_tables.shape[1]} blocks per sequence, and a length of "
            f"{layout.longest} in seq_lens needs {needed}"
        )
    heads = (num_heads, k_cache.shape[2], head_dim)
    if layout.heads != heads or layout.window != window:
        raise ValueError(
            f"layout is for heads of {layout.heads} and a window of {layout.window}, not of {heads} and "
            f"{window}"
        )
