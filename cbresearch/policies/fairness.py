"""Fairness between clients, and the prefixes that requests share."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.request import RequestState


class Charging(Policy):
    """First come, first served, with an account for each client; a base for fair shares."""

    def begin(self) -> None:
        """Clear all accounts."""
        self._told: dict[str, int] = {}
        self._waited: list[RequestState] = []

    def charge(self, client: str, num_outputs: int) -> None:
        """Take note that a client was given output tokens."""

    def comes(self, client: str, others: Iterable[str]) -> None:
        """Take note that a client waits who did not; others do already."""

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Charge the output tokens that are new; a part of a prompt yields none."""
        new = request.num_output_tokens - self._told.pop(request.id, 0)
        if request.finish_reason is None:
            self._told[request.id] = request.num_output_tokens
        self.charge(request.client, new)

    def queues(self, view: View) -> dict[str, list[RequestState]]:
        """Return who waits, by client."""
        left = (state for state in self._waited if state.seat is None and state.finish_reason is None)
        known = {state.client for state in left}
        self._waited = list(queued(view))
        queues: dict[str, list[RequestState]] = {}
        for state in self._waited:
            client = state.client
            if client not in known:
                self.comes(client, known)
                known.add(client)
            queues.setdefault(client, []).append(state)
        return queues


class VirtualTokenCounter(Charging):
    """Serve the client that has been served least; nobody is admitted past the first who does not fit.

    A client's counter grows with each prompt when it is admitted and with each output token. A client of whom
    nobody waited is lifted to the least counter among those who wait, so that it cannot save up.

    Args:
        prompt_weight: What a prompt token counts.
        output_weight: What an output token counts.
    """

    name = "vtc"
    family = "fairness"
    source = "VTC (OSDI'24) and its published code"

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        # Sums of whole numbers are exact: it makes no difference in how many parts they are added.

    def begin(self) -> None:
        """Set all counters to 0."""
        super().begin()
        self.counters: defaultdict[str, float] = defaultdict(float)

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the head of the least served client's queue, again and again."""
        yield from whole(in_turn(view))
        queues = self.queues(view)
        while queues and view.admitting:
            client = min(queues, key=lambda name: (self.counters[name], name))
            head = queues[client].pop(0)
            is_new = head.first_scheduled is None
            yield head, head.num_pending_tokens
            if is_new and head.seat is not None:
                self.counters[client] += self.prompt_weight * head.num_prompt_tokens
            if not queues[client]:
                del queues[client]

    def charge(self, client: str, num_outputs: int) -> None:
        """Count output tokens."""
        self.counters[client] += self.output_weight * num_outputs

    def comes(self, client: str, others: Iterable[str]) -> None:
        """Lift the client's counter."""
        least = min((self.counters[other] for other in others), default=0.0)
        self.counters[client] = max(self.counters[client], least)


class DeficitLongestPrefix(Charging):
    """Longest cached prefix first, among clients that have credit left.

    Uncached prompt tokens are charged at an admission and output tokens as they come; what a preemption makes
    to be computed again is charged again. When no client that waits has credit, each of them gets a quantum.
    That an account may fall below 0, by one request at a time, is an interpretation.

    Args:
        quantum: Tokens of credit at a time.
    """

    name = "dlpm"
    family = "fairness"
    source = "DLPM (2025, arXiv 2501.14312)"

    def __init__(self, quantum: int = 512) -> None:
        self.quantum = quantum

    def begin(self) -> None:
        """Give nobody credit."""
        super().begin()
        self.credit: defaultdict[str, int] = defaultdict(int)

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the longest cached prefix of a client with credit, again and again."""
        yield from whole(in_turn(view))
        waiting = by_cached_prefix(view, queued(view)) if view.admitting else []
        while waiting and view.admitting:
            while all(self.credit[request.client] <= 0 for request in waiting):
                for client in {request.client for request in waiting}:
                    self.credit[client] += self.quantum
            head = next(request for request in waiting if self.credit[request.client] > 0)
            waiting.remove(head)
            yield head, head.num_pending_tokens
            if head.seat is not None:
                self.credit[head.request.client] -= head.num_pending_tokens

    def charge(self, client: str, num_outputs: int) -> None:
        """Charge output tokens."""
        self.credit[client] -= num_outputs


class LongestPrefixMatch(Policy):
    """Admit the longest cached prefix first; a queue that is long is served in its order.

    Whoever has little cached, but shares a prefix with another who waits, is better off behind that one: the
    first of each such pair goes ahead, the others find it cached.

    Args:
        most: Length of the queue beyond which prefixes are not looked up.
        shared: Tokens of a common prefix that make a request wait for another one, unless more are cached.
    """

    name = "lpm"
    family = "locality"
    source = "SGLang, lpm"
    fast_forward = True

    def __init__(self, most: int = 128, shared: int = 32) -> None:
        self.most, self.shared = most, shared

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue by cached prefix."""
        yield from whole(in_turn(view))
        waiting = list(queued(view)) if view.admitting else []
        if len(waiting) <= self.most:
            waiting = self.in_order(view, waiting)
        yield from joining(view, waiting)

    def in_order(self, view: View, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Return the queue by cached prefix, with those behind that may find more cached later."""
        seen: set[tuple[int, ...]] = set()
        ahead: list[RequestState] = []
        behind: list[RequestState] = []
        for request in by_cached_prefix(view, waiting):
            head = request.token_ids[: self.shared]
            is_little = view.num_cached_tokens(request) <= self.shared
            (behind if is_little and head in seen else ahead).append(request)
            if len(head) == self.shared:
                seen.add(head)
        return ahead + behind


def by_cached_prefix(view: View, requests: Iterable[RequestState]) -> list[RequestState]:
    """Return requests sorted by the tokens of their prompt that are cached, most first."""
    return sorted(requests, key=lambda request: (-view.num_cached_tokens(request), request.order))
