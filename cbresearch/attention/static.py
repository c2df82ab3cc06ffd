"""A decode step in tensors that stay where they are, so that a captured graph finds the next step's there."""

import numpy as np
import torch

from cbresearch import kernels
from cbresearch.attention.pool import PagedCache
from cbresearch.attention.step import PagedStep
from cbresearch.attention.triton_backend import KernelInputs, Key


class StaticStep(KernelInputs):
    """Hold a step of up to `num_seqs` decodes as the Triton kernels take it.

    A graph repeats its launches as they were captured, so each has a fixed number of programs: a row's keys
    are cut into as many pieces as the longest context would need, of which a short one leaves some empty.
    Rows beyond the decodes of a step have no keys and write nothing.

    Attributes:
        token_ids: int64 `[1, num_seqs]`.
        positions: int64 `[1, num_seqs]`.

    Args:
        cache: The pool.
        num_seqs: Rows.
        max_context: Tokens of the longest context that may come.
        num_splits: Pieces of a row; by default as many as fill the device when all contexts are the longest.
    """

    def __init__(
        self, cache: PagedCache, num_seqs: int, max_context: int, num_splits: int | None = None
    ) -> None:
        width = -(-max_context // cache.config.block_size)
        nothing = torch.full((num_seqs,), -1, dtype=torch.int64, device=cache.kv[0].device)
        contexts = np.zeros(num_seqs, dtype=np.int64)
        super().__init__(cache, np.zeros((num_seqs, width)), contexts, np.ones_like(contexts), nothing)
        self.max_context = max_context
        self.token_ids = torch.zeros_like(nothing)[None]
        self.positions = torch.zeros_like(self.token_ids)
        self._num_splits = num_splits

    def fill(self, token_ids: np.ndarray, step: PagedStep) -> None:
        """Take over a step of decodes, at most `num_seqs`.

        Args:
            token_ids: int64 `[num decodes]`.
            step: The step that computes these tokens.
        """
        num, width = step.block_tables.shape
        self._contexts[:num] = step.starts + 1
        self._contexts[num:] = 0
        self.token_ids[0, :num].copy_(torch.from_numpy(token_ids))
        self.positions[0, :num].copy_(torch.from_numpy(step.positions))
        self.slot_mapping[:num].copy_(step.written_slots)
        self.slot_mapping[num:].fill_(-1)
        self.block_tables[:num, :width].copy_(torch.from_numpy(step.block_tables))
        self.seq_lens.copy_(torch.from_numpy(self._contexts))
        for key, plan in self._plans.items():
            new = self._plan_work(key, self._contexts, len(plan.works[0].items) // plan.num_seqs)
            plan.works[0].items.copy_(new.works[0].items)
            plan.merges.copy_(new.merges)

    def _plan_work(self, key: Key, contexts: np.ndarray, num_splits: int | None = None) -> kernels.WorkPlan:
        num_splits = num_splits or self._num_splits
        if num_splits is None:
            longest = super()._plan_work(key, np.full_like(contexts, self.max_context))
            num_splits = len(longest.works[0].items) // len(contexts)
        return super()._plan_work(key, contexts, num_splits)
