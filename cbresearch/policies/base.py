"""The policy hook: a policy only decides; the scheduler alone clips, allocates, preempts and counts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from cbresearch.request import RequestState


class View(Protocol):
    """What a policy may read. Values are live: they change as the scheduler takes up proposals."""

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""

    @property
    def waiting(self) -> Iterable[RequestState]:
        """Requests without a seat when the step began: preempted ones first, then by arrival.

        The queue itself moves only after the step; `itertools.islice` takes its head.
        """

    @property
    def swapped(self) -> Iterable[RequestState]:
        """Requests without a seat whose KV lies in the host's pool, the earliest admitted first."""

    @property
    def preemption(self) -> str:
        """What becomes of a victim's KV, "recompute" or "swap", unless the policy decides otherwise."""

    @property
    def running(self) -> Sequence[RequestState]:
        """Unfinished requests with a seat, in the order of admission."""

    @property
    def token_budget(self) -> int:
        """Tokens that this step can still take."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens that a step can take at most."""

    @property
    def admitting(self) -> bool:
        """Whether a waiting request could still join: a seat is free, and memory has refused nobody yet.

        A policy may stop walking the queue once this is False; what it yields all the same is skipped.
        """

    @property
    def num_free_seats(self) -> int:
        """Seats that nobody holds."""

    @property
    def max_num_seqs(self) -> int:
        """All seats."""

    @property
    def num_blocks(self) -> int:
        """All blocks of the KV pool."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV pool that nobody holds."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def num_cached_tokens(self, request: RequestState) -> int:
        """Return the tokens of a waiting request whose KV is in the prefix cache now."""

    def step_seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the predicted seconds of a step of so many tokens and tokens of context; 0.0 if unknown."""


Proposal = tuple[RequestState, int]


class Policy:
    """First come, first served, with chunked prefill and decodes mixed under one token budget.

    Orca's iteration-level scheduling (OSDI'22) with Sarathi's chunked prefills (OSDI'24), in the order of
    vLLM v1: whoever runs goes on, then the queue's head joins while seats, budget and blocks last.
    A subclass overrides one method or two.
    """

    name = "fcfs"
    family = "batching"
    """One of "batching", "size", "memory", "fairness", "slo", "locality"."""
    source = "Orca (OSDI'22), Sarathi-Serve (OSDI'24)"
    """Where the rule was published."""
    keeps_seats = False
    """Whether a finished request's row stays in the batch until all rows are finished."""
    joins_late = True
    """Whether a request may join a batch under way; a parallel sample then waits for its sibling's prompt."""
    hits_at_once = False
    """Whether a prefix counts as cached as soon as a step is planned that computes it, as in vLLM v1, so that
    others may share it in that very step; else only once it is computed."""
    steady = "always"
    """Whether steps repeat themselves, so that a simulator may take many at once; one of four words.

    "alone": while nobody waits and all who run decode within the token budget, each step serves them all, in
    the order of admission. "always": besides, when requests wait, a step that decoded all who run, admitted
    nobody and refused nobody whom the one before did not refuse is followed by its like, until somebody
    arrives, finishes or loses its seat, or the prefix cache changes: no decision turns on the time, on tokens
    served, or on anything that fewer free blocks could turn into an admission. "ranked": as "always", in an
    order of its own, in which whoever finishes leaves no more than a gap. "never": none of this.

    `propose` is then asked once for many steps, or twice for one, or not at all, unless `served` is
    overridden; that one is told the tokens of many steps at once.

    A class speaks for itself only: one that is derived from it says it anew, or it is "never"."""

    def begin(self) -> None:
        """Forget earlier runs; called when a scheduler takes the policy."""

    def propose(self, view: View) -> Iterator[Proposal]:
        """Yield whom to serve and how many tokens each wants, best first.

        The scheduler clips each proposal to what fits, and skips what does not. A generator sees the
        effect of a proposal when it resumes.
        """
        yield from whole(in_turn(view))
        yield from joining(view, queued(view))

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose whom to preempt when blocks run out, among the running requests in admission order.

        The latest comer goes: the oldest request then always advances, so every run ends. Who was preempted
        `max_preemptions` times is no candidate; if that leaves nobody, the latest comer goes unasked.
        """
        return candidates[-1]

    def displace(
        self, view: View, newcomer: RequestState, candidates: Sequence[RequestState]
    ) -> RequestState | None:
        """Choose who makes room for a newcomer that finds no seat or no blocks; None lets it wait.

        Asked again without whom it chose, until there is room, and only then does anyone lose its seat.
        Nobody who joined in this step is among the candidates, nor who was preempted too often already.
        """
        return None

    def preemption(self, view: View, victim: RequestState) -> str:
        """Choose what becomes of a victim's KV: "recompute" throws it away, "swap" moves it to the host.

        A host's pool that is absent or full makes it a recompute.
        """
        return view.preemption

    def wakes(self, view: View) -> float | None:
        """Return the seconds until which to wait although requests do, or None; asked when nobody runs."""
        return None

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Take note that a request was served `num_tokens` tokens in the step just done."""


STEADINESS = ("never", "alone", "always", "ranked")


def steadiness(policy: Policy) -> str:
    """Return what a policy says about `Policy.steady` itself: what it inherits speaks of other decisions.

    Raises:
        ValueError: It says something else than one of the four words.
    """
    if "steady" not in vars(type(policy)):
        return "never"
    if policy.steady not in STEADINESS:
        raise ValueError(f"policy {policy.name!r}: steady is {policy.steady!r}; choose one of {STEADINESS}")
    return policy.steady


def whole(requests: Iterable[RequestState]) -> Iterator[Proposal]:
    """Propose each request with everything that it has pending."""
    for request in requests:
        yield request, request.num_tokens - request.num_computed_tokens


def in_turn(view: View) -> Sequence[RequestState]:
    """Return the running requests; whoever waited longest first, if the budget cannot serve them all."""
    if len(view.running) <= view.token_budget:
        return view.running
    return sorted(view.running, key=lambda request: request.scheduled_step)


def queued(view: View) -> Iterator[RequestState]:
    """Return all requests without a seat, swapped ones first."""
    return chain(view.swapped, view.waiting)


def joining(view: View, requests: Iterable[RequestState]) -> Iterator[Proposal]:
    """Propose requests without a seat as long as one can join, so that a long queue is not walked in vain."""
    for request in requests:
        if not view.admitting:
            return
        yield request, request.num_tokens - request.num_computed_tokens
