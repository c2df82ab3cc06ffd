"""Attention over a paged KV cache for a ragged batch of decodes and prefill chunks, in Triton.

In the kernels a prefix says what a name is: `i_` an index, `o_` offsets, `p_` pointers, `b_` a tile, `m_` a
mask. A score becomes a weight by exp2(unit * (score - maximum)): `unit` turns it into log2, of which the
hardware has the exponential, and includes the scale where nothing else was done to the score.
"""
# A kernel's parameters are tensors, strides and constants of the compiler, none of which has a Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbresearch.kernels.checks import FLOATS, check_plan, check_pools, check_tensor
from cbresearch.kernels.work_plan import WorkPlan, plan_work, power_of_two

LOG2_E = tl.constexpr(math.log2(math.e))

TILE_SPLITS = 16


@triton.jit
def tanh(b_z, EXACT: tl.constexpr):
    """Return tanh, finite for any argument; EXACT keeps the relative precision of float32 around 0."""
    # 1 - 2 / (exp(2z) + 1) rather than a quotient of sums, which is NaN where exp overflows.
    b_tanh = 1.0 - 2.0 / (tl.exp2(b_z * (2.0 * LOG2_E)) + 1.0)
    if EXACT:
        # Near 0 that difference loses its digits; the continued fraction of tanh does not.
        b_square = tl.minimum(b_z * b_z, 1.0)
        b_above = b_z * (945.0 + b_square * (105.0 + b_square))
        b_below = 945.0 + b_square * (420.0 + 15.0 * b_square)
        b_tanh = tl.where(tl.abs(b_z) < 0.5, b_above / b_below, b_tanh)
    return b_tanh


