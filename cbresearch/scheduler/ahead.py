"""Many steps at once, while all that happens is that those who run decode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cbresearch.request import RequestState, RequestStatus
from cbresearch.scheduler.stride import Ahead, Foresight, Stride

if TYPE_CHECKING:
    from cbresearch.scheduler.core import Scheduler


def look_ahead(
    scheduler: "Scheduler", foresight: Foresight, now: float, until: float, passes_finishes: bool
) -> Ahead | None:
    """Take as many steps at once as differ in nothing but their counters.

    The scheduler, its blocks and the requests are then as after so many calls of `schedule` and `commit`.

    Args:
        scheduler: Whose next steps.
        foresight: What its executor knows.
        now: Seconds since the start of the run.
        until: Seconds at which somebody arrives: the first step that ends no earlier is the last one.
        passes_finishes: Whether to go on behind a step that finished somebody, if nobody waits.

    Returns:
        The steps, or None if the next one has to be taken by itself; then nothing has changed.
    """
    draft, running, kept = scheduler._plan, scheduler._running, scheduler._kept
    if (
        scheduler.steady == "never"
        or not running
        or len(running) > draft.budget
        or draft.aborted
        or draft.preempted
        or (kept and scheduler.blocks.config.sliding_window is not None)
    ):
        return None
    waits = bool(scheduler._waiting or scheduler._swapped)
    order: Sequence[RequestState] | None = _repeated(scheduler) if waits else running
    if order is None:
        return None
    for state in reversed(running):
        if state.num_tokens - state.num_computed_tokens != 1 or not state.output_token_ids:
            return None
    if not waits and (scheduler.steady == "ranked" or scheduler._served is not None):
        # Who keeps accounts may take note of who waits when it is asked.
        order = _proposed(scheduler, now)
        if order is None:
            return None
    return Stride(scheduler, foresight, order, now, waits).run(
        until, passes_finishes and not waits and not scheduler.policy.keeps_seats
    )


def _proposed(scheduler: "Scheduler", now: float) -> Sequence[RequestState] | None:
    """Return whom the policy serves if nobody waits, in its order; None unless it is everyone who runs."""
    draft, num_running = scheduler._plan, len(scheduler._running)
    scheduler._view.now = now
    budget = draft.budget
    order: dict[RequestState, None] = {}
    try:
        for state, wanted in scheduler.policy.propose(scheduler._view):
            if not draft.budget:
                break
            if state in order:
                continue
            if type(wanted) is not int or wanted < 1 or state.status is not RequestStatus.RUNNING:
                return None
            order[state] = None
            draft.budget -= 1
    finally:
        draft.budget = budget
    return list(order) if len(order) == num_running else None


def _repeated(scheduler: "Scheduler") -> Sequence[RequestState] | None:
    """Return whom the last step served, in its order, if the next one has to be its like.

    Whoever was refused then is refused again as long as nothing is given back: running requests only take
    blocks. A sliding window gives some back at any time.
    """
    draft, plan, before, num_submitted = scheduler._last
    if (
        scheduler.steady == "alone"
        or plan is None
        or num_submitted != scheduler.num_submitted
        or draft.has_room
        or scheduler._plan.has_room
        or (plan.skipped and (before is None or before.skipped != plan.skipped))
        or plan.admitted
        or plan.aborted
        or plan.transfers
        or len(plan.scheduled) != len(scheduler._running)
        or any(entry.is_prefill or not entry.samples for entry in plan.scheduled)
        or scheduler.blocks.config.sliding_window is not None
    ):
        return None
    return [scheduler._states[entry.request_id] for entry in plan.scheduled]
