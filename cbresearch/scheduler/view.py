"""The policy's read-only window on the scheduler."""

# The protocol that this implements, `policies.View`, says what each of them is.
# ruff: noqa: D102

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cbresearch.request import RequestState
from cbresearch.scheduler.memory import extra_of

if TYPE_CHECKING:
    from cbresearch.scheduler.core import Scheduler


class LiveView:
    """The policy's `View`; its docstrings are there."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.now = 0.0

    @property
    def waiting(self) -> Iterable[RequestState]:
        return self._scheduler._waiting.values()

    @property
    def running(self) -> Sequence[RequestState]:
        return self._scheduler._running

    @property
    def swapped(self) -> Iterable[RequestState]:
        return self._scheduler._swapped.values()

    @property
    def preemption(self) -> str:
        return self._scheduler.config.preemption

    @property
    def token_budget(self) -> int:
        return self._scheduler._plan.budget

    @property
    def max_num_batched_tokens(self) -> int:
        return self._scheduler.config.max_num_batched_tokens

    @property
    def admitting(self) -> bool:
        return bool(self._scheduler._free_seats) and self._scheduler._plan.closed is None

    @property
    def num_free_seats(self) -> int:
        return len(self._scheduler._free_seats)

    @property
    def max_num_seqs(self) -> int:
        return self._scheduler.config.max_num_seqs

    @property
    def num_blocks(self) -> int:
        return self._scheduler.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.blocks.num_free_blocks

    @property
    def block_size(self) -> int:
        return self._scheduler.blocks.config.block_size

    def num_cached_tokens(self, request: RequestState) -> int:
        blocks = self._scheduler.blocks
        return len(blocks.match(request.token_ids, extra_of(request.request))) * blocks.config.block_size

    def step_seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        step_time = self._scheduler.step_time
        return 0.0 if step_time is None else step_time(num_tokens, num_context_tokens)
