"""The attention function and the cache that transformers' models call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from cbresearch.attention.backend import NativeStep, attend_natively, attend_with_kernels
from cbresearch.attention.layout import PagedStep

ATTENTION_NAME = "cbresearch_paged"

# Arguments by which transformers' models change what is attended to.
_NOT_APPLIED = frozenset({"position_bias", "sinks", "indices", "block_indices"})


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
            layer_idx: Which layer's.

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


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedStep | NativeStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Write the step's keys and values into the pool and attend to what each query may see.

    Args:
        module: The attention layer; its `layer_idx` says which pool.
        query: `[1, num_heads, num_tokens, head_dim]`, rotated.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, rotated. With latent attention, those of all tokens
            that the step reads, as `LatentCache` returned them.
        value: As `key`; its heads may have another size.
        attention_mask: Unused: the step says who sees what.
        scaling: Factor on the scores.
        paged: The step's layout.
        sliding_window: Keys that a query sees at most, its own included; None for what the pool says.
        softcap: Bound c of the scores, c · tanh(score/c).
        s_aux: `[num_heads]`: the score of each head's attention sink, which takes weight and gives no value.
        **others: What else the model asks for.

    Returns:
        `[1, num_tokens, num_heads, value size]` and no weights, as transformers expects.

    Raises:
        ValueError: The model asks for what is not applied here, or was called outside a ModelExecutor.
    """
    if not _NOT_APPLIED.isdisjoint(others):
        for name in sorted(_NOT_APPLIED & set(others)):
            if others[name] is not None:
                raise ValueError(
                    f"{type(module).__name__} asks for {name!r}, which the paged attention does not apply; "
                    "take a model without it"
                )
    if paged is None:
        raise ValueError(
            f"the attention {ATTENTION_NAME!r} runs only inside a ModelExecutor; restore the model's own"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not isinstance(paged, NativeStep) and paged.cache.backend == "native":
        paged = paged.native
    if isinstance(paged, NativeStep):
        window = sliding_window if sliding_window is not None else paged.windows[layer]
        attended = attend_natively(
            paged, layer, query, key, value, scale=scaling, window=window, softcap=softcap, sinks=s_aux
        )
        return attended, None
    cache = paged.cache
    window = sliding_window if sliding_window is not None else cache.windows[layer]
    if cache.backend == "triton":
        attended = attend_with_kernels(
            paged, layer, query, key, value, scale=scaling, window=window, softcap=softcap, sinks=s_aux
        )
        return attended, None
    layout = paged.layout(window)
    num_heads, num_tokens, head_dim = query.shape[1:]
    num_kv_heads, value_dim = key.shape[1], value.shape[-1]
    kv = cache.kv[layer]
    read = 0
    if cache.latent_dim is None:
        paged.store(layer, torch.cat((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=-1))
    elif layout is not paged.layout(None):
        raise ValueError(
            f"{type(module).__name__} has a sliding window over latents, which the paged attention does not "
            "apply; take a model without it"
        )
    elif key.shape[2] != len(paged.context_slots):
        raise ValueError(
            f"{type(module).__name__} does not read its latents from the cache it is given; this version of "
            "transformers cannot be served with it"
        )
    output = query.new_empty(num_tokens, num_heads, value_dim)
    by_token = query[0].transpose(0, 1)
    for rows in layout.rows:
        num_seqs, context = rows.slots.shape
        if cache.latent_dim is None:
            gathered = kv.index_select(0, rows.slots.view(-1)).view(num_seqs, context, num_kv_heads, -1)
            gathered = gathered.transpose(1, 2)
            keys, values = gathered[..., :head_dim], gathered[..., head_dim:]
        else:
            span = slice(read, read + num_seqs * context)
            keys, values = (
                every[0, :, span].unflatten(1, (num_seqs, context)).transpose(0, 1) for every in (key, value)
            )
            read = span.stop
        # The query heads of a KV head become its queries: grouped heads then cost no copies of K and V.
        queries = by_token[rows.begin : rows.end].reshape(num_seqs, num_kv_heads, -1, head_dim)
        if softcap is None and s_aux is None:
            attended = _attend(queries, keys, values, rows.mask, scaling)
        else:
            mask = None if rows.mask is None else rows.mask[:, None]
            attended = _attend_by_scores(
                queries[..., None, :], keys[:, :, None], values[:, :, None], mask, scaling, softcap, s_aux
            )
        output[rows.begin : rows.end] = attended.reshape(num_seqs, num_heads, value_dim)
    for chunk in layout.chunks:
        span = slice(chunk.begin, chunk.end)
        if cache.latent_dim is not None:
            num_keys = chunk.end - chunk.begin if chunk.slots is None else len(chunk.slots)
            keys, values = key[:, :, read : read + num_keys], value[:, :, read : read + num_keys]
            read += num_keys
        elif chunk.slots is None:
            keys, values = key[:, :, span], value[:, :, span]
        else:
            gathered = kv.index_select(0, chunk.slots).transpose(0, 1)[None]
            keys, values = gathered[..., :head_dim], gathered[..., head_dim:]
        if softcap is None and s_aux is None:
            attended = _attend(query[:, :, span], keys, values, chunk.mask, scaling, is_chunk=True)
        else:
            attended = _attend_by_scores(
                query[:, :, span].unflatten(1, (num_kv_heads, -1)),
                keys[:, :, None],
                values[:, :, None],
                chunk.mask if chunk.mask is not None else _causal(keys),
                scaling,
                softcap,
                s_aux,
            ).flatten(1, 2)
        output[span] = attended[0].transpose(0, 1)
    return output[None], None


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_chunk: bool = False,
) -> Tensor:
    """Return the attention of `[num_seqs, num_heads, num_queries, head_dim]` queries.

    Args:
        queries: The queries.
        keys: `[num_seqs, num_kv_heads, num_keys, head_dim]`.
        values: As `keys`; the heads may have another size.
        mask: Sees or not, or what to add to the scores.
        scaling: Factor on the scores.
        is_chunk: Whether there are more query heads than KV heads, and no mask means a causal one.
    """
    settings = {
        "attn_mask": mask,
        "is_causal": is_chunk and mask is None,
        "enable_gqa": is_chunk and queries.shape[1] != keys.shape[1],
    }
    head_dim, value_dim = keys.shape[-1], values.shape[-1]
    if head_dim == value_dim:
        return scaled_dot_product_attention(queries, keys, values, scale=scaling, **settings)
    # The fused kernels want one size; zeros cost less than the scores of all heads in memory.
    size = max(head_dim, value_dim)
    queries, keys = pad(queries, (0, size - head_dim)), pad(keys, (0, size - head_dim))
    values = pad(values, (0, size - value_dim))
    attended = scaled_dot_product_attention(
        queries, keys, values, scale=scaling or head_dim**-0.5, **settings
    )
    return attended[..., :value_dim]


def _attend_by_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention with capped scores (Gemma 2, arXiv 2408.00118, 2) or sinks (gpt-oss).

    Args:
        queries: `[num_seqs, num_kv_heads, heads of a KV head, num_queries, head_dim]`.
        keys: `[num_seqs, num_kv_heads, 1, num_keys, head_dim]`.
        values: As `keys`; the heads may have another size.
        mask: Sees or not, or what to add to the scores.
        scaling: Factor on the scores.
        softcap: Bound of the scores.
        sinks: `[num_heads]`: a score for each head that takes weight and gives no value.
    """
    scores = queries @ keys.transpose(-1, -2) * (scaling or keys.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.view(1, *queries.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : keys.shape[-2]].to(values.dtype) @ values


def _causal(keys: Tensor) -> Tensor:
    num_keys = keys.shape[-2]
    return torch.ones(num_keys, num_keys, dtype=torch.bool, device=keys.device).tril_()


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@contextmanager
def paged_model(model: PreTrainedModel) -> Iterator[None]:
    """Let a model use `paged_attention` inside the context, and leave it as it was found."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
