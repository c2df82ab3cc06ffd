"""Fairness between clients, and the prefixes that requests share."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from cbresearch.checks import Number, Size
from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.request import RequestState


class Charging(Policy):
    """First come, first served, with an account for each client; a base for fair shares.

    Attributes:
        accounts: Tokens of each client, weighted: what it was served, or the credit that it has left.
        output_weight: What an output token adds.
    """

    output_weight = 1.0

    def begin(self) -> None:
        """Clear all accounts."""
        self.accounts: defaultdict[str, float] = defaultdict(float)
        self._charged: dict[str, int] = {}
        self._waiting: list[RequestState] = []

    def on_client_active(self, client: str, active: Iterable[str]) -> None:
        """Note that a client without waiting requests now has one; the `active` clients had some before."""

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Charge the output tokens that are new; a chunk of a prompt yields none."""
        new = request.num_output_tokens - self._charged.pop(request.id, 0)
        if request.finish_reason is None:
            self._charged[request.id] = request.num_output_tokens
        self.accounts[request.client] += self.output_weight * new

    def group_waiting_by_client(self, view: View) -> dict[str, list[RequestState]]:
        """Return each client's waiting requests in order; calls `on_client_active` for new clients."""
        still = [one for one in self._waiting if one.seat is None and one.finish_reason is None]
        active = {request.client for request in still}
        self._waiting = list(queued(view))
        groups: dict[str, list[RequestState]] = {}
        for request in self._waiting:
            if request.client not in active:
                self.on_client_active(request.client, active)
                active.add(request.client)
            groups.setdefault(request.client, []).append(request)
        return groups


class VirtualTokenCounter(Charging):
    """Serve the client that has been served least; a request that does not fit ends the admission.

    A client's counter grows with each prompt when it is admitted and with each output token. When a client
    without waiting requests sends one, its counter is lifted to the least counter among the clients that have
    requests waiting, so that it cannot save up.

    Args:
        prompt_weight: What a prompt token counts.
        output_weight: What an output token counts.
    """

    name = "vtc"
    family = "fairness"
    source = "VTC (OSDI'24) and its published code"

    def __init__(self, prompt_weight: Size = 1.0, output_weight: Size = 2.0) -> None:
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        # Sums of whole numbers are exact: it makes no difference in how many parts they are added.

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the head of the least served client's queue, repeatedly."""
        yield from whole(in_turn(view))
        queues = self.group_waiting_by_client(view)
        while queues and view.admitting:
            client = min(queues, key=lambda name: (self.accounts[name], name))
            head = queues[client].pop(0)
            is_new = head.first_scheduled is None
            yield head, head.num_pending_tokens
            if is_new and head.seat is not None:
                self.accounts[client] += self.prompt_weight * head.num_prompt_tokens
            if not queues[client]:
                del queues[client]

    def on_client_active(self, client: str, active: Iterable[str]) -> None:
        """Lift the client's counter."""
        least = min((self.accounts[other] for other in active), default=0.0)
        self.accounts[client] = max(self.accounts[client], least)


class DeficitLongestPrefix(Charging):
    """Longest cached prefix first, among clients that have credit left.

    Uncached prompt tokens are charged at an admission and output tokens as they come; tokens recomputed after
    a preemption are charged again. When no client with waiting requests has credit, each such client gets a
    quantum. That an account may fall below 0, by one request at a time, is an interpretation.

    Args:
        quantum: Tokens of credit at a time.
    """

    name = "dlpm"
    family = "fairness"
    source = "DLPM (2025, arXiv 2501.14312)"
    output_weight = -1.0

    def __init__(self, quantum: Number = 512) -> None:
        self.quantum = quantum

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the longest cached prefix of clients with credit, repeatedly."""
        yield from whole(in_turn(view))
        waiting = by_cached_prefix(view, queued(view)) if view.admitting else []
        while waiting and view.admitting:
            clients = {request.client for request in waiting}
            if all(self.accounts[client] <= 0 for client in clients):
                # As many quanta at once as it takes until one of them has credit.
                num_quanta = min(-self.accounts[client] // self.quantum for client in clients) + 1
                for client in clients:
                    self.accounts[client] += num_quanta * self.quantum
            head = next(request for request in waiting if self.accounts[request.client] > 0)
            waiting.remove(head)
            yield head, head.num_pending_tokens
            if head.seat is not None:
                self.accounts[head.client] -= head.num_pending_tokens


class LongestPrefixMatch(Policy):
    """Admit the longest cached prefix first; a queue that is long is served in its order.

    A request that has little cached, but shares a prefix with another waiting one, is better off behind it:
    the first of each such group goes ahead, the others find the prefix cached. While the queue is short, a
    request without a cached prefix starves for as long as others with one come.

    Args:
        most: Length of the queue beyond which prefixes are not looked up.
        shared: Tokens of a common prefix that make a request wait for another one, unless more are cached.
    """

    name = "lpm"
    family = "locality"
    source = "SGLang, lpm"
    fast_forward = True

    def __init__(self, most: Number = 128, shared: Number = 32) -> None:
        self.most, self.shared = most, shared

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the queue by cached prefix."""
        yield from whole(in_turn(view))
        waiting = list(queued(view)) if view.admitting else []
        if len(waiting) <= self.most:
            waiting = self.in_order(view, waiting)
        yield from joining(view, waiting)

    def in_order(self, view: View, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Return the queue by cached prefix, with the requests last that may find more cached later."""
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
