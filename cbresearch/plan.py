"""Names that moved to `step`, and the state that a commit hands to the loop."""

from typing import NamedTuple

from cbresearch.request import RequestState
from cbresearch.step import (
    SKIP_REASONS,
    Admission,
    Padding,
    Plan,
    Scheduled,
    Skipped,
    StepResult,
    Transfer,
)

__all__ = [
    "SKIP_REASONS",
    "Admission",
    "Committed",
    "Padding",
    "Plan",
    "Scheduled",
    "Skipped",
    "StepResult",
    "Transfer",
]


class Committed(NamedTuple):
    """The state that a step leaves behind, taken before the finished requests give back their blocks.

    Attributes:
        finished: States of the requests that the step finished.
        num_running: Unfinished requests with a seat while the step ran.
        num_waiting: Requests without a seat while the step ran, swapped ones included.
        num_held_blocks: Blocks held while the step ran.
        num_held_tokens: Tokens of unfinished requests whose KV lies in those blocks, shared ones once.
        num_cached_blocks: Blocks that hold a cached prefix which nobody refers to.
        num_external_blocks: Blocks that nobody held and yet nobody could get: lost to an allocator's
            rounding, or free while memory refused or preempted a request.
        num_shared_blocks: References to held blocks beyond the first of each.
        num_swapped: Requests whose KV lies in the host's pool.
        num_held_host_blocks: Blocks that they hold there.
    """

    finished: tuple[RequestState, ...]
    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int
    num_external_blocks: int
    num_shared_blocks: int
    num_swapped: int
    num_held_host_blocks: int
