"""Size-based orders: who is expected to be done soonest."""

from collections.abc import Iterator

from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole


class ShortestJobFirst(Policy):
    """Admit the request with the shortest predicted output first, without preempting for it (SSJF, 2024).

    Without a prediction, `max_tokens` stands in: where end-of-sequence tokens are ignored, that is the truth.
    """

    name = "sjf"

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue from short to long."""
        yield from whole(in_turn(view))
        if view.admitting:
            by_size = sorted(queued(view), key=lambda request: (request.predicted_remaining, request.order))
            yield from joining(view, by_size)
