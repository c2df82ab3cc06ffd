"""What holds between any two steps."""

from typing import TYPE_CHECKING

from cbresearch.request import RequestStatus
from cbresearch.scheduler.memory import num_kept_tokens

if TYPE_CHECKING:
    from cbresearch.scheduler.core import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Prove the invariants of a scheduler's queues, seats and blocks; AssertionError where one fails."""
    scheduler.blocks.check()
    seated = scheduler._running + scheduler._kept
    seats = [state.seat for state in seated]
    assert len(seated) <= scheduler.config.max_num_seqs, "more requests than seats"
    assert sorted([*scheduler._free_seats, *(seat for seat in seats if seat is not None)]) == list(
        range(scheduler.config.max_num_seqs)
    ), f"seats are lost or shared: held {seats}, free {scheduler._free_seats}"
    queued = [*scheduler._waiting, *scheduler._swapped, *(state.id for state in seated)]
    assert len(set(queued)) == len(queued), "a request is in two queues"
    for state in scheduler._waiting.values():
        assert state.status is RequestStatus.WAITING, f"{state} is in the waiting queue"
        assert not scheduler.blocks.table(state.id), f"{state} waits but holds blocks"
        assert not scheduler.blocks.host_table(state.id), f"{state} waits but holds host blocks"
    for state in scheduler._swapped.values():
        assert state.status is RequestStatus.SWAPPED, f"{state} is in the swapped queue"
        assert scheduler.blocks.host_table(state.id), f"{state} is swapped out but holds no host blocks"
    for state in scheduler._running:
        assert state.status is RequestStatus.RUNNING, f"{state} is in the running queue"
    held = sum(num_kept_tokens(state) for state in scheduler._running)
    counted = scheduler._memory.num_referred_tokens
    assert held == counted, f"{held} tokens are held, {counted} counted"
    if not seated:
        assert scheduler.blocks.num_held_blocks == 0, "blocks are held although nothing runs"
    if not scheduler._swapped:
        assert scheduler.blocks.num_held_host_blocks == 0, "host blocks are held although nothing is swapped"


def why_stuck(scheduler: "Scheduler", step: int) -> str:
    """Return the numbers that explain why a step has no work although there are requests."""
    running, waiting, swapped = scheduler._running, scheduler._waiting, scheduler._swapped
    first = next(iter((*running, *swapped.values(), *waiting.values())))
    blocks, config = scheduler.blocks, scheduler.config
    return (
        f"policy {scheduler.policy.name!r} left step {step} without work: {len(running)} running, "
        f"{len(waiting)} waiting, {len(swapped)} swapped, {len(scheduler._free_seats)} of "
        f"{config.max_num_seqs} seats free, {blocks.num_free_blocks} of {blocks.num_blocks} blocks free, "
        f"token budget {config.max_num_batched_tokens}; first in line is {first}. Its `propose` must yield "
        "every request that it may serve, and go on after one that does not fit"
    )
