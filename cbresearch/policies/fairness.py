"""Fairness between clients, priorities, and promises about time."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from cbresearch.policies.base import Policy, Proposal, View, in_turn, queued, whole
from cbresearch.policies.size import Ranked, ShortestJobFirst
from cbresearch.request import RequestState


class VirtualTokenCounter(Policy):
    """Serve the client that has been served least (VTC, OSDI'24).

    Nobody is admitted past the first who does not fit.

    A client's counter grows with its prompts when they are admitted and with its output tokens. A client that
    comes back is lifted to the least counter among those who wait, so that it cannot save up.

    Args:
        prompt_weight: What a prompt token counts.
        output_weight: What an output token counts.
    """

    name = "vtc"
    family = "fairness"

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._active: set[str] = set()

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the head of the least served client's queue, again and again."""
        yield from whole(in_turn(view))
        queues: defaultdict[str, list[RequestState]] = defaultdict(list)
        for request in queued(view):
            queues[request.request.client].append(request)
        waited = [self.counters[client] for client in queues if client in self._active]
        for client in queues.keys() - self._active:
            self.counters[client] = max(self.counters[client], min(waited, default=0.0))
        while queues and view.admitting:
            client = min(queues, key=lambda name: (self.counters[name], name))
            head = queues[client].pop(0)
            yield head, head.num_pending_tokens
            if head.seat is not None and not head.output_token_ids:
                self.counters[client] += self.prompt_weight * head.num_prompt_tokens
            if not queues[client]:
                del queues[client]
        self._active = {request.request.client for request in queued(view) if request.seat is None}

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Count the output token that the step gave."""
        if not request.num_pending_tokens > 1:
            self.counters[request.request.client] += self.output_weight


class DeficitLongestPrefix(Policy):
    """Longest cached prefix first, among clients that have credit left (DLPM, 2025).

    Uncached prompt tokens and output tokens are charged. When no client that waits has credit, each of them
    gets a quantum.

    Args:
        quantum: Tokens of credit at a time.
    """

    name = "dlpm"
    family = "fairness"

    def __init__(self, quantum: int = 512) -> None:
        self.quantum = quantum
        self.credit: defaultdict[str, int] = defaultdict(int)

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the longest cached prefix of a client with credit, again and again."""
        yield from whole(in_turn(view))
        waiting = by_cached_prefix(view, queued(view)) if view.admitting else []
        while waiting and view.admitting:
            while all(self.credit[request.request.client] <= 0 for request in waiting):
                for client in {request.request.client for request in waiting}:
                    self.credit[client] += self.quantum
            head = next(request for request in waiting if self.credit[request.request.client] > 0)
            waiting.remove(head)
            yield head, head.num_pending_tokens

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Charge what was computed, a decoded token once."""
        self.credit[request.request.client] -= num_tokens


class LongestPrefixMatch(Policy):
    """Admit the longest cached prefix first; a long queue is served in its order (SGLang's lpm).

    Who has little cached, but shares a prefix with another who waits, is better off behind that one: the
    first of each such pair goes ahead, the others find it cached.

    Args:
        most: Length of the queue beyond which prefixes are not looked up.
        shared: Tokens of a common prefix that make a request wait for another one.
    """

    name = "lpm"
    family = "fairness"

    def __init__(self, most: int = 128, shared: int = 32) -> None:
        self.most, self.shared = most, shared

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue by cached prefix."""
        yield from whole(in_turn(view))
        waiting = list(queued(view)) if view.admitting else []
        if len(waiting) > self.most:
            yield from whole(waiting)
            return
        seen: set[tuple[int, ...]] = set()
        deferred = []
        for request in by_cached_prefix(view, waiting):
            head = request.token_ids[: self.shared]
            if head in seen and len(head) == self.shared and view.num_cached_tokens(request) <= self.shared:
                deferred.append(request)
                continue
            seen.add(head)
            yield request, request.num_pending_tokens
        yield from whole(deferred)


def by_cached_prefix(view: View, requests: Iterable[RequestState]) -> list[RequestState]:
    """Return requests sorted by the tokens of their prompt that are cached, most first."""
    return sorted(requests, key=lambda request: (-view.num_cached_tokens(request), request.order))


class Priority(Ranked):
    """Serve by (priority, arrival), smaller first; a more urgent newcomer displaces a running one."""

    name = "priority"
    family = "fairness"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the priority; equals never displace one another."""
        return request.request.priority


class EarliestDeadline(Ranked):
    """Serve the earliest deadline first, and preempt for it (EDF; Liu and Layland, 1973)."""

    name = "edf"
    family = "slo"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the deadline; without one a request comes last."""
        deadline = request.request.deadline
        return math.inf if deadline is None else deadline


class LeastSlack(ShortestJobFirst):
    """Admit whoever can least afford to wait: deadline − now − the prefill's time, least first (LRS).

    Source: Medha (2024) and vidur, which use it with preemptible prefills; here it orders the queue.
    """

    name = "least_slack"
    family = "slo"

    def rank(self, view: View, request: RequestState) -> float:
        """Return the slack in seconds; without a deadline a request comes last."""
        deadline = request.request.deadline
        if deadline is None:
            return math.inf
        return deadline - view.now - view.step_seconds(request.num_pending_tokens, request.num_tokens)


class Andes(Ranked):
    """Serve whoever gains most quality of experience per KV token (greedy knapsack of Andes, 2024).

    A reader expects the first token after `ttft` seconds and then `speed` tokens a second. Who is behind that
    gains by being served; who is ahead has a buffer to read from. The paper's gain is an integral over a
    horizon; here it is the tokens by which a request is behind now, an interpretation.

    Args:
        ttft: Seconds until the first token is expected.
        speed: Tokens a second that are read.
    """

    name = "andes"
    family = "slo"

    def __init__(self, ttft: float = 1.0, speed: float = 5.0) -> None:
        self.ttft, self.speed = ttft, speed

    def rank(self, view: View, request: RequestState) -> float:
        """Return minus the tokens behind, per token of KV."""
        expected = max(0.0, view.now - request.request.arrival - self.ttft) * self.speed
        return (request.num_output_tokens - expected) / request.num_tokens

    def may_lose(self, request: RequestState) -> bool:
        """Return whether a request has tokens to read from while it waits."""
        return bool(request.output_token_ids)
