"""Move keys and values into, within, between and out of paged pools, in Triton.

A pool is `[num_blocks, block_size, num_kv_heads, head_dim]` with any strides but the last, which is 1. Names
in the kernels are as in `paged_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbresearch.kernels import float8
from cbresearch.kernels.checks import check_devices, check_pool, check_scale
from cbresearch.kernels.layout import power_of_two

# Whole elements are moved as integers, so that every bit pattern survives.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _write_one(
    source, cache, scales, i_token, i_slot,
    stride_token, stride_source_head, stride_block, stride_slot, stride_head, stride_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Write the heads of one token into its slot of one pool."""
    o_head = tl.arange(0, TILE_HEADS)
    o_d = tl.arange(0, BLOCK_D)
    m_head = o_head < NUM_HEADS
    m = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
    p_source = (
        source + i_token * stride_token + o_head.to(tl.int64)[:, None] * stride_source_head + o_d[None, :]
    )
    b = tl.load(p_source, mask=m, other=0)
    if MANTISSA:
        b = b.to(tl.float32)
        if scales is not None:
            b = tl.div_rn(b, tl.load(scales + o_head * stride_scale, mask=m_head, other=1.0)[:, None])
        b = float8.encode(b, MANTISSA)
    i_block = i_slot // BLOCK_SIZE
    p_cache = cache + i_block * stride_block + i_slot % BLOCK_SIZE * stride_slot
    tl.store(p_cache + o_head.to(tl.int64)[:, None] * stride_head + o_d[None, :], b, mask=m)


@triton.jit
def _write_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping,
    stride_k_token, stride_k_source_head, stride_v_token, stride_v_source_head,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one token; a program per token."""
    i_token = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(slot_mapping + i_token).to(tl.int64)
    if i_slot >= 0:
        _write_one(
            k, k_cache, k_scale, i_token, i_slot, stride_k_token, stride_k_source_head,
            stride_k_block, stride_k_slot, stride_k_head, stride_scale,
            NUM_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_HEADS, BLOCK_D, MANTISSA,
        )  # fmt: skip
        _write_one(
            v, v_cache, v_scale, i_token, i_slot, stride_v_token, stride_v_source_head,
            stride_v_block, stride_v_slot, stride_v_head, stride_scale,
            NUM_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_HEADS, BLOCK_D, MANTISSA,
        )  # fmt: skip


@triton.jit
def _copy_kernel(
    source, target, block_pairs,
    stride_source_block, stride_source_slot, stride_source_head,
    stride_target_block, stride_target_slot, stride_target_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one slot of one block; a program per pair and slot."""
    i_pair = tl.program_id(0) // BLOCK_SIZE
    i_slot = (tl.program_id(0) % BLOCK_SIZE).to(tl.int64)
    i_source = tl.load(block_pairs + i_pair * 2).to(tl.int64)
    i_target = tl.load(block_pairs + i_pair * 2 + 1).to(tl.int64)
    o_head = tl.arange(0, TILE_HEADS).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m = (o_head < NUM_HEADS)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_source = source + i_source * stride_source_block + i_slot * stride_source_slot
    p_target = target + i_target * stride_target_block + i_slot * stride_target_slot
    b = tl.load(p_source + o_head[:, None] * stride_source_head + o_d[None, :], mask=m, other=0)
    tl.store(p_target + o_head[:, None] * stride_target_head + o_d[None, :], b, mask=m)


