"""Size-based orders: who is expected to be done soonest."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest

from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.request import RequestState


class ShortestJobFirst(Policy):
    """Admit the request with the shortest predicted output first, without preempting for it.

    Source: SSJF (Qiu et al., 2024). Without a prediction `max_tokens` stands in: where end-of-sequence tokens
    are ignored, that is the truth.
    """

    name = "sjf"
    family = "size"

    def rank(self, view: View, request: RequestState) -> float:
        """Return what the queue is sorted by, least first."""
        return request.predicted_remaining

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue from short to long."""
        yield from whole(in_turn(view))
        if view.admitting:
            yield from joining(
                view, sorted(queued(view), key=lambda request: (self.rank(view, request), request.order))
            )


class HighestResponseRatioNext(ShortestJobFirst):
    """Admit by (time waited + size)/size, so that a long request that waits overtakes short newcomers.

    Source: Brinch Hansen, 1971. The size is the predicted output times `token_seconds`.

    Args:
        token_seconds: Seconds that a token of output takes, to compare sizes with waiting times.
    """

    name = "hrrn"

    def __init__(self, token_seconds: float = 1.0) -> None:
        self.token_seconds = token_seconds

    def rank(self, view: View, request: RequestState) -> float:
        """Return the negative response ratio."""
        size = request.predicted_remaining * self.token_seconds
        return -(view.now - request.request.arrival + size) / size


class LearningToRank(ShortestJobFirst):
    """Admit by predicted rank; who has waited too long goes first (vllm-ltr, NeurIPS'24).

    Only the order of the predictions matters. The paper counts steps without service before it promotes; here
    it is seconds since the arrival, an interpretation.

    Args:
        starvation: Seconds of waiting after which a request is promoted.
    """

    name = "rank"

    def __init__(self, starvation: float = 60.0) -> None:
        self.starvation = starvation

    def rank(self, view: View, request: RequestState) -> float:
        """Return the predicted length, or the arrival, far ahead, of who starves."""
        if view.now - request.request.arrival < self.starvation:
            return request.predicted_remaining
        return request.request.arrival - 1e12


class Ranked(Policy):
    """Serve whoever ranks first, running or not; a newcomer displaces the last of the running.

    A base for preemptive orders: a subclass says how requests rank, and who may be displaced.
    """

    name = "ranked"

    def rank(self, view: View, request: RequestState) -> float:
        """Return what requests are sorted by, least first."""
        return request.order

    def may_lose(self, request: RequestState) -> bool:
        """Return whether a running request may be displaced."""
        return True

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose as many as there are seats, best first, then whoever runs besides."""
        everyone: Iterable[RequestState] = (*view.running, *queued(view))
        best = nsmallest(view.max_num_seqs, everyone, key=lambda state: (self.rank(view, state), state.order))
        yield from whole(best)
        yield from whole([request for request in view.running if request not in best])

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the last in rank."""
        return max(candidates, key=lambda state: (self.rank(view, state), state.order))

    def displace(
        self, view: View, newcomer: RequestState, candidates: Sequence[RequestState]
    ) -> RequestState | None:
        """Choose the last in rank, if it ranks behind the newcomer and may lose its seat."""
        losers = [state for state in candidates if self.may_lose(state)]
        worst = self.victim(view, losers) if losers else None
        behind = worst is not None and self.rank(view, worst) > self.rank(view, newcomer)
        return worst if behind else None


class ShortestRemaining(Ranked):
    """Serve the shortest predicted remaining output first, and preempt for it (SRPT; Schrage, 1968)."""

    name = "srpt"
    family = "size"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the predicted number of tokens still to come."""
        return request.predicted_remaining


class Trail(ShortestRemaining):
    """Shortest predicted remaining output first; only a young request may be displaced (TRAIL, ICLR'25).

    The prediction is not refreshed from the model's embeddings, as the paper does: it counts down.

    Args:
        c: A request may be displaced while it has generated fewer than c times its predicted output.
    """

    name = "trail"

    def __init__(self, c: float = 0.8) -> None:
        self.c = c

    def may_lose(self, request: RequestState) -> bool:
        """Return whether the request is young."""
        expected = request.num_output_tokens + request.predicted_remaining
        return request.num_output_tokens < int(self.c * expected)


class SkipJoinFeedback(Ranked):
    """Multi-level feedback: levels of doubling quanta, entered by prompt length (FastServe, 2023).

    A newcomer skips the levels whose quantum its prompt would use up. Who has used its quantum falls a level;
    who has waited `aging` seconds rises to the first. Service is counted in tokens, prompt included.

    Args:
        levels: Number of levels.
        quantum: Tokens of service at the first level; it doubles with each level.
        aging: Seconds since the last service after which a request rises.
    """

    name = "mlfq"
    family = "size"

    def __init__(self, levels: int = 4, quantum: int = 64, aging: float = 60.0) -> None:
        self.levels, self.quantum, self.aging = levels, quantum, aging
        self._seen: dict[str, tuple[int, int, float]] = {}

    def rank(self, view: View, request: RequestState) -> float:
        """Return the request's level."""
        level, used, since = self._seen.get(request.id, (self._entry(request), 0, request.request.arrival))
        if request.seat is None and view.now - since >= self.aging:
            level, used = 0, 0
        self._seen[request.id] = level, used, view.now if request.seat is not None else since
        return level

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Count the service, and let the request fall when its quantum is used up."""
        level, used, since = self._seen.get(request.id, (self._entry(request), 0, request.request.arrival))
        used += num_tokens
        if used >= self.quantum << level and level < self.levels - 1:
            level, used = level + 1, 0
        self._seen[request.id] = level, used, since

    def _entry(self, request: RequestState) -> int:
        fitting = (n for n in range(self.levels) if request.num_prompt_tokens < self.quantum << n)
        return next(fitting, self.levels - 1)


class MemoryCheckedShortestFirst(ShortestJobFirst):
    """Admit the shortest first, as long as memory suffices until each predicted end (MC-SF, 2025).

    Source: Jaillet et al., arXiv 2502.07115: at each instant at which a request is predicted to finish, the
    tokens then held by all who still run must fit the pool.
    """

    name = "mc_sf"

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue from short to long while it fits."""
        yield from whole(in_turn(view))
        held = [(state.num_tokens, state.predicted_remaining) for state in view.running]
        for state in sorted(queued(view), key=lambda request: (request.predicted_remaining, request.order)):
            held.append((state.num_tokens, state.predicted_remaining))
            fits = len(held) == 1 or _fits(held, view.num_blocks * view.block_size)
            if not view.admitting or not fits:
                return
            yield state, state.num_pending_tokens


def _fits(held: Sequence[tuple[int, int]], capacity: int) -> bool:
    return all(
        sum(tokens + end for tokens, left in held if left >= end) <= capacity
        for end in {left for _, left in held}
    )
