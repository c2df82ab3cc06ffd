"""Who waits for a first seat, and how many may."""

from cbresearch.config import QueueLimits
from cbresearch.request import Request


class QueueFull(RuntimeError):
    """Too much waits already; the request was not taken, and may be sent again later."""


class WaitingRoom:
    """Count the requests that were accepted and have not had a seat yet.

    Args:
        limits: How much may wait.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Return whether nobody waits."""
        return not self._num_prompt_tokens

    def enter(self, request: Request) -> None:
        """Let a request wait.

        Raises:
            QueueFull: There is no room for it; the message has the numbers.
        """
        num_requests, limits = len(self._num_prompt_tokens), self._limits
        if limits.max_num_requests is not None and num_requests + 1 > limits.max_num_requests:
            raise QueueFull(
                f"request {request.id!r}: {num_requests} requests wait for a seat, and the queue takes "
                f"{limits.max_num_requests}; send it again later or raise max_num_requests"
            )
        num_tokens = request.num_prompt_tokens
        if limits.max_num_tokens is not None and self._num_tokens + num_tokens > limits.max_num_tokens:
            raise QueueFull(
                f"request {request.id!r}: its {num_tokens} prompt tokens and the {self._num_tokens} that "
                f"wait for a seat are over the queue's {limits.max_num_tokens}; send it again later or raise "
                "max_num_tokens"
            )
        self._num_prompt_tokens[request.id] = num_tokens
        self._num_tokens += num_tokens

    def leave(self, request_id: str) -> None:
        """Let a request go, if it is still there."""
        self._num_tokens -= self._num_prompt_tokens.pop(request_id, 0)
