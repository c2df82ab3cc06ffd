"""Where a step writes its keys and values, and which slots each of its queries reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbresearch.attention.backend import KernelInputs, NativeStep
from cbresearch.attention.pool import PagedCache

# A group of sequences costs this much more than its tokens, in elements of K gathered: the calls it takes.
_GROUP_OVERHEAD_ELEMENTS = 32_768

# A chunk longer than its window is attended in pieces of at least so many queries.
_LEAST_PIECE = 128


class Rows(NamedTuple):
    """Sequences with one query each, attended in one call.

    Attributes:
        begin: Where the queries begin in the step.
        end: Where they end.
        slots: int64 `[num_seqs, most keys]` into the pool. Places behind a sequence's end repeat a slot of
            its own and are masked, so that no unwritten slot is ever read.
        mask: `[num_seqs, 1, 1, most keys]` to add to the scores, or None.
    """

    begin: int
    end: int
    slots: Tensor
    mask: Tensor | None


class Chunk(NamedTuple):
    """Several queries of one sequence.

    Attributes:
        begin: Where the queries begin in the step.
        end: Where they end.
        slots: int64 `[num_keys]` into the pool; None where the queries' own keys are all that they see.
        mask: bool `[num_queries, num_keys]`, True where a query sees a key; None for a causal one.
    """

    begin: int
    end: int
    slots: Tensor | None
    mask: Tensor | None


class Layout(NamedTuple):
    """What the queries of a step read in layers of one window."""

    rows: tuple[Rows, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class PagedStep:
    """One flat `[1, num_tokens]` forward.

    Attributes:
        cache: The pool.
        block_tables: int64 `[num_seqs, max_blocks]`.
        starts: int64 `[num_seqs]`: tokens of each sequence already in the cache.
        num_tokens: int64 `[num_seqs]`: queries of each sequence.
        positions: int64 `[num_tokens]`: the position of each token in its sequence, on the host.
        slot_mapping: int64 `[num_tokens]`: the slot of each token.
        max_context: Tokens of the longest context.
        stored: int64: which of the step's tokens are written, in the order of `stored_slots`; None for all.
        stored_slots: int64: their slots.
        is_stored: bool `[num_seqs]`: whose tokens are written; None for all.
    """

    cache: PagedCache
    block_tables: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    positions: np.ndarray
    slot_mapping: Tensor
    max_context: int
    stored: Tensor | None
    stored_slots: Tensor
    is_stored: np.ndarray | None = None
    _layouts: dict[int | None, Layout] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        cache: PagedCache,
        block_tables: np.ndarray,
        starts: np.ndarray,
        num_tokens: np.ndarray,
        is_stored: np.ndarray | None = None,
    ) -> "PagedStep":
        """Lay out a step.

        Args:
            cache: The pool.
            block_tables: int64 `[num_seqs, max_blocks]`; only the entries of blocks that are written, or that
                hold a key inside a layer's window, are read.
            starts: int64 `[num_seqs]`: tokens of each sequence already in the cache.
            num_tokens: int64 `[num_seqs]`: queries of each sequence. Sequences with one query come first,
                in descending order of `starts` (see `batch_order`).
            is_stored: bool `[num_seqs]`: whether the tokens' keys and values are written; those of a row that
                is computed over again are there already, in blocks that others may share by now. None where
                all are.
        """
        contexts = starts + num_tokens
        sequences = np.repeat(np.arange(len(starts)), num_tokens)
        ends = np.cumsum(num_tokens)
        positions = np.arange(ends[-1]) - np.repeat(ends - contexts, num_tokens)
        block, offset = np.divmod(positions, cache.config.block_size)
        slots = block_tables[sequences, block] * cache.config.block_size + offset
        slot_mapping = torch.from_numpy(slots).to(cache.kv[0].device)
        stored, stored_slots = None, slot_mapping
        if is_stored is not None and not is_stored.all():
            stored = torch.from_numpy(np.flatnonzero(is_stored[sequences])).to(slot_mapping.device)
            stored_slots = slot_mapping[stored]
        longest = int(contexts.max())
        return cls(
            cache,
            block_tables,
            starts,
            num_tokens,
            positions,
            slot_mapping,
            longest,
            stored,
            stored_slots,
            is_stored,
        )

    def store(self, layer: int, tokens: Tensor) -> None:
        """Write what a layer caches of the step's tokens, `[num_tokens, ...]` as in the pool."""
        new = tokens if self.stored is None else tokens[self.stored]
        self.cache.kv[layer].index_copy_(0, self.stored_slots, new)

    def layout(self, window: int | None) -> Layout:
        """Return what is read by layers where a query sees at most `window` tokens, its own included.

        None stands for the whole context. A layout is made when a layer first asks for it.
        """
        if window is not None and window >= self.max_context:
            window = None
        layout = self._layouts.get(window)
        if layout is None:
            num_single = int(np.count_nonzero(self.num_tokens == 1))
            layout = Layout(self._rows(num_single, window), self._chunks(num_single, window))
            self._layouts[window] = layout
        return layout

    @cached_property
    def kernel_inputs(self) -> KernelInputs:
        """The step as the Triton kernels take it."""
        contexts = self.starts + self.num_tokens
        return KernelInputs(self.block_tables, contexts, self.num_tokens, self.slot_mapping, self.stored)

    @cached_property
    def native(self) -> NativeStep:
        """The step as the C++ kernel takes it."""
        num_seqs, width = self.block_tables.shape
        sequences = np.ones((num_seqs, 4), dtype=np.int64)
        sequences[:, 0] = np.cumsum(self.num_tokens) - self.num_tokens
        sequences[:, 1] = self.num_tokens
        sequences[:, 2] = self.starts
        if self.is_stored is not None:
            sequences[:, 3] = self.is_stored
        packed = np.concatenate(((num_seqs, width), sequences.ravel(), self.block_tables.ravel()))
        return NativeStep(
            tuple(self.cache.kv), torch.from_numpy(packed), self.cache.config.block_size, self.cache.windows
        )

    @cached_property
    def context_slots(self) -> Tensor:
        """The int64 slots of all that `layout(None)` reads, in that order, repeated places included."""
        rows, chunks = self.layout(None)
        return torch.cat(
            [
                *(group.slots.view(-1) for group in rows),
                *(
                    self.slot_mapping[chunk.begin : chunk.end] if chunk.slots is None else chunk.slots
                    for chunk in chunks
                ),
            ]
        )

    def _rows(self, num_single: int, window: int | None) -> tuple[Rows, ...]:
        kv = self.cache.kv[0]
        lengths = self.starts[:num_single] + 1
        first = None
        if window is not None:
            contexts, lengths = lengths, np.minimum(lengths, window)
            first = contexts - lengths
        rows = []
        begin = 0
        for end in _split(lengths, _GROUP_OVERHEAD_ELEMENTS // self.cache.num_key_elements):
            group = lengths[begin:end, None]
            places = np.arange(group[0, 0])[None]
            positions = np.minimum(places, group - 1)
            if first is not None:
                positions += first[begin:end, None]
            slots = self._slots(np.arange(begin, end)[:, None], positions)
            mask = None
            if group[-1, 0] < group[0, 0]:
                mask = torch.zeros(slots.shape, dtype=kv.dtype, device=kv.device)
                behind = torch.from_numpy(places >= group).to(kv.device)
                mask = mask.masked_fill_(behind, -torch.inf)[:, None, None]
            rows.append(Rows(begin, end, slots, mask))
            begin = end
        return tuple(rows)

    def _chunks(self, num_single: int, window: int | None) -> tuple[Chunk, ...]:
        device = self.cache.kv[0].device
        chunks = []
        end = num_single
        for sequence in range(num_single, len(self.starts)):
            begin, end = end, end + int(self.num_tokens[sequence])
            start = int(self.starts[sequence])
            context = start + end - begin
            if not start and (window is None or context <= window):
                chunks.append(Chunk(begin, end, None, None))
                continue
            piece = context if window is None else max(window, _LEAST_PIECE)
            for first in range(start, context, piece):
                stop = min(first + piece, context)
                low = 0 if window is None else max(0, first - window + 1)
                slots = self._slots(sequence, np.arange(low, stop))
                mask = torch.ones(stop - first, stop - low, dtype=torch.bool, device=device)
                mask = mask.tril_(first - low)
                if window is not None:
                    mask = mask.triu_(first - low - window + 1)
                offset = begin - start
                chunks.append(Chunk(offset + first, offset + stop, slots, mask))
        return tuple(chunks)

    def _slots(self, sequence: int | np.ndarray, positions: np.ndarray) -> Tensor:
        block, offset = np.divmod(positions, self.cache.config.block_size)
        slots = self.block_tables[sequence, block] * self.cache.config.block_size + offset
        return torch.from_numpy(slots).to(self.cache.kv[0].device)


def batch_order(starts: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return the order that `PagedStep.build` wants: single queries first, long contexts before short."""
    return np.lexsort((-starts, num_tokens > 1))


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
