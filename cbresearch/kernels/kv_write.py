"""Write keys and values into a paged pool, in Triton. Names in the kernel are as in `attend`."""
# A kernel's parameters are tensors, strides and constants of the compiler, none of which has a Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from cbresearch.kernels.checks import FLOATS, check_pools, check_tensor
from cbresearch.kernels.work_plan import power_of_two


@triton.jit
def write_kernel(
    k, v, k_cache, v_cache, slot_mapping,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_k_cache_block, stride_k_cache_slot, stride_k_cache_head,
    stride_v_cache_block, stride_v_cache_slot, stride_v_cache_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one token into its slot; a program per token."""
    i_token = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(slot_mapping + i_token).to(tl.int64)
    if i_slot >= 0:
        i_block = i_slot // BLOCK_SIZE
        i_place = i_slot % BLOCK_SIZE
        o_head = tl.arange(0, TILE_HEADS).to(tl.int64)[:, None]
        o_d = tl.arange(0, BLOCK_D)[None, :]
        m = (o_head < NUM_HEADS) & (o_d < HEAD_DIM)
        b_k = tl.load(k + i_token * stride_k_token + o_head * stride_k_head + o_d, mask=m)
        b_v = tl.load(v + i_token * stride_v_token + o_head * stride_v_head + o_d, mask=m)
        p_k = k_cache + i_block * stride_k_cache_block + i_place * stride_k_cache_slot
        p_v = v_cache + i_block * stride_v_cache_block + i_place * stride_v_cache_slot
        tl.store(p_k + o_head * stride_k_cache_head + o_d, b_k, mask=m)
        tl.store(p_v + o_head * stride_v_cache_head + o_d, b_v, mask=m)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values into their slots.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]` in float32, float16 or bfloat16, last stride 1.
        v: As `k`.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` in the dtype of `k`, any strides but the
            last, which is 1.
        v_cache: As `k_cache`.
        slot_mapping: int64 or int32 `[num_tokens]`: block * block_size + place in it; below 0 is skipped.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    check_tensor("k", k, (len(slot_mapping), "num_kv_heads", "head_dim"), FLOATS, k)
    check_tensor("v", v, tuple(k.shape), (k.dtype,), k)
    check_pools(k_cache, v_cache, (k.shape[1], k.shape[2]), k)
    check_tensor("slot_mapping", slot_mapping, (len(k),), (torch.int64, torch.int32), k)
    block_size, num_heads, head_dim = k_cache.shape[1:]
    if len(k):
        write_kernel[(len(k),)](
            k, v, k_cache, v_cache, slot_mapping,
            *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
            TILE_HEADS=power_of_two(num_heads), BLOCK_D=power_of_two(head_dim),
        )  # fmt: skip
