"""Size-based orders: the request that is expected to be done soonest goes first."""

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import count

from cbresearch.checks import Number, PositiveSize, Size
from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.request import RequestState


class ShortestJobFirst(Policy):
    """Admit the request with the shortest predicted output first, without preempting for it.

    A long request starves for as long as shorter ones come. Without a prediction `max_tokens` stands in:
    where end-of-sequence tokens are ignored, that is the truth.
    """

    name = "sjf"
    family = "size"
    source = "SSJF (Qiu et al., 2024)"
    fast_forward = True

    def rank(self, view: View, request: RequestState) -> float:
        """Return the key by which the queue is sorted, least first."""
        return request.predicted_remaining

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the queue from short to long."""
        yield from whole(in_turn(view))
        queue = queued(view) if view.admitting else ()
        yield from joining(view, sorted(queue, key=lambda state: (self.rank(view, state), state.order)))


class HighestResponseRatioNext(ShortestJobFirst):
    """Admit by (time waited + size)/size, so that a long request that waits overtakes short new ones.

    The size is the predicted output times `token_seconds`; in SGLang's variant it is the uncached prompt.

    Args:
        token_seconds: Seconds that a token of output takes, to compare sizes with waiting times.
    """

    name = "hrrn"
    source = "Brinch Hansen (1971)"

    def __init__(self, token_seconds: PositiveSize = 1.0) -> None:
        self.token_seconds = token_seconds

    def rank(self, view: View, request: RequestState) -> float:
        """Return the negative response ratio."""
        size = request.predicted_remaining * self.token_seconds
        return -(view.now - request.arrival + size) / size


class LearningToRank(ShortestJobFirst):
    """Admit by predicted rank; requests that have waited too long go first, the longest waiting before all.

    Only the order of the predictions matters. The paper counts steps without service before it promotes; here
    it is seconds since the arrival, an interpretation.

    Args:
        starvation: Seconds of waiting after which a request is promoted.
    """

    name = "rank"
    source = "vllm-ltr (NeurIPS'24)"

    def __init__(self, starvation: Size = 60.0) -> None:
        self.starvation = starvation

    def rank(self, view: View, request: RequestState) -> float:
        """Return the predicted length, or minus infinity for a request that starves."""
        starves = view.now - request.arrival >= self.starvation
        return -math.inf if starves else request.predicted_remaining


class Ranked(Policy):
    """Serve the requests that rank first, running or not; a waiting one displaces the last of the running.

    A base for preemptive orders: a subclass says how requests rank, and which may be displaced.
    """

    name = "ranked"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the key by which requests are sorted, least first; the earlier of equals goes first."""
        return request.order

    def may_lose(self, view: View, request: RequestState) -> bool:
        """Return whether a running request may be displaced."""
        return True

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the best for all seats, best first, then the other running requests."""
        all_requests: Iterable[RequestState] = (*view.running, *queued(view))
        best = nsmallest(view.max_num_seqs, all_requests, key=lambda one: (self.rank(view, one), one.order))
        yield from whole(best)
        yield from whole([request for request in view.running if request not in set(best)])

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the last in rank."""
        return max(candidates, key=lambda one: (self.rank(view, one), one.order))

    def displace(
        self, view: View, waiting: RequestState, candidates: Sequence[RequestState]
    ) -> RequestState | None:
        """Choose the last in rank, if it ranks behind the waiting request and may be displaced."""
        preemptible = [request for request in candidates if self.may_lose(view, request)]
        worst = self.victim(view, preemptible) if preemptible else None
        behind = worst is not None and self.rank(view, worst) > self.rank(view, waiting)
        return worst if behind else None


