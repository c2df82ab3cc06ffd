"""The attention of a step in PyTorch: keys and values are gathered out of their slots."""

from collections.abc import Iterator

import torch
from torch import Tensor, unflatten
from torch.nn.functional import pad, scaled_dot_product_attention

from cbresearch.attention.step import PagedStep, Read


class LatentCache:
    """The cache object for models with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Such a model hands over the compressed vectors before it expands them to keys and values of every head.
    What it gets back are those of all tokens that the step attends to, in the order of
    `PagedStep.context_slots`, so its attention is called with keys and values of just these.
    """

    def __init__(self, paged: PagedStep) -> None:
        self._paged = paged

    def update(
        self, compressed: Tensor, rotary: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's latents into the pool and return those that it reads.

        Args:
            compressed: `[1, 1, num_tokens, kv_lora_rank]`.
            rotary: `[1, 1, num_tokens, qk_rope_head_dim]`, rotated.
            layer_idx: Index of the layer.

        Raises:
            ValueError: The model hands over something else than latents.
        """
        paged = self._paged
        kv = paged.cache.kv[layer_idx]
        if compressed.shape[1] != 1 or compressed.shape[-1] + rotary.shape[-1] != kv.shape[-1]:
            raise ValueError(
                f"the model caches {list(compressed.shape)} and {list(rotary.shape)} where latents of "
                f"{kv.shape[-1]} elements a token are expected; this version of transformers seems to expand "
                "them before they are cached: take 5.17 or newer"
            )
        paged.store(layer_idx, torch.cat((compressed[0], rotary[0]), dim=-1).transpose(0, 1))
        read = kv.index_select(0, paged.context_slots).transpose(0, 1)[None]
        return read[..., : compressed.shape[-1]], read[..., compressed.shape[-1] :]


def attend_with_torch(
    step: PagedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write a layer's keys and values into the pool and attend; arguments as `attention_function`.

    Raises:
        ValueError: The model has latents that it does not read from its cache, or a window over them.
    """
    read_kv = _gathered if step.cache.latent_dim is None else _expanded
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for read, keys, values in read_kv(step, layer, key, value, window):
        # [num_seqs, num_heads, num_queries, head_dim]
        queries = unflatten(query[0, :, read.begin : read.end], 1, (len(keys), -1)).transpose(0, 1)
        if softcap is None and sinks is None:
            attended = _attend_fused(queries, keys, values, read.mask, scale)
        else:
            attended = _attend_by_scores(queries, keys, values, read.mask, scale, softcap, sinks)
        output[read.begin : read.end] = attended.reshape(*queries.shape[:3], -1).transpose(1, 2).flatten(0, 1)
    return output[None]


def _gathered(
    step: PagedStep, layer: int, key: Tensor, value: Tensor, window: int | None
) -> Iterator[tuple[Read, Tensor, Tensor]]:
    """Write a layer's keys and values, and yield those of each read.

    Their shapes are `[num_seqs, num_kv_heads, num_keys, size]`.
    """
    step.store(layer, torch.cat((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=-1))
    for read in step.reads(window):
        if read.slots is None:
            yield read, key[:, :, read.begin : read.end], value[:, :, read.begin : read.end]
            continue
        kv = unflatten(step.cache.kv[layer].index_select(0, read.slots.view(-1)), 0, read.slots.shape)
        kv = kv.transpose(1, 2)
        yield read, kv[..., : key.shape[3]], kv[..., key.shape[3] :]


def _expanded(
    step: PagedStep, layer: int, key: Tensor, value: Tensor, window: int | None
) -> Iterator[tuple[Read, Tensor, Tensor]]:
    """Yield the keys and values of each read out of those that a model expanded from `LatentCache`."""
    if step.reads(window) is not step.reads(None):
        raise ValueError(
            f"layer {layer} has a sliding window of {window} over latents, which the paged attention does "
            "not apply; take a model without it"
        )
    if key.shape[2] != len(step.context_slots):
        raise ValueError(
            f"layer {layer} attends to {key.shape[2]} keys where its step reads {len(step.context_slots)} "
            "latents: the model does not read its latents from the cache it is given; this version of "
            "transformers cannot be served with it"
        )
    begin = 0
    for read in step.reads(None):
        shape = (1, read.end - read.begin) if read.slots is None else read.slots.shape
        end = begin + shape[0] * shape[1]
        keys, values = (
            unflatten(tensor[0, :, begin:end], 1, shape).transpose(0, 1) for tensor in (key, value)
        )
        yield read, keys, values
        begin = end


def _attend_fused(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return PyTorch's own attention of `[num_seqs, num_heads, num_queries, head_dim]` queries."""
    value_dim, is_single = values.shape[3], queries.shape[2] == 1
    if is_single:
        # The query heads of a KV head become its queries: grouped heads then cost no copies of K and V.
        queries = unflatten(queries[:, :, 0], 1, (keys.shape[1], -1))
    if keys.shape[3] != value_dim:
        # The fused kernels want one size; zeros cost less than the scores of all heads in memory.
        size = max(keys.shape[3], value_dim)
        queries, keys, values = (pad(each, (0, size - each.shape[3])) for each in (queries, keys, values))
    is_causal, is_grouped = mask is None and not is_single, queries.shape[1] != keys.shape[1]
    attended = scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )
    return attended[..., :value_dim]


def _attend_by_scores(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the attention with capped scores (Gemma 2, arXiv 2408.00118, 2) or sinks (gpt-oss).

    Args:
        queries: `[num_seqs, num_heads, num_queries, head_dim]`.
        keys: `[num_seqs, num_kv_heads, num_keys, head_dim]`.
        values: As `keys`; the heads may have another size.
        mask: Sees or not, or what to add to the scores; None as in `Read`.
        scale: Factor on the scores.
        softcap: Bound of the scores.
        sinks: `[num_heads]`: a score for each head that takes weight and gives no value.
    """
    # [num_seqs, num_kv_heads, heads of a KV head, num_queries, head_dim]
    queries = unflatten(queries, 1, (keys.shape[1], -1))
    keys, values = keys[:, :, None], values[:, :, None]
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and queries.shape[3] > 1:
        mask = torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    if mask is not None:
        mask = mask[:, None]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.view(1, *queries.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : keys.shape[-2]].to(values.dtype) @ values
