"""A decode step in tensors that stay where they are, so that a captured graph finds the next step's there."""

import numpy as np
import torch

from cbresearch.attention.layout import PagedStep
from cbresearch.attention.pool import PagedCache
from cbresearch.kernels.layout import Device, Layout, Work, choose_launch, resident_programs

# A split of fewer keys costs more than it gains, whatever is idle.
_LEAST_SPLIT_KEYS = 128

_Key = tuple[int, int, int, torch.dtype, int | None]


class StaticStep:
    """Hold a step of up to `num_seqs` decodes as the Triton kernels take it.

    A graph repeats its launches as they were captured, so each has a fixed number of programs: a row's keys
    are cut into as many pieces as the longest context would need, of which a short one leaves some empty.
    Rows that nobody needs have no keys and write nothing.

    Attributes:
        cache: The pool.
        max_context: Tokens of the longest context that may come.
        token_ids: int64 `[1, num_seqs]`.
        positions: int64 `[1, num_seqs]`.
        slot_mapping: int64 `[num_seqs]`; -1 where nothing is written.
        block_tables: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`; 0 for rows that nobody needs.
        cu_seqlens_q: int32 `[num_seqs + 1]`.

    Args:
        cache: The pool.
        num_seqs: Rows.
        max_context: Tokens of the longest context that may come.
        num_splits: Pieces of a row; by default as many as fill the device.
    """

    def __init__(
        self, cache: PagedCache, num_seqs: int, max_context: int, num_splits: int | None = None
    ) -> None:
        self.cache = cache
        self.max_context = max_context
        self._num_splits = num_splits
        device = cache.kv[0].device
        width = -(-max_context // cache.config.block_size)
        self.token_ids = torch.zeros(1, num_seqs, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.slot_mapping = torch.full((num_seqs,), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_seqs, width, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._contexts = np.zeros(num_seqs, dtype=np.int64)
        self._layouts: dict[_Key, Layout] = {}

    @property
    def kernel_inputs(self) -> "StaticStep":
        """The step as the Triton kernels take it."""
        return self

    def fill(self, token_ids: np.ndarray, step: PagedStep) -> None:
        """Take over a step of decodes, at most `num_seqs`.

        Args:
            token_ids: int64 `[num decodes]`.
            step: Their step.
        """
        num, width = step.block_tables.shape
        slots = step.slot_mapping
        if step.stored is not None:
            slots = torch.full_like(slots, -1).index_copy_(0, step.stored, step.stored_slots)
        self._contexts[:num] = step.starts + 1
        self._contexts[num:] = 0
        self.token_ids[0, :num].copy_(torch.from_numpy(token_ids))
        self.positions[0, :num].copy_(torch.from_numpy(step.positions))
        self.slot_mapping[:num].copy_(slots)
        self.slot_mapping[num:].fill_(-1)
        self.block_tables[:num, :width].copy_(torch.from_numpy(step.block_tables))
        self.seq_lens.copy_(torch.from_numpy(self._contexts))
        for layout in self._layouts.values():
            layout.works[0].items.copy_(torch.from_numpy(self._items(layout)))

    def layout(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
    ) -> Layout:
        """Return which program computes what; the tensors in it change with the steps, nothing else."""
        key = (num_heads, num_kv_heads, head_dim, dtype, window)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(*key)
        return self._layouts[key]

    def _lay_out(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
    ) -> Layout:
        device = self.token_ids.device
        target = Device.of(device)
        num_seqs = len(self._contexts)
        launch = choose_launch(head_dim, num_heads // num_kv_heads, 1, dtype, dtype, target)
        splits = self._num_splits
        if splits is None:
            programs = resident_programs(launch, head_dim, dtype.itemsize, False, target)
            most = -(-min(self.max_context, window or self.max_context) // _LEAST_SPLIT_KEYS)
            splits = max(1, min(programs // (num_seqs * num_kv_heads), most))
        rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
        merges = torch.stack(
            (rows, rows * splits, torch.ones_like(rows), torch.full_like(rows, splits)), dim=1
        )
        items = torch.zeros(num_seqs * splits, 8, dtype=torch.int32, device=device)
        layout = Layout(
            works=(Work(launch, items, splits > 1, False),),
            merges=merges if splits > 1 else merges[:0],
            num_partials=num_seqs * splits if splits > 1 else 0,
            window=window,
            num_tokens=num_seqs,
            num_seqs=num_seqs,
            longest=self.max_context,
            heads=(num_heads, num_kv_heads, head_dim),
            device=target,
        )
        items.copy_(torch.from_numpy(self._items(layout)))
        return layout

    def _items(self, layout: Layout) -> np.ndarray:
        """Return the int32 work items of the present contexts, `[num_seqs * pieces, 8]` as `ITEM_FIELDS`."""
        (work,) = layout.works
        tile, num_seqs = work.launch.tile_keys, len(self._contexts)
        splits = len(work.items) // num_seqs
        end = self._contexts
        begin = np.zeros_like(end) if layout.window is None else np.maximum(end - layout.window, 0)
        start = begin // tile * tile
        # Pieces begin at whole tiles; those behind a row's end come out empty.
        length = -(-(end - start) // (splits * tile)) * tile
        piece = np.arange(splits)
        row = np.repeat(np.arange(num_seqs), splits)
        low = np.maximum(start[:, None] + piece * length[:, None], begin[:, None])
        high = np.minimum(start[:, None] + (piece + 1) * length[:, None], end[:, None])
        items = np.empty((num_seqs * splits, 8), dtype=np.int32)
        items[:, 0] = items[:, 1] = row
        items[:, 2] = 1
        items[:, 3] = end[row] - 1
        items[:, 4] = low.ravel()
        items[:, 5] = high.ravel()
        items[:, 6] = np.arange(len(items)) if splits > 1 else -1
        items[:, 7] = np.tile(piece == 0, num_seqs)
        return items