@triton.jit
def _gather_kernel(
    cache, out, block_table, scales,
    stride_block, stride_slot, stride_head, stride_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Copy the heads of one position out of its block; a program per position."""
    i_token = tl.program_id(0)
    i_block = tl.load(block_table + i_token // BLOCK_SIZE).to(tl.int64)
    o_head = tl.arange(0, TILE_HEADS)
    o_d = tl.arange(0, BLOCK_D)
    m_head = o_head < NUM_HEADS
    m = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
    p_cache = cache + i_block * stride_block + (i_token % BLOCK_SIZE).to(tl.int64) * stride_slot
    b = tl.load(p_cache + o_head.to(tl.int64)[:, None] * stride_head + o_d[None, :], mask=m, other=0)
    if MANTISSA:
        b = float8.decode(b, MANTISSA).to(tl.float32)
        if scales is not None:
            b = b * tl.load(scales + o_head * stride_scale, mask=m_head, other=1.0)[:, None]
        b = b.to(out.dtype.element_ty)
    p_out = out + i_token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + o_head[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_out, b, mask=m)


def _tiles(cache: Tensor) -> dict[str, int]:
    """Return the shape of a pool as the kernels want it."""
    block_size, num_heads, head_dim = cache.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_HEADS": power_of_two(num_heads),
        "BLOCK_D": power_of_two(head_dim),
    }


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of the elements as integers."""
    return tensor.view(_BITS[tensor.element_size()])


def _stride_of_scale(*scales: Tensor | None) -> int:
    """Return the step from one KV head's scale to the next: 0 where one scale serves all."""
    return int(any(scale is not None and scale.numel() > 1 for scale in scales))


def write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write keys and values into their slots; a float8 cache takes `k / k_scale`, nearest and saturated.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, last stride 1.
        v: As `k`.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides but the last, which is 1.
        v_cache: As `k_cache`.
        slot_mapping: int64 or int32 `[num_tokens]`: block * block_size + place in it; below 0 is skipped.
        k_scale: float32 `[1]` or `[num_kv_heads]`, for a float8 cache.
        v_scale: As `k_scale`.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    mantissa = float8.MANTISSA_BITS.get(k_cache.dtype, 0)
    check_pool("k_cache", k_cache)
    check_pool("v_cache", v_cache)
    if v_cache.dtype != k_cache.dtype or v_cache.shape != k_cache.shape:
        raise ValueError("v_cache must have the dtype and the shape of k_cache")
    for name, new in (("k", k), ("v", v)):
        if new.shape != (len(slot_mapping), *k_cache.shape[2:]) or new.stride(2) != 1:
            raise ValueError(
                f"{name} must be [{len(slot_mapping)}, {k_cache.shape[2]}, {k_cache.shape[3]}] with a last "
                f"stride of 1, and has shape {tuple(new.shape)} and strides {new.stride()}"
            )
        if not mantissa and new.dtype != k_cache.dtype:
            raise ValueError(f"{name} is {new.dtype}, and the cache {k_cache.dtype}")
    if slot_mapping.dtype not in (torch.int32, torch.int64) or not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be contiguous int32 or int64")
    check_scale("k_scale", k_scale, k_cache)
    check_scale("v_scale", v_scale, v_cache)
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    check_devices({**tensors, "k_scale": k_scale, "v_scale": v_scale}, "k")
    if not len(slot_mapping):
        return
    _write_kernel[(len(slot_mapping),)](
        k if mantissa else _bits(k),
        v if mantissa else _bits(v),
        _bits(k_cache),
        _bits(v_cache),
        k_scale,
        v_scale,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        _stride_of_scale(k_scale, v_scale),
        **_tiles(k_cache),
        MANTISSA=mantissa,
    )


def _check_pairs(block_pairs: Tensor, source: Tensor, target: Tensor) -> None:
    if block_pairs.device.type != "cpu" or block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(
            f"block_pairs must be [num_pairs, 2] on the host, and is {tuple(block_pairs.shape)} on "
            f"{block_pairs.device}"
        )
    sources, targets = block_pairs.unbind(1)
    for name, blocks, pool in (("source", sources, source), ("target", targets, target)):
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= len(pool)):
            raise ValueError(f"block_pairs names a {name} block that is not among 0 to {len(pool) - 1}")
    if len(torch.unique(targets)) < len(targets):
        raise ValueError("block_pairs writes one block twice")


def copy_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """Copy whole blocks within a pool.

    Args:
        cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_pairs: Integers `[num_pairs, 2]` on the host: from, to. The copies run side by side, so no block
            may be both read and written.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    sources, targets = block_pairs.unbind(-1)
    if torch.isin(targets, sources).any():
        raise ValueError("block_pairs reads a block that it also writes")
    swap_blocks(cache, cache, block_pairs)


def swap_blocks(source: Tensor, target: Tensor, block_pairs: Tensor) -> None:
    """Copy whole blocks from one pool to another, on the same device or on another one.

    Args:
        source: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        target: As `source`, with blocks of the same shape.
        block_pairs: Integers `[num_pairs, 2]` on the host: block of the source, block of the target.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    check_pool("source", source)
    check_pool("target", target)
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError("source and target must have the same dtype and the same shape of a block")
    _check_pairs(block_pairs, source, target)
    if not len(block_pairs):
        return
    if source.device != target.device:
        sources, targets = block_pairs.long().unbind(1)
        blocks = _bits(source).index_select(0, sources.to(source.device)).to(target.device)
        _bits(target).index_copy_(0, targets.to(target.device), blocks)
        return
    block_size = source.shape[1]
    _copy_kernel[(len(block_pairs) * block_size,)](
        _bits(source),
        _bits(target),
        block_pairs.to(source.device).contiguous(),
        *source.stride()[:3],
        *target.stride()[:3],
        **_tiles(source),
    )


def gather(
    cache: Tensor,
    block_table: Tensor,
    length: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return one sequence's keys or values as a contiguous `[length, num_kv_heads, head_dim]`.

    Args:
        cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_table: int32 `[max_blocks]`: the sequence's blocks, in order.
        length: Tokens.
        scale: float32 `[1]` or `[num_kv_heads]`: what float8 elements are multiplied by.
        dtype: Of the result, for a float8 cache: float32 by default.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    check_pool("cache", cache)
    check_scale("scale", scale, cache)
    mantissa = float8.MANTISSA_BITS.get(cache.dtype, 0)
    if dtype is not None and not mantissa and dtype != cache.dtype:
        raise ValueError(f"dtype is {dtype}, and the cache {cache.dtype}: only float8 is converted")
    if not 0 <= length <= len(block_table) * cache.shape[1]:
        raise ValueError(
            f"length is {length}, and block_table covers 0 to {len(block_table) * cache.shape[1]}"
        )
    if block_table.dtype != torch.int32 or block_table.dim() != 1 or not block_table.is_contiguous():
        raise ValueError("block_table must be contiguous int32 [max_blocks]")
    shape = (length, *cache.shape[2:])
    out = torch.empty(shape, dtype=(dtype or torch.float32) if mantissa else cache.dtype, device=cache.device)
    if length:
        _gather_kernel[(length,)](
            _bits(cache),
            out if mantissa else _bits(out),
            block_table,
            scale,
            *cache.stride()[:3],
            _stride_of_scale(scale),
            **_tiles(cache),
            MANTISSA=mantissa,
        )
    return out