@triton.jit
def attend_tile(
    b_q, b_acc, b_sum, b_max, o_begin, begin, end, p_table, p_k, p_v,
    stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
    o_position, scale, unit, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    IS_FAR: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one K/V tile into a running softmax: its accumulator, its sum and its maximum.

    `b_q` is `[TILE_ROWS, BLOCK_D]`, `b_sum` and `b_max` are `[TILE_ROWS]`.
    """
    o_key = o_begin + tl.arange(0, TILE_KEYS)
    m_key = o_key < end
    if window is not None:
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
    # A block's number times its stride passes 2**31 in pools of a few GB.
    if IS_FAR:
        o_slot = o_slot.to(tl.int64)
    o_k = (i_block * stride_k_block + o_slot * stride_k_slot)[:, None]
    o_v = (i_block * stride_v_block + o_slot * stride_v_slot)[:, None]
    m_d = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    # Unwritten slots may hold NaN, which a weight of 0 does not undo: they are never read.
    if MASKED:
        b_k = tl.load(p_k + o_k, mask=m_key[:, None] & m_d, other=0.0)  # [TILE_KEYS, BLOCK_D]
        b_v = tl.load(p_v + o_v, mask=m_key[:, None] & m_d, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        b_k = tl.load(p_k + o_k, mask=m_d, other=0.0)
        b_v = tl.load(p_v + o_v, mask=m_d, other=0.0)
    else:
        b_k = tl.load(p_k + o_k)
        b_v = tl.load(p_v + o_v)
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [TILE_ROWS, TILE_KEYS]
    if softcap is not None:
        b_score = softcap * tanh(b_score * (scale / softcap), b_q.dtype == tl.float32)
    if MASKED:
        m_score = m_key[None, :] & (o_key[None, :] <= o_position[:, None])
        if window is not None:
            m_score = m_score & (o_key[None, :] > o_position[:, None] - window)
        b_score = tl.where(m_score, b_score, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
    # A row that has seen no key keeps a maximum of -inf, and -inf - -inf would be NaN.
    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    if b_q.dtype == tl.float32:
        b_weight = tl.exp2((b_score - b_shift[:, None]) * unit)
    else:
        # One fused operation for each score, at the cost of digits that half precision does not have.
        b_weight = tl.exp2(b_score * unit - (b_shift * unit)[:, None])
    b_decay = tl.exp2((b_max - b_shift) * unit)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_weight.to(b_q.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_sum, b_new_max


@triton.jit
def attend_kernel(
    q, k_cache, v_cache, out, partial_out, partial_lse, items, block_tables, sinks,
    scale, softcap, window,
    stride_q_token, stride_q_head, stride_k_block, stride_k_slot, stride_k_head,
    stride_v_block, stride_v_slot, stride_v_head, stride_out_token, stride_out_head,
    stride_table_seq,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_WIDE: tl.constexpr, IS_FAR: tl.constexpr,
):  # fmt: skip
    """Attend with one query tile of one KV head to one range of keys; a program per item and KV head.

    A tile's rows are the queries of the item times the query heads of the KV head. A partial result is
    normalised; beside it goes the log2 of its softmax's denominator.
    """
    # The heads of an item follow one another, so that the longest items of all heads start first.
    i_kv_head = tl.program_id(0) % NUM_KV_HEADS
    p_item = items + (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64) * 8
    i_seq = tl.load(p_item)
    i_token = tl.load(p_item + 1)
    num_queries = tl.load(p_item + 2)
    position = tl.load(p_item + 3)
    begin = tl.load(p_item + 4)
    end = tl.load(p_item + 5)

    o_row = tl.arange(0, TILE_ROWS)
    o_query = o_row // GROUP
    o_head = i_kv_head * GROUP + o_row % GROUP
    if IS_FAR:
        o_head = o_head.to(tl.int64)
    m_row = o_query < num_queries
    o_position = position + o_query
    o_d = tl.arange(0, BLOCK_D)
    m_q = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    o_token = (i_token + o_query).to(tl.int64)
    o_q = o_token * stride_q_token + o_head * stride_q_head
    b_q = tl.load(q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0)  # [TILE_ROWS, BLOCK_D]

    unit = scale * LOG2_E
    if softcap is not None:
        unit = LOG2_E
    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.full([TILE_ROWS], 0.0, tl.float32)
    if sinks is not None:
        # A sink is one more key, whose value is 0; the first split has it.
        b_sink = tl.load(sinks + o_head, mask=m_row, other=float("-inf"))
        b_max = tl.where(tl.load(p_item + 7) != 0, b_sink * (LOG2_E / unit), float("-inf"))
        b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)
    b_acc = tl.full([TILE_ROWS, BLOCK_D], 0.0, tl.float32)

    p_table = block_tables + i_seq.to(tl.int64) * stride_table_seq
    p_k = k_cache + i_kv_head.to(tl.int64) * stride_k_head + o_d[None, :]
    p_v = v_cache + i_kv_head.to(tl.int64) * stride_v_head + o_d[None, :]
    first = begin
    if window is not None:
        first = begin // TILE_KEYS * TILE_KEYS
    if IS_WIDE and window is None:
        # Up to the first query's position every row sees every key, and masks would be lost time.
        whole = first + tl.maximum(tl.minimum(position + 1, end) - first, 0) // TILE_KEYS * TILE_KEYS
        for o_begin in range(first, whole, TILE_KEYS):
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, o_begin, begin, end, p_table, p_k, p_v,
                stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
                o_position, scale, unit, softcap, window,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, IS_FAR, MASKED=False,
            )  # fmt: skip
        first = whole
    for o_begin in range(first, end, TILE_KEYS):
        b_acc, b_sum, b_max = attend_tile(
            b_q, b_acc, b_sum, b_max, o_begin, begin, end, p_table, p_k, p_v,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
            o_position, scale, unit, softcap, window,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, IS_FAR, MASKED=True,
        )  # fmt: skip

    # A row that saw no key has an accumulator of 0, and stays there.
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_acc = b_acc * (1.0 / b_sum)[:, None]
    i_partial = tl.load(p_item + 6)
    if IS_SPLIT and i_partial >= 0:
        o_partial = (i_partial + o_query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + o_head
        tl.store(partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=m_q)
        tl.store(partial_lse + o_partial, b_max * unit + tl.log2(b_sum), mask=m_row)
    else:
        o_out = o_token * stride_out_token + o_head * stride_out_head
        tl.store(out + o_out[:, None] + o_d[None, :], b_acc.to(out.dtype.element_ty), mask=m_q)


@triton.jit
def merge_kernel(
    out, partial_out, partial_lse, merges, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one token and query head; a program per merge and head."""
    i_head = (tl.program_id(0) % NUM_HEADS).to(tl.int64)
    p_merge = merges + (tl.program_id(0) // NUM_HEADS).to(tl.int64) * 4
    i_token = tl.load(p_merge).to(tl.int64)
    i_first = tl.load(p_merge + 1).to(tl.int64)
    stride = tl.load(p_merge + 2).to(tl.int64)
    num_splits = tl.load(p_merge + 3)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    b_acc = tl.full([BLOCK_D], 0.0, tl.float32)
    sum_weights = 0.0
    top = float("-inf")
    for o_begin in range(0, num_splits, TILE_SPLITS):
        o_split = o_begin + tl.arange(0, TILE_SPLITS)
        m_split = o_split < num_splits
        o_partial = (i_first + o_split * stride) * NUM_HEADS + i_head
        b_lse = tl.load(partial_lse + o_partial, mask=m_split, other=float("-inf"))
        p_part = partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :]
        b_part = tl.load(p_part, mask=m_split[:, None] & m_d[None, :], other=0.0)  # [TILE_SPLITS, BLOCK_D]
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


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, plan: WorkPlan | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from a ragged batch of queries to a paged cache, each query to its sequence up to itself.

    Args:
        q: `[num_tokens, num_heads, head_dim]` in float32, float16 or bfloat16, last stride 1.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` in the dtype of `q`, any strides but the
            last, which is 1.
        v_cache: As `k_cache`.
        block_tables: int32 `[num_seqs, max_blocks]`: each sequence's blocks, in order; only the entries that
            a length covers are read, and they are not checked.
        seq_lens: int32 `[num_seqs]`: tokens of each sequence in the cache, of which the last are the queries.
        cu_seqlens_q: int32 `[num_seqs + 1]`: where each sequence's queries begin in `q`; 1, 40 and 1 queries
            give 0, 1, 41, 42.
        scale: Factor on the scores, above 0; 1 / sqrt(head_dim) by default.
        window: A query at i sees a key at j where i - window < j <= i.
        softcap: Scores s become softcap * tanh(s / softcap).
        sinks: float32 `[num_heads]`: the score of one more key per query, whose value is 0; taken as it is.
        plan: What `plan_work` gives for these lengths and this window, once per step; then `seq_lens` and
            `cu_seqlens_q` are not read, which on a GPU saves a wait.
        out: Where the result goes: the shape and dtype of `q`, last stride 1.

    Returns:
        `[num_tokens, num_heads, head_dim]`; 0 where a query sees no key.

    Raises:
        ValueError: An argument does not fit; it is named.
    """
    check_tensor("q", q, ("num_tokens", "num_heads", "head_dim"), FLOATS, q)
    num_heads, head_dim = q.shape[1:]
    check_pools(k_cache, v_cache, ("num_kv_heads", head_dim), q)
    num_kv_heads = k_cache.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is no multiple of the {num_kv_heads} of k_cache")
    check_tensor("block_tables", block_tables, ("num_seqs", "max_blocks"), (torch.int32,), q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    check_tensor("out", out, tuple(q.shape), (q.dtype,), q)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), (torch.float32,), q)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    for name, number in (("scale", scale), ("softcap", softcap), ("window", window)):
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be above 0, and is {number}")
    if plan is None:
        plan = plan_work(
            seq_lens, cu_seqlens_q, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            dtype=q.dtype, window=window, device=q.device,
        )  # fmt: skip
    check_plan(plan, q, k_cache, block_tables, window)
    partial_lse = torch.empty((plan.num_partials, num_heads), dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_lse.shape, head_dim), dtype=torch.float32, device=q.device)
    block_d = max(16, power_of_two(head_dim))
    # Offsets of heads and slots in 64 bits take registers, of which ordinary layouts have better use.
    extents = [tensor.shape[1] * tensor.stride(1) for tensor in (q, out, k_cache, v_cache)]
    for work in plan.works:
        attend_kernel[(len(work.items) * num_kv_heads,)](
            q, k_cache, v_cache, out, partial_out, partial_lse, work.items, block_tables, sinks,
            scale, softcap, window, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            *out.stride()[:2], block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
            BLOCK_SIZE=k_cache.shape[1], TILE_ROWS=work.launch.tile_rows, TILE_KEYS=work.launch.tile_keys,
            IS_SPLIT=work.is_split, IS_WIDE=work.is_wide, IS_FAR=max(extents) >= 2**31,
            num_warps=work.launch.num_warps, num_stages=work.launch.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    if len(plan.merges):
        merge_kernel[(len(plan.merges) * num_heads,)](
            out, partial_out, partial_lse, plan.merges, *out.stride()[:2],
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, TILE_SPLITS=TILE_SPLITS,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out
