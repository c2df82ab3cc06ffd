"""The bridge into transformers: a paged KV cache, and an attention function that writes and reads it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from cbresearch.config import CacheConfig, ModelShape

ATTENTION_NAME = "cbresearch_paged"

# Arguments by which transformers' models change the scores.
_NOT_APPLIED = ("softcap", "s_aux")

# A group of sequences costs this much more than its tokens, in elements of K gathered: the calls it takes.
_GROUP_OVERHEAD_ELEMENTS = 32_768


class PagedCache:
    """Hold the keys and values of all layers in blocks.

    `kv[layer]` is `[num_blocks * block_size, 2, num_kv_heads, head_dim]`: a slot holds one token's key and
    value side by side, so that one gather brings both.

    Args:
        shape: The model's layers, KV heads and head size.
        config: Blocks in the pool and tokens per block.
        dtype: Element type.
        device: Where the pool lies.
        fill: Value to fill the pool with; None leaves it uninitialised, since nothing is read unwritten.

    Raises:
        ValueError: The device has no room for the pool.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: CacheConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fill: float | None = None,
    ) -> None:
        self.config = config
        size = (config.num_tokens, 2, shape.num_kv_heads, shape.head_dim)
        try:
            self.kv = [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        except RuntimeError as error:
            num_bytes = shape.num_layers * math.prod(size) * dtype.itemsize
            raise ValueError(
                f"a pool of {config.num_blocks} blocks of {config.block_size} tokens needs {num_bytes:,} "
                f"bytes, which {device} does not have; lower num_blocks"
            ) from error
        if fill is not None:
            for layer in self.kv:
                layer.fill_(fill)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the pool occupies."""
        return sum(layer.numel() * layer.element_size() for layer in self.kv)

    def block_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as `[num_blocks, block_size, num_kv_heads, head_dim]` views."""
        blocks = self.kv[layer].unflatten(0, (self.config.num_blocks, self.config.block_size))
        return blocks[:, :, 0], blocks[:, :, 1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sequences with one query each, attended in one call.

    `slots` is `[num_seqs, max_context]` into the pool; places behind a sequence's end repeat a slot of
    its own and are masked, so that no unwritten slot is ever read.
    """

    begin: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with several queries; `slots` is None where its whole context is computed in this step."""

    begin: int
    end: int
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where one flat `[1, num_tokens]` forward writes its keys and values, and what each query reads.

    Attributes:
        cache: The pool.
        positions: int64 `[num_tokens]`: the position of each token in its sequence, on the host.
        slot_mapping: int64 `[num_tokens]`: the slot of each token.
        max_context: Tokens of the longest context.
        rows: Groups of single-query sequences.
        chunks: Sequences with more queries.
    """

    cache: PagedCache
    positions: np.ndarray
    slot_mapping: Tensor
    max_context: int
    rows: tuple[_Rows, ...]
    chunks: tuple[_Chunk, ...]

    @classmethod
    def build(
        cls, cache: PagedCache, block_tables: np.ndarray, starts: np.ndarray, num_tokens: np.ndarray
    ) -> "PagedStep":
        """Lay out a step.

        Args:
            cache: The pool.
            block_tables: int64 `[num_seqs, max_blocks]`; only the entries that a context covers are read.
            starts: int64 `[num_seqs]`: tokens of each sequence already in the cache.
            num_tokens: int64 `[num_seqs]`: queries of each sequence. Sequences with one query come first,
                in descending order of `starts` (see `batch_order`).
        """
        kv = cache.kv[0]
        block_size = cache.config.block_size
        contexts = starts + num_tokens
        num_single = int(np.count_nonzero(num_tokens == 1))

        def slots_of(sequence: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
            block, offset = np.divmod(positions, block_size)
            return block_tables[sequence, block] * block_size + offset

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(kv.device)

        sequences = np.repeat(np.arange(len(starts)), num_tokens)
        ends = np.cumsum(num_tokens)
        positions = np.arange(ends[-1]) - np.repeat(ends - contexts, num_tokens)
        rows = []
        begin = 0
        row_elements = kv.shape[2] * kv.shape[3]
        for end in _split(contexts[:num_single], _GROUP_OVERHEAD_ELEMENTS // row_elements):
            lengths = contexts[begin:end, None]
            places = np.arange(lengths[0, 0])[None]
            slots = slots_of(np.arange(begin, end)[:, None], np.minimum(places, lengths - 1))
            mask = None
            if lengths[-1, 0] < lengths[0, 0]:
                mask = torch.zeros(slots.shape, dtype=kv.dtype, device=kv.device)
                mask = mask.masked_fill_(to_device(places >= lengths), -torch.inf)[:, None, None]
            rows.append(_Rows(begin, end, to_device(slots), mask))
            begin = end
        chunks = []
        for sequence in range(num_single, len(starts)):
            end = int(ends[sequence])
            slots = mask = None
            if starts[sequence]:
                context, queries = int(contexts[sequence]), int(num_tokens[sequence])
                slots = to_device(slots_of(sequence, np.arange(context)))
                mask = torch.ones(queries, context, dtype=torch.bool, device=kv.device)
                mask = mask.tril_(context - queries)
            chunks.append(_Chunk(end - int(num_tokens[sequence]), end, slots, mask))
        slot_mapping = to_device(slots_of(sequences, positions))
        return cls(cache, positions, slot_mapping, int(contexts.max()), tuple(rows), tuple(chunks))


def batch_order(starts: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return the order that `PagedStep.build` wants: single queries first, long contexts before short."""
    return np.lexsort((-starts, num_tokens > 1))


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedStep | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Write the step's keys and values into the pool and attend to what each query may see.

    Args:
        module: The attention layer; its `layer_idx` says which pool.
        query: `[1, num_heads, num_tokens, head_dim]`, rotated.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, rotated.
        value: As `key`.
        attention_mask: Unused: the step says who sees what.
        scaling: Factor on the scores.
        paged: The step's layout.
        sliding_window: Keys that a query sees at most; harmless as long as no context is longer.
        **others: What else the model asks for; what would change the scores has to be None.

    Returns:
        `[1, num_tokens, num_heads, head_dim]` and no weights, as transformers expects.

    Raises:
        ValueError: The model needs a soft cap, attention sinks or a sliding window, which are not applied
            here, or it was called outside a ModelExecutor.
    """
    for name in _NOT_APPLIED:
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which the paged attention does not apply; "
                "take a model without it"
            )
    if sliding_window is not None and paged is not None and paged.max_context > sliding_window:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens, which the paged "
            f"attention does not apply, and a context is {paged.max_context} long"
        )
    if paged is None:
        raise ValueError(
            f"the attention {ATTENTION_NAME!r} runs only inside a ModelExecutor; restore the model's own"
        )
    kv = paged.cache.kv[module.layer_idx]  # type: ignore[index]
    num_heads, num_tokens, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), dim=1)
    kv.index_copy_(0, paged.slot_mapping, new)
    output = query.new_empty(num_tokens, num_heads, head_dim)
    by_token = query[0].transpose(0, 1)
    for rows in paged.rows:
        num_seqs, context = rows.slots.shape
        gathered = kv.index_select(0, rows.slots.view(-1)).view(num_seqs, context, 2, num_kv_heads, head_dim)
        keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
        # The query heads of a KV head become its queries: grouped heads then cost no copies of K and V.
        queries = by_token[rows.begin : rows.end].reshape(num_seqs, num_kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=rows.mask, scale=scaling)
        output[rows.begin : rows.end] = attended.reshape(num_seqs, num_heads, head_dim)
    for chunk in paged.chunks:
        span = slice(chunk.begin, chunk.end)
        if chunk.slots is None:
            keys, values = key[:, :, span], value[:, :, span]
        else:
            gathered = kv.index_select(0, chunk.slots)
            keys, values = gathered[:, 0].transpose(0, 1)[None], gathered[:, 1].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            query[:, :, span],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
            enable_gqa=num_heads != num_kv_heads,
        )
        output[span] = attended[0].transpose(0, 1)
    return output[None], None


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


def _split(contexts: np.ndarray, overhead: float) -> Sequence[int]:
    """Return the ends of the groups into which descending context lengths are cut.

    A group is padded to its longest. It is cut where that saves the most padding, as long as the saving
    outweighs the overhead of one more group.
    """
    num = len(contexts)
    if not num:
        return []
    savings = (contexts[0] - contexts) * (num - np.arange(num))
    cut = int(savings.argmax())
    if savings[cut] <= overhead:
        return [num]
    return [*_split(contexts[:cut], overhead), *(cut + end for end in _split(contexts[cut:], overhead))]
