"""Who serves a request, of several replicas."""

from collections.abc import Sequence
from itertools import count
from typing import Protocol

from cbresearch.cluster.replica import Replica
from cbresearch.request import Request


class Router(Protocol):
    """Decides who serves a request."""

    name: str

    def begin(self) -> None:
        """Forget earlier runs."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """Return one of the replicas, all of which can serve the request."""


class RoundRobin:
    """One after the other, whatever they have to do."""

    name = "round_robin"

    def begin(self) -> None:
        """Begin with the first."""
        self._turns = count()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """Return the next one."""
        return replicas[next(self._turns) % len(replicas)]


class LeastOutstanding:
    """The one with the fewest unfinished requests; of several, the first."""

    name = "least_outstanding"

    def begin(self) -> None:
        """There is nothing to forget."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """Return the one with the fewest."""
        return min(replicas, key=lambda replica: (replica.num_outstanding, replica.place))


class LeastKv:
    """The one with the least of its KV pool held or asked for; of several, the first."""

    name = "least_kv"

    def begin(self) -> None:
        """There is nothing to forget."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """Return the one with the most room."""
        return min(replicas, key=lambda replica: (replica.kv_share, replica.place))


class PrefixAffinity:
    """The one that has most of the prompt in its cache, unless it has too much to do.

    Whoever has `slack` more unfinished requests than the least busy one is passed over. Where nobody has
    anything, the one to which the same beginning was sent last gets it, or else the least busy.

    Source: the idea of SGLang's cache-aware router (arXiv 2312.07104 has the cache); the rule is simpler.

    Args:
        slack: Unfinished requests.
        head: Tokens of a prompt that stand for its beginning.
    """

    name = "prefix_affinity"

    def __init__(self, slack: int = 8, head: int = 16) -> None:
        if slack < 0 or head < 1:
            raise ValueError(f"slack is {slack!r} and head is {head!r}; give at least 0 and 1")
        self._slack = slack
        self._head = head

    def begin(self) -> None:
        """Forget what was sent where."""
        self._last: dict[tuple[int, ...], int] = {}

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """Return the one with the longest cached prefix among those that are not too busy."""
        least = min(replica.num_outstanding for replica in replicas)
        fit = [replica for replica in replicas if replica.num_outstanding <= least + self._slack]
        head = request.prompt[: self._head] if isinstance(request.prompt, tuple) else ()
        last = self._last.get(head)
        chosen = max(
            fit,
            key=lambda replica: (
                replica.num_cached_tokens(request),
                bool(head) and replica.place == last,
                -replica.num_outstanding,
                -replica.place,
            ),
        )
        self._last[head] = chosen.place
        return chosen
