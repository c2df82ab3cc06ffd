"""Back-pressure: how many accepted requests may wait for their first seat."""

from cbresearch.config import QueueLimits
from cbresearch.request import Request


class QueueFull(RuntimeError):
    """Too much waits already; the request was not taken, and may be sent again later."""


class AdmissionQueue:
    """Count the requests that were accepted and have not had a seat yet.

    Args:
        limits: How much may wait.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._num_prompt_tokens: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no request waits."""
        return not self._num_prompt_tokens

    def enter(self, request: Request) -> None:
        """Let a request wait.

        Raises:
            QueueFull: There is no room for it; the message has the numbers.
        """
        num_requests, num_tokens = len(self._num_prompt_tokens), sum(self._num_prompt_tokens.values())
        most_requests, most_tokens = self._limits.max_num_requests, self._limits.max_num_tokens
        if most_requests is not None and num_requests + 1 > most_requests:
            raise QueueFull(
                f"request {request.id!r}: {num_requests} requests wait for a seat, and the queue takes "
                f"{most_requests}; send it again later or raise max_num_requests"
            )
        if most_tokens is not None and num_tokens + request.num_prompt_tokens > most_tokens:
            raise QueueFull(
                f"request {request.id!r}: its {request.num_prompt_tokens} prompt tokens and the {num_tokens} "
                f"that wait for a seat are over the queue's {most_tokens}; send it again later or raise "
                "max_num_tokens"
            )
        self._num_prompt_tokens[request.id] = request.num_prompt_tokens

    def leave(self, request_id: str) -> None:
        """Let a request go, if it is still there."""
        self._num_prompt_tokens.pop(request_id, None)