class ShortestRemaining(Ranked):
    """Serve the shortest predicted remaining output first, and preempt for it.

    A long request starves for as long as shorter ones come.
    """

    name = "srpt"
    family = "size"
    source = "SRPT (Schrage, 1968)"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the predicted number of tokens still to come."""
        return request.predicted_remaining


class Trail(ShortestRemaining):
    """Serve the shortest predicted remaining output first; only a young request may be displaced for it.

    A long request without a seat starves for as long as shorter ones come. The prediction is not refreshed
    from the model's embeddings, as in the paper: it counts down. The floor of the product and c = 0.8 are an
    interpretation.

    Args:
        c: A request is young while it has generated fewer than c times its predicted output, rounded down.
    """

    name = "trail"
    source = "TRAIL (ICLR'25)"

    def __init__(self, c: Size = 0.8) -> None:
        self.c = c

    def may_lose(self, view: View, request: RequestState) -> bool:
        """Return whether the request is young."""
        expected = request.predicted_output or request.max_tokens
        return request.num_output_tokens < math.floor(self.c * expected)


class SkipJoinFeedback(Ranked):
    """Multi-level feedback: serve the first of several levels with doubling quanta, entered by prompt length.

    A new request skips the levels whose quantum is shorter than its prompt. It falls a level when it has used
    its quantum, and rises to the first when it has waited `aging` seconds. Within a level the first to
    enter it goes first. That service is counted in tokens, prompt included, and not in seconds, is an
    interpretation, and KV is swapped only when a seat is lost, not ahead of it.

    Args:
        levels: Number of levels.
        quantum: Tokens of service at the first level; it doubles with each level.
        aging: Seconds since the last service after which a request rises.
    """

    name = "mlfq"
    family = "size"
    source = "FastServe (2023; NSDI'26), skip-join MLFQ"

    def __init__(self, levels: Number = 4, quantum: Number = 64, aging: Size = 60.0) -> None:
        self.levels, self.quantum, self.aging = levels, quantum, aging

    def begin(self) -> None:
        """Forget the levels of all requests."""
        self._seen: dict[str, tuple[float, int, float]] = {}
        self._entries = count(1)

    def rank(self, view: View, request: RequestState) -> float:
        """Return the request's level, with its place there as a fraction."""
        place, used, since = self._seen.get(request.id) or self._join(request)
        if request.seat is None and view.now - since >= self.aging and place >= 1:
            place, used = self._enter(0), 0
        self._seen[request.id] = place, used, view.now if request.seat is not None else since
        return place

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Count the tokens, and let the request fall a level when its quantum is used up."""
        place, used, since = self._seen.get(request.id) or self._join(request)
        level, used = int(place), used + num_tokens
        if used >= self.quantum << level and level < self.levels - 1:
            place, used = self._enter(level + 1), 0
        self._seen[request.id] = place, used, since
        if request.finish_reason is not None:
            del self._seen[request.id]

    def _join(self, request: RequestState) -> tuple[float, int, float]:
        fitting = (n for n in range(self.levels) if request.num_prompt_tokens <= self.quantum << n)
        return self._enter(next(fitting, self.levels - 1)), 0, request.arrival

    def _enter(self, level: int) -> float:
        return level + next(self._entries) * 1e-9


class MemoryCheckedShortestFirst(ShortestJobFirst):
    """Admit the shortest first, as long as memory suffices until each predicted end.

    A long request starves for as long as shorter ones come. At each instant at which a request is predicted
    to finish, what all that still run then hold must fit the pool. The paper counts tokens; here it is
    whole blocks, without the last token, whose KV is never needed.
    """

    name = "mc_sf"
    source = "MC-SF (Jaillet et al., 2025, arXiv 2502.07115)"

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the queue from short to long while it fits."""
        yield from whole(in_turn(view))
        for state in sorted(queued(view), key=lambda state: (self.rank(view, state), state.order)):
            if not view.admitting or (view.running and not fits_until_each_end(view, (*view.running, state))):
                return
            yield state, state.num_pending_tokens


def fits_until_each_end(view: View, requests: Sequence[RequestState]) -> bool:
    """Return whether requests that each generate a token a step fit the pool whenever one of them ends."""
    held = [(state.num_tokens - 1, state.predicted_remaining) for state in requests]
    return all(
        sum(-(-(tokens + end) // view.block_size) for tokens, left in held if left >= end) <= view.num_blocks
        for end in {left for _, left in held}
    )
