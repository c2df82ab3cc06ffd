"""A plan while it is being made."""

from collections.abc import Sequence

from cbresearch.plan import Admission, Padding, Plan, Scheduled, Transfer
from cbresearch.request import RequestState


class Draft:
    """What a step's proposals have come to so far.

    Args:
        budget: Tokens that the step can still take.
    """

    __slots__ = ("aborted", "admitted", "budget", "closed", "displaced", "preempted", "scheduled", "swapped")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.closed = False
        self.scheduled: dict[str, Scheduled] = {}
        self.admitted: dict[str, tuple[RequestState, int]] = {}
        self.preempted: list[RequestState] = []
        self.displaced: list[RequestState] = []
        self.aborted: list[str] = []
        self.swapped: list[str] = []

    def plan(self, step: int, kept: Sequence[RequestState], transfers: tuple[Transfer, ...]) -> Plan:
        """Return the plan, with a row for each kept request that the budget still takes."""
        return Plan(
            step=step,
            scheduled=tuple(self.scheduled.values()),
            admitted=tuple(
                Admission(state.request, seat, tuple(state.output_token_ids))
                for state, seat in self.admitted.values()
            ),
            preempted=tuple(state.id for state in reversed(self.preempted)),
            padding=tuple(
                Padding(state.id, state.seat, state.num_computed_tokens)
                for state in kept[: self.budget]
                if state.seat is not None
            ),
            aborted=tuple(self.aborted),
            swapped=tuple(self.swapped),
            transfers=transfers,
        )
