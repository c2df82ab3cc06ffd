"""Urgency: priorities, and promises about time."""

import math
from collections.abc import Sequence

from cbresearch.checks import PositiveSize, Size
from cbresearch.policies.base import View
from cbresearch.policies.size import Ranked, ShortestJobFirst
from cbresearch.request import RequestState


class Priority(Ranked):
    """Serve by (priority, arrival), smaller first; a more urgent waiting request displaces a running one.

    Equals never displace one another. A preempted request keeps its place in that order. One that is less
    urgent starves for as long as more urgent ones come.
    """

    name = "priority"
    family = "slo"
    source = "vLLM and SGLang, priority scheduling"
    fast_forward = True

    def rank(self, view: View, request: RequestState) -> float:
        """Return the priority."""
        return request.priority


class EarliestDeadline(Ranked):
    """Serve the earliest deadline first, and preempt for it; without a deadline a request comes last.

    Such a request starves for as long as others come with a deadline.
    """

    name = "edf"
    family = "slo"
    source = "EDF (Liu and Layland, 1973)"
    fast_forward = True

    def rank(self, view: View, request: RequestState) -> float:
        """Return the deadline."""
        deadline = request.deadline
        return math.inf if deadline is None else deadline


class LeastSlack(ShortestJobFirst):
    """Admit by the slack left for waiting: deadline − now − the prefill's time, least first.

    Without a deadline a request comes last, and starves for as long as others come with one. Medha and vidur
    preempt prefills for it; here it only orders the queue, an interpretation. Without a step-time model
    the prefill's time is 0.

    Args:
        relative: Divide the slack by the time between arrival and deadline (LARS), so that a long request,
            with a late deadline, is not always the last.
    """

    name = "least_slack"
    family = "slo"
    source = "Medha (2024), LRS and LARS; vidur"

    def __init__(self, relative: bool = False) -> None:
        self.relative = relative

    def rank(self, view: View, request: RequestState) -> float:
        """Return the slack in seconds, or as a share."""
        if (deadline := request.deadline) is None:
            return math.inf
        slack = deadline - view.now - view.step_seconds(request.num_pending_tokens, request.num_tokens)
        return slack / max(deadline - request.arrival, 1e-9) if self.relative else slack


class Andes(Ranked):
    """Serve the request that gains most quality of experience per KV token.

    A reader expects the first token after `ttft` seconds and then `speed` tokens a second. A request behind
    that gains by being served; one ahead of it has a buffer to read from, and may be displaced. The paper's
    gain is an integral over a horizon, in a greedy knapsack; here it is the tokens by which a request is
    behind now, an interpretation.

    Args:
        ttft: Seconds until the first token is expected.
        speed: Tokens a second that are read.
    """

    name = "andes"
    family = "slo"
    source = "Andes (2024)"

    def __init__(self, ttft: Size = 1.0, speed: PositiveSize = 5.0) -> None:
        self.ttft, self.speed = ttft, speed

    def rank(self, view: View, request: RequestState) -> float:
        """Return minus the tokens behind, per token of KV."""
        late = view.now - request.arrival - self.ttft
        expected = 1 + late * self.speed if late >= 0 else 0.0
        return (request.num_output_tokens - expected) / request.num_tokens

    def may_lose(self, view: View, request: RequestState) -> bool:
        """Return whether a request is not behind its reader."""
        return self.rank(view, request) >= 0

    def displace(
        self, view: View, waiting: RequestState, candidates: Sequence[RequestState]
    ) -> RequestState | None:
        """Choose the request that is farthest ahead, for a waiting one that is behind."""
        return None if self.may_lose(view, waiting) else super().displace(view, waiting, candidates)
