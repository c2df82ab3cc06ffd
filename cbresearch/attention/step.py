"""Where a step writes its keys and values, and which slots each of its queries reads."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbresearch.attention.pool import PagedCache
from cbresearch.attention.triton_backend import KernelInputs

# A group of sequences costs this much more than its tokens, in elements of K gathered: the calls it takes.
_GROUP_OVERHEAD_ELEMENTS = 32_768

# A chunk longer than its window is attended in pieces of at least so many queries.
_LEAST_PIECE = 128


class Read(NamedTuple):
    """Queries that are attended in one call: one of each of some sequences, or several of one sequence.

    Attributes:
        begin: Place of the first query among the step's tokens.
        end: Place behind the last query.
        slots: int64 `[num_seqs, most keys]` into the pool; None where one sequence's queries see no keys but
            their own. Places behind a sequence's end repeat a slot of its own and are masked, so that no
            unwritten slot is ever read.
        mask: `[num_seqs, 1, num_queries, most keys]`, bool or to add to the scores. None where a single query
            sees all of its keys, and several see those up to their own.
    """

    begin: int
    end: int
    slots: Tensor | None
    mask: Tensor | None


class PagedStep:
    """One flat `[1, num_tokens]` forward.

    Attributes:
        cache: The pool.
        kv: The pool of each layer.
        windows: The windows of the pool's layers.
        block_tables: The argument.
        starts: The argument.
        num_tokens: The argument.
        is_stored: The argument, True where all tokens are stored.
        positions: int64 `[num_tokens]`: the position of each token in its sequence, on the host.
        slot_mapping: int64 `[num_tokens]`: the slot of each token.
        max_context: Tokens of the longest context.
        stored: int64: which of the step's tokens are written, in the order of `stored_slots`; None for all.
        stored_slots: int64: their slots.

    Args:
        cache: The pool.
        block_tables: int64 `[num_seqs, max_blocks]`; only the entries of blocks that are written, or that
            hold a key inside a layer's window, are read.
        starts: int64 `[num_seqs]`: tokens of each sequence already in the cache.
        num_tokens: int64 `[num_seqs]`: queries of each sequence. Sequences with one query come first, in
            descending order of `starts` (see `batch_order`).
        is_stored: bool `[num_seqs]`: whether the tokens' keys and values are written; those of a row that is
            computed over again are there already, in blocks that others may share by now. None where all are.
    """

    def __init__(
        self, cache: PagedCache, block_tables: np.ndarray,
        starts: np.ndarray, num_tokens: np.ndarray, is_stored: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.kv = tuple(cache.kv)
        self.windows = cache.windows
        self.block_tables = block_tables
        self.starts = starts
        self.num_tokens = num_tokens
        self._contexts = starts + num_tokens
        self.is_stored = np.ones(len(starts), dtype=bool) if is_stored is None else is_stored
        self._reads: dict[int | None, tuple[Read, ...]] = {}
        self.max_context = int(self._contexts.max())
        sequences = np.repeat(np.arange(len(starts)), num_tokens)
        ends = np.cumsum(num_tokens)
        self.positions = np.arange(ends[-1]) - np.repeat(ends - self._contexts, num_tokens)
        self.slot_mapping = self._slots(sequences, self.positions)
        self.stored, self.stored_slots = None, self.slot_mapping
        if not self.is_stored.all():
            stored = np.flatnonzero(self.is_stored[sequences])
            self.stored = torch.from_numpy(stored).to(self.slot_mapping.device)
            self.stored_slots = self.slot_mapping[self.stored]

    def store(self, layer: int, tokens: Tensor) -> None:
        """Write what a layer caches of the step's tokens, `[num_tokens, ...]` as in the pool."""
        new = tokens if self.stored is None else tokens[self.stored]
        self.cache.kv[layer].index_copy_(0, self.stored_slots, new)

    @cached_property
    def written_slots(self) -> Tensor:
        """The slot of each token, int64 `[num_tokens]`; -1 where nothing is written."""
        if self.stored is None:
            return self.slot_mapping
        return torch.full_like(self.slot_mapping, -1).index_copy_(0, self.stored, self.stored_slots)

    @cached_property
    def kernel_inputs(self) -> KernelInputs:
        """The step as the Triton kernels take it."""
        return KernelInputs(
            self.cache, self.block_tables, self._contexts, self.num_tokens, self.written_slots
        )

    def reads(self, window: int | None) -> tuple[Read, ...]:
        """Return what is read by layers where a query sees at most `window` tokens, its own included.

        None stands for the whole context. It is made when a layer first asks for it.
        """
        if window is not None and window >= self.max_context:
            window = None
        if window not in self._reads:
            num_single = int(np.count_nonzero(self.num_tokens == 1))
            self._reads[window] = (*self._single(num_single, window), *self._chunks(num_single, window))
        return self._reads[window]

    @cached_property
    def context_slots(self) -> Tensor:
        """The int64 slots of all that `reads(None)` reads, in that order, repeated places included."""
        own, reads = self.slot_mapping, self.reads(None)
        return torch.cat([own[it.begin : it.end] if it.slots is None else it.slots.view(-1) for it in reads])

    def _single(self, num_single: int, window: int | None) -> Iterator[Read]:
        """Yield the reads of the sequences with one query, of which those of like length go together."""
        kv = self.cache.kv[0]
        contexts = self._contexts[:num_single]
        lengths = contexts if window is None else np.minimum(contexts, window)
        begin = 0
        for end in _split(lengths, _GROUP_OVERHEAD_ELEMENTS // self.cache.num_key_elements):
            group = lengths[begin:end, None]
            places = np.arange(group[0, 0])[None]
            positions = np.minimum(places, group - 1) + (contexts - lengths)[begin:end, None]
            slots = self._slots(np.arange(begin, end)[:, None], positions)
            mask = None
            if group[-1, 0] < group[0, 0]:
                mask = torch.from_numpy(np.where(places < group, 0.0, -np.inf)).to(kv)[:, None, None]
            yield Read(begin, end, slots, mask)
            begin = end

    def _chunks(self, num_single: int, window: int | None) -> Iterator[Read]:
        """Yield the reads of the sequences with several queries, those of a long one in pieces."""
        end = num_single
        for sequence in range(num_single, len(self.starts)):
            begin, end = end, end + int(self.num_tokens[sequence])
            start, context = int(self.starts[sequence]), int(self._contexts[sequence])
            if not start and (window is None or context <= window):
                yield Read(begin, end, None, None)
                continue
            piece = context if window is None else max(window, _LEAST_PIECE)
            for first in range(start, context, piece):
                stop = min(first + piece, context)
                low = 0 if window is None else max(0, first - window + 1)
                slots = self._slots(np.array([[sequence]]), np.arange(low, stop)[None])
                mask = torch.ones(1, 1, stop - first, stop - low, dtype=torch.bool, device=slots.device)
                mask = mask.tril_(first - low)
                if window is not None:
                    mask = mask.triu_(first - low - window + 1)
                yield Read(begin - start + first, begin - start + stop, slots, mask)

    def _slots(self, sequence: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return the slots of positions of sequences, on the pool's device."""
        block, offset = np.divmod(positions, self.cache.config.block_size)
        slots = self.block_tables[sequence, block] * self.cache.config.block_size + offset
        return torch.from_numpy(slots).to(self.cache.kv[0].device)


def batch_order(starts: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return the order that a `PagedStep` wants: single queries first, long contexts before short."""
    return np.lexsort((-starts, num_tokens > 1))


def _split(contexts: np.ndarray, overhead: float) -> list[int]:
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
