"""Batching disciplines: when requests may join a batch and which phase goes first."""

from collections.abc import Iterator, Sequence
from itertools import islice

from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.request import RequestState


class Static(Policy):
    """Request-level batching, as in FasterTransformer or `generate` on a padded batch.

    The seats are filled only when all are empty. All prompts are computed before anyone decodes, and a
    finished request keeps its seat, its blocks and its row until the longest request is done. A batch that a
    small token budget fills over several steps ends early if all who joined so far are done.

    Args:
        release: Let finished rows leave at once; still nobody joins.
    """

    name = "static"
    joins_late = False

    def __init__(self, release: bool = False) -> None:
        self.keeps_seats = not release
        self.name = "static:release" if release else "static"
        self._joining: list[RequestState] = []

    def propose(self, view: View) -> Iterator[Proposal]:
        """Compute the prompts of a batch that is being filled; decode once it is closed."""
        if not view.running:
            self._joining = list(islice(queued(view), view.max_num_seqs))
        yield from whole([request for request in view.running if request.is_prefill])
        yield from whole([request for request in self._joining if request.seat is None])
        # Resumed with budget left: whoever is still outside did not fit the pool, so the batch is closed.
        self._joining = []
        if view.token_budget == view.max_num_batched_tokens:
            yield from whole(in_turn(view))


class PrefillFirst(Policy):
    """Prompts before decodes, never both in one step, and none while anyone is swapped out, as in vLLM v0."""

    name = "prefill_first"

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose prompts; decodes only if no prompt could be served."""
        yield from whole([request for request in view.running if request.is_prefill])
        if not any(True for _ in view.swapped):
            yield from joining(view, view.waiting)
        if view.token_budget == view.max_num_batched_tokens:
            yield from whole(in_turn(view))
            yield from joining(view, view.swapped)


class VllmV1(Policy):
    """Running requests in their order, then the queue, under one token budget, as in vLLM v1 (0.32).

    There are no phases: everyone wants all that is pending, so a prompt is cut where the budget ends. Nobody
    joins in a step that preempts.

    Args:
        priority: Take the queue by (priority, arrival), and as victim the last in that order.
    """

    name = "vllm_v1"
    hits_at_once = True

    def __init__(self, priority: bool = False) -> None:
        self._by_priority = priority
        self.name = "vllm_v1:priority" if priority else "vllm_v1"

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then whoever waits."""
        for request in view.running:
            if request.seat is None:
                continue
            yield request, request.num_pending_tokens
            if request.seat is None:
                # It had to make room itself: whoever comes behind it is not served in this step.
                return
        waiting = queued(view)
        yield from joining(view, sorted(waiting, key=_urgency) if self._by_priority else waiting)

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the latest comer, or the least urgent."""
        return max(candidates, key=_urgency) if self._by_priority else candidates[-1]


def _urgency(state: RequestState) -> tuple[int, float, int]:
    return state.request.priority, state.request.arrival, state.order
