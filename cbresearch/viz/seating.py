"""Who sat where and what the seat did for them: the ground of the seat figure and of the player."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from cbresearch.trace import StepRecord, Trace
from cbresearch.viz.style import REQUEST_COLORS

Kind = Literal["served", "held", "padding"]
Outcome = Literal["finished", "preempted", "seated", "aborted"]

# A request that follows another in its seat must look different; one in the next seat had better.
_SAME_SEAT, _NEXT_SEAT = 1000, 1


class Span(NamedTuple):
    """Consecutive steps of a sitting in which the seat did the same.

    Attributes:
        kind: "served": tokens were computed; "held": seated but not served; "padding": finished already,
            computed for nothing.
        first: Index of the first step.
        end: Index after the last one.
    """

    kind: Kind
    first: int
    end: int


class Prefill(NamedTuple):
    """A step that computes known tokens of a request: of its prompt or, after a preemption, of its output.

    Attributes:
        step: Index of the step.
        num_tokens: Tokens that it computes.
        samples: Whether the step yields a new token as well.
    """

    step: int
    num_tokens: int
    samples: bool


class Sitting(NamedTuple):
    """A request's stay in a seat, with what each of its steps was good for.

    Attributes:
        request_id: Who sat there.
        seat: Where.
        first: Index of the first step.
        end: Index after the last one.
        outcome: "finished", "preempted", "aborted", or "seated" if the record ends before the stay does.
        spans: The steps from `first` to `end`, without gaps.
        prefills: The served steps that are no plain decoding, in order.
        num_tokens_before: Output tokens that the request had when it sat down.
        num_computed_before: Its tokens whose KV was there when it sat down: cached, forked or swapped in.
    """

    request_id: str
    seat: int
    first: int
    end: int
    outcome: Outcome
    spans: tuple[Span, ...]
    prefills: tuple[Prefill, ...] = ()
    num_tokens_before: int = 0
    num_computed_before: int = 0


class _Draft:
    """A sitting while it lasts."""

    __slots__ = (
        "begun",
        "computed",
        "first",
        "kind",
        "outcome",
        "prefills",
        "reached",
        "seat",
        "spans",
        "tokens",
    )

    def __init__(self, seat: int, first: int, num_tokens: int) -> None:
        self.seat = seat
        self.first = first
        self.outcome: Outcome = "seated"
        self.prefills: list[Prefill] = []
        self.tokens = num_tokens
        self.computed: int | None = None
        self.spans: list[Span] = []
        # The last span, which grows with each step: a tuple a step would take most of the time.
        self.kind: Kind = "held"
        self.begun = self.reached = first

    def extend(self, kind: Kind, step: int) -> None:
        if self.kind != kind or self.reached != step:
            self.hold(step)
            self.kind, self.begun = kind, step
        self.reached = step + 1

    def hold(self, end: int) -> None:
        """Write down the last span, and the steps from there to `end` as held."""
        if self.begun < self.reached:
            self.spans.append(Span(self.kind, self.begun, self.reached))
        if self.reached < end:
            self.spans.append(Span("held", self.reached, end))

    def close(self, request_id: str, end: int, outcome: Outcome) -> Sitting:
        self.hold(end)
        return Sitting(
            request_id,
            self.seat,
            self.first,
            end,
            outcome,
            tuple(self.spans),
            tuple(self.prefills),
            self.tokens,
            self.computed or 0,
        )


def sittings(steps: Sequence[StepRecord]) -> list[Sitting]:
    """Return every stay in a seat, in the order in which the requests sat down.

    Unlike `Trace.stays`, it tells the steps in which a seated request was served from those in which it
    was not, and counts a preempted request's seat as taken until the step that took it away.

    Args:
        steps: The records of a run, from its first step on.
    """
    drafts: dict[str, _Draft] = {}
    done: list[Sitting] = []
    for step, record in enumerate(steps):
        plan = record.plan
        for request_id in plan.aborted:
            if request_id in drafts:
                drafts[request_id].outcome = "aborted"
        for request_id in plan.preempted:
            done.append(drafts.pop(request_id).close(request_id, step, "preempted"))
        for admission in plan.admitted:
            num_tokens = len(admission.output_token_ids)
            drafts[admission.request.id] = _Draft(admission.seat, step, num_tokens)
        for scheduled in plan.scheduled:
            draft = drafts[scheduled.request_id]
            draft.extend("served", step)
            if draft.computed is None:
                draft.computed = scheduled.start
            if scheduled.is_prefill:
                draft.prefills.append(Prefill(step, scheduled.num_tokens, scheduled.samples))
        for row in plan.padding:
            drafts[row.request_id].extend("padding", step)
        for request_id in record.finished:
            drafts[request_id].outcome = "finished"
    for request_id, draft in drafts.items():
        end = len(steps) if draft.outcome == "seated" else draft.reached
        done.append(draft.close(request_id, end, draft.outcome))
    return sorted(done, key=lambda sitting: (sitting.first, sitting.seat))


def request_colors(traces: Iterable[Trace]) -> dict[str, int]:
    """Return each request's index into `REQUEST_COLORS`, the same in all the runs given.

    Requests that follow one another in a seat differ, and so do those side by side as far as the number
    of colours allows.

    Args:
        traces: The runs that are shown together.
    """
    conflicts: dict[str, dict[str, int]] = defaultdict(dict)
    order: dict[str, None] = {}

    def part(one: Sitting, other: Sitting, weight: int) -> None:
        for a, b in ((one.request_id, other.request_id), (other.request_id, one.request_id)):
            if a != b:
                conflicts[a][b] = conflicts[a].get(b, 0) + weight

    for trace in traces:
        rows: dict[int, list[Sitting]] = defaultdict(list)
        for sitting in sittings(trace.steps):
            order.setdefault(sitting.request_id)
            rows[sitting.seat].append(sitting)
        for seat, row in rows.items():
            for one, other in pairwise(row):
                part(one, other, _SAME_SEAT)
            for one, other in _touching(row, rows.get(seat + 1, ())):
                part(one, other, _NEXT_SEAT)
    num_colors = len(REQUEST_COLORS)
    colors: dict[str, int] = {}
    for place, request_id in enumerate(order):
        costs = [0] * num_colors
        for rival, weight in conflicts[request_id].items():
            if rival in colors:
                costs[colors[rival]] += weight
        # Ties go round the palette, so that all colours are used.
        colors[request_id] = min(range(num_colors), key=lambda c: (costs[c], (c - place) % num_colors))
    return colors


def _touching(row: Sequence[Sitting], other_row: Sequence[Sitting]) -> Iterable[tuple[Sitting, Sitting]]:
    """Yield the pairs of two seats' sittings that share a step."""
    one = other = 0
    while one < len(row) and other < len(other_row):
        a, b = row[one], other_row[other]
        if a.first < b.end and b.first < a.end:
            yield a, b
        if a.end <= b.end:
            one += 1
        else:
            other += 1
