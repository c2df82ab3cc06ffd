"""Attention over a paged KV cache for a ragged batch of decodes and prefill chunks, in Triton.

In the kernels a prefix says what a name is: `i_` an index, `o_` offsets, `p_` pointers, `b_` a tile, `m_` a mask.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbresearch.kernels.layout import ITEM_FIELDS, MERGE_FIELDS, Layout, Work, lay_out, power_of_two

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _tanh(b_z):
    """Return tanh, finite for any argument and in float32 as exact as the argument."""
    # 1 - 2 / (exp(2z) + 1) rather than a quotient of sums, which is NaN where exp overflows.
    b_far = 1.0 - 2.0 / (tl.exp2(b_z * (2.0 * LOG2_E)) + 1.0)
    # Around 0 that difference loses its digits; the continued fraction of tanh does not.
    b_square = tl.minimum(b_z * b_z, 1.0)
    b_near = b_z * (945.0 + b_square * (105.0 + b_square)) / (945.0 + b_square * (420.0 + 15.0 * b_square))
    return tl.where(tl.abs(b_z) < 0.5, b_near, b_far)


@triton.jit
def _attend_tile(
    b_q,
    b_acc,
    b_sum,
    b_max,
    o_begin,
    begin,
    end,
    p_table,
    p_k,
    p_v,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    o_position,
    b_slope,
    factor,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold one K/V tile into a running softmax: accumulator, sum and maximum of the scores (log2 units)."""
    o_key = o_begin + tl.arange(0, TILE_KEYS)  # [TILE_KEYS]
    m_key = o_key < end
    if HAS_WINDOW:
        m_key = m_key & (o_key >= begin)
    if BLOCK_SIZE % TILE_KEYS == 0:
        # Tiles begin at multiples of their size, so this one lies in a single block.
        i_block = tl.load(p_table + o_begin // BLOCK_SIZE).to(tl.int64)
        o_slot = o_begin % BLOCK_SIZE + tl.arange(0, TILE_KEYS)
    elif MASKED:
        i_block = tl.load(p_table + o_key // BLOCK_SIZE, mask=m_key, other=0).to(tl.int64)
        o_slot = o_key % BLOCK_SIZE
    else:
        i_block = tl.load(p_table + o_key // BLOCK_SIZE).to(tl.int64)
        o_slot = o_key % BLOCK_SIZE
    o_k = i_block * stride_k_block + o_slot * stride_k_slot
    o_v = i_block * stride_v_block + o_slot * stride_v_slot
    m_d = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    # Unwritten slots may hold NaN, and a weight of 0 does not undo that: they are never read.
    if MASKED:
        m_kv = m_key[:, None] & m_d
        b_k = tl.load(p_k + o_k[:, None], mask=m_kv, other=0.0)  # [TILE_KEYS, BLOCK_D]
        b_v = tl.load(p_v + o_v[:, None], mask=m_kv, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        b_k = tl.load(p_k + o_k[:, None], mask=m_d, other=0.0)
        b_v = tl.load(p_v + o_v[:, None], mask=m_d, other=0.0)
    else:
        b_k = tl.load(p_k + o_k[:, None])
        b_v = tl.load(p_v + o_v[:, None])
    b_score = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")  # [TILE_ROWS, TILE_KEYS]
    if HAS_SOFTCAP:
        b_score = softcap * _tanh(b_score * factor)
    elif HAS_ALIBI:
        b_score = b_score * factor
    if HAS_ALIBI:
        b_score += b_slope[:, None] * (o_key[None, :] - o_position[:, None])
    if MASKED:
        m_score = m_key[None, :] & (o_key[None, :] <= o_position[:, None])
        if HAS_WINDOW:
            m_score = m_score & (o_key[None, :] > o_position[:, None] - window)
        b_score = tl.where(m_score, b_score, float("-inf"))
    if HAS_SOFTCAP or HAS_ALIBI:
        to_log2 = 1.0
    else:
        to_log2 = factor
    b_new_max = tl.maximum(b_max, tl.max(b_score, 1) * to_log2)
    # A row that has seen no key yet keeps a maximum of -inf, and -inf - -inf would be NaN.
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_score * to_log2 - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_weight.to(b_q.dtype), b_v.to(b_q.dtype), b_acc, input_precision="ieee")
    return b_acc, b_sum, b_new_max


@triton.jit
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,
    partial_lse,
    items,
    block_tables,
    alibi,
    sinks,
    k_scale,
    v_scale,
    factor,
    softcap,
    window,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    stride_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Attend with one query tile of one KV head to one range of keys; a program per item and KV head.

    The tile's rows are the queries of the item times the query heads of the KV head. A partial result is
    normalised; with it goes the log2 of its softmax's denominator.
    """
    # Heads of an item run next to each other, so that the longest items start first.
    i_kv_head = tl.program_id(0) % NUM_KV_HEADS
    p_item = items + tl.program_id(0) // NUM_KV_HEADS * 8
    i_seq = tl.load(p_item)
    i_token = tl.load(p_item + 1)
    num_queries = tl.load(p_item + 2)
    position = tl.load(p_item + 3)
    begin = tl.load(p_item + 4)
    end = tl.load(p_item + 5)

    o_row = tl.arange(0, TILE_ROWS)
    o_query = o_row // GROUP
    o_head = i_kv_head * GROUP + o_row % GROUP
    m_row = o_query < num_queries
    o_position = position + o_query
    o_d = tl.arange(0, BLOCK_D)
    m_q = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    o_token = (i_token + o_query).to(tl.int64)
    o_q = o_token * stride_q_token + o_head * stride_q_head
    b_q = tl.load(q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0)  # [TILE_ROWS, BLOCK_D]

    if HAS_SCALES:
        factor *= tl.load(k_scale + i_kv_head * stride_scale)
    b_slope = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_ALIBI:
        b_slope = tl.load(alibi + o_head, mask=m_row, other=0.0) * LOG2_E
    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        # A sink is a key of value 0; the first split carries it.
        b_sink = tl.load(sinks + o_head, mask=m_row, other=float("-inf")) * LOG2_E
        is_first = tl.load(p_item + 7) != 0
        b_max = tl.where(is_first, b_sink, float("-inf"))
        b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)
    b_acc = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)

    p_table = block_tables + i_seq.to(tl.int64) * stride_table
    p_k = k_cache + i_kv_head.to(tl.int64) * stride_k_head + o_d[None, :]
    p_v = v_cache + i_kv_head.to(tl.int64) * stride_v_head + o_d[None, :]
    first = begin
    if HAS_WINDOW:
        first = begin // TILE_KEYS * TILE_KEYS
    if IS_WIDE and not HAS_WINDOW:
        # Up to the first query's position every row sees every key: no masks.
        whole = first + tl.maximum(tl.minimum(position + 1, end) - first, 0) // TILE_KEYS * TILE_KEYS
        for o_begin in range(first, whole, TILE_KEYS):
            b_acc, b_sum, b_max = _attend_tile(
                b_q, b_acc, b_sum, b_max, o_begin, begin, end, p_table, p_k, p_v,
                stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
                o_position, b_slope, factor, softcap, window,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, False,
            )  # fmt: skip
        first = whole
    for o_begin in range(first, end, TILE_KEYS):
        b_acc, b_sum, b_max = _attend_tile(
            b_q, b_acc, b_sum, b_max, o_begin, begin, end, p_table, p_k, p_v,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
            o_position, b_slope, factor, softcap, window,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, True,
        )  # fmt: skip

    # A row that saw no key has an accumulator of 0, and stays at 0.
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_inverse = 1.0 / b_sum
    if HAS_SCALES:
        b_inverse *= tl.load(v_scale + i_kv_head * stride_scale)
    b_acc = b_acc * b_inverse[:, None]
    i_partial = tl.load(p_item + 6)
    if IS_SPLIT and i_partial >= 0:
        o_partial = (i_partial + o_query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + o_head
        tl.store(partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=m_q)
        tl.store(partial_lse + o_partial, b_max + tl.log2(b_sum), mask=m_row)
    else:
        o_out = o_token * stride_out_token + o_head * stride_out_head
        tl.store(out + o_out[:, None] + o_d[None, :], b_acc.to(out.dtype.element_ty), mask=m_q)


@triton.jit
def _merge_kernel(
    out,
    partial_out,
    partial_lse,
    merges,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):
    """Merge the partial results of one token and query head; a program per row of `merges` and head."""
    i_head = tl.program_id(0) % NUM_HEADS
    p_merge = merges + tl.program_id(0) // NUM_HEADS * 4
    i_token = tl.load(p_merge).to(tl.int64)
    i_first = tl.load(p_merge + 1).to(tl.int64)
    stride = tl.load(p_merge + 2)
    num_splits = tl.load(p_merge + 3)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    sum_weights = 0.0
    top = float("-inf")
    for i_begin in range(0, num_splits, TILE_SPLITS):
        o_split = i_begin + tl.arange(0, TILE_SPLITS)
        m_split = o_split < num_splits
        o_partial = (i_first + o_split * stride) * NUM_HEADS + i_head
        b_lse = tl.load(partial_lse + o_partial, mask=m_split, other=float("-inf"))
        b_part = tl.load(
            partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :],
            mask=m_split[:, None] & m_d[None, :],
            other=0.0,
        )  # [TILE_SPLITS, BLOCK_D]
        new_top = tl.maximum(top, tl.max(b_lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_weight = tl.exp2(b_lse - shift)
        decay = tl.exp2(top - shift)
        sum_weights = sum_weights * decay + tl.sum(b_weight, 0)
        b_acc = b_acc * decay + tl.sum(b_weight[:, None] * b_part, 0)
        top = new_top
    b_acc = b_acc / tl.where(sum_weights == 0.0, 1.0, sum_weights)
    p_out = out + i_token * stride_out_token + i_head * stride_out_head + o_d
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_d)


def attend_arguments(
    work: Work,
    layout: Layout,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    softcap: float | None,
    alibi: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments of one launch of the attention kernel by name, launch options included."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    launch = work.launch
    return {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "out": out,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "items": work.items,
        "block_tables": block_tables,
        "alibi": alibi,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "factor": scale / softcap if softcap else scale * LOG2_E.value,
        "softcap": softcap * LOG2_E.value if softcap else 0.0,
        "window": layout.window or 0,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_block": k_cache.stride(0),
        "stride_k_slot": k_cache.stride(1),
        "stride_k_head": k_cache.stride(2),
        "stride_v_block": v_cache.stride(0),
        "stride_v_slot": v_cache.stride(1),
        "stride_v_head": v_cache.stride(2),
        "stride_out_token": out.stride(0),
        "stride_out_head": out.stride(1),
        "stride_table": block_tables.stride(0),
        "stride_scale": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, power_of_two(head_dim)),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": launch.tile_rows,
        "TILE_KEYS": launch.tile_keys,
        "HAS_WINDOW": layout.window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_ALIBI": alibi is not None,
        "HAS_SINKS": sinks is not None,
        "HAS_SCALES": k_scale is not None,
        "IS_SPLIT": work.is_split,
        "IS_WIDE": work.is_wide,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to a paged KV cache."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    if layout is None:
        layout = lay_out(
            seq_lens,
            cu_seqlens_q,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            itemsize=k_cache.element_size(),
            window=window,
            device=q.device,
        )
    if out is None:
        out = torch.empty_like(q)
    scale = head_dim**-0.5 if scale is None else scale
    partial_out = torch.empty((layout.num_partials, num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((layout.num_partials, num_heads), dtype=torch.float32, device=q.device)
    for work in layout.works:
        arguments = attend_arguments(
            work,
            layout,
            q,
            k_cache,
            v_cache,
            out,
            partial_out,
            partial_lse,
            block_tables,
            scale=scale,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        _attend_kernel[(len(work.items) * num_kv_heads,)](**arguments)
    if len(layout.merges):
        _merge_kernel[(len(layout.merges) * num_heads,)](
            out,
            partial_out,
            partial_lse,
            layout.merges,
            *out.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, power_of_two(head_dim)),
            TILE_SPLITS=16,
        )
    return out
