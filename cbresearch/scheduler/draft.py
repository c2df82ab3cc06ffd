"""A plan while it is being made."""

from collections.abc import Sequence
from itertools import repeat

from cbresearch.plan import Admission, Padding, Plan, Scheduled, Skipped, Transfer
from cbresearch.request import RequestState

# The named tuple's own constructor is a function in Python, at four times the cost.
NEW_TUPLE = tuple.__new__


class Draft:
    """What a step's proposals have come to so far.

    Args:
        budget: Tokens that the step can still take.
    """

    __slots__ = (
        "aborted",
        "admitted",
        "budget",
        "closed",
        "displaced",
        "has_room",
        "preempted",
        "scheduled",
        "skipped",
        "swapped",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.closed: str | None = None
        self.has_room = False
        self.scheduled: dict[str, Scheduled] = {}
        self.admitted: dict[str, tuple[RequestState, int]] = {}
        self.preempted: list[RequestState] = []
        self.displaced: list[RequestState] = []
        self.aborted: list[str] = []
        self.swapped: list[str] = []
        self.skipped: dict[str, str] = {}

    def plan(
        self,
        step: int,
        running: Sequence[RequestState],
        kept: Sequence[RequestState],
        transfers: tuple[Transfer, ...],
        free_seats: Sequence[int],
    ) -> Plan:
        """Return the plan, with a row for each kept request that the budget still takes."""
        if len(self.scheduled) < len(running):
            reason = "policy" if self.budget else "budget"
            for state in running:
                request_id = state.id
                if request_id not in self.scheduled:
                    self.skipped.setdefault(request_id, reason)
        closed = self.closed
        if not self.budget:
            closed = "budget"
        elif closed is None and not free_seats:
            closed = "seats"
        return Plan(
            step=step,
            scheduled=tuple(self.scheduled.values()),
            admitted=tuple(
                [
                    Admission(state.request, seat, tuple(state.output_token_ids))
                    for state, seat in self.admitted.values()
                ]
            ),
            preempted=tuple([state.id for state in reversed(self.preempted)]),
            padding=padding_of(kept[: self.budget]) if kept else (),
            aborted=tuple(self.aborted),
            swapped=tuple(self.swapped),
            transfers=transfers,
            skipped=tuple(map(NEW_TUPLE, repeat(Skipped), self.skipped.items())) if self.skipped else (),
            closed=closed,
        )


def padding_of(kept: Sequence[RequestState]) -> tuple[Padding, ...]:
    """Return the rows of finished requests that still have their seats."""
    return tuple(
        Padding(state.id, state.seat, state.num_computed_tokens) for state in kept if state.seat is not None
    )
