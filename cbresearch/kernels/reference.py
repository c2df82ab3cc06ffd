"""The oracle of the kernels: attention over a paged cache in plain PyTorch, one sequence at a time."""

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *,
    scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Compute what the kernel `paged_attention` computes, with every step in `dtype`.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v_cache: As `k_cache`.
        block_tables: `[num_seqs, max_blocks]`.
        seq_lens: `[num_seqs]`: tokens of each sequence; the last of them are the queries.
        cu_seqlens_q: `[num_seqs + 1]`: where each sequence's queries begin.
        scale: Factor on the scores; 1 / sqrt(head_dim) by default.
        window: A query at i sees a key at j where i - window < j <= i.
        softcap: Scores s become softcap * tanh(s / softcap).
        sinks: `[num_heads]`: the score of one more key, whose value is 0.
        dtype: Precision of every step.

    Returns:
        `[num_tokens, num_heads, head_dim]` in `dtype`; 0 where a query sees no key.
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    output = torch.zeros(q.shape, dtype=dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for i_seq, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[i_seq], bounds[i_seq + 1]
        if length == 0 or begin == end:
            continue
        j = torch.arange(length, device=q.device)
        places = block_tables[i_seq].long()[j // block_size], j % block_size
        keys, values = k_cache[places].to(dtype), v_cache[places].to(dtype)
        # The query heads of a KV head are rows of one matrix: [num_kv_heads, queries, group, head_dim].
        queries = q[begin:end].to(dtype).view(end - begin, num_kv_heads, -1, head_dim).transpose(0, 1)
        scores = (queries.flatten(1, 2) @ keys.permute(1, 2, 0) * scale).view(*queries.shape[:3], length)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(length - (end - begin), length, device=q.device)[:, None, None]
        seen = j <= i
        if window is not None:
            seen = seen & (j > i - window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.to(dtype).view(num_kv_heads, 1, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), dim=3)
        weights = scores.softmax(dim=3)[..., :length].masked_fill(~seen, 0)
        attended = (weights.flatten(1, 2) @ values.transpose(0, 1)).view(queries.shape)
        output[begin:end] = attended.transpose(0, 1).flatten(1, 2)
    return output
