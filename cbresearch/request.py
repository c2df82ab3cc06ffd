"""A request: what a client asks for, and how far a server has come with it."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from operator import index
from typing import Any

Prompt = str | int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Say how output tokens are chosen; decoding is greedy.

    Attributes:
        ignore_eos: Go on to `max_tokens` even where the model emits an end-of-sequence token.
    """

    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One immutable generation request.

    Attributes:
        id: Name that is unique within a run.
        prompt: Token ids, or a length in tokens (enough for a simulation), or text (to be turned into
            token ids by `workloads.resolve_prompts` before it is served).
        max_tokens: Largest number of output tokens.
        arrival: Seconds since the start of the run at which the request arrives.
        sampling: How output tokens are chosen.
        priority: Smaller is more urgent.
        client: Who asks, for fair-share policies.
        deadline: Seconds since the start of the run by which the answer is wanted.
        cache_salt: Requests share cached prefixes only with requests of the same salt; None is a salt too.
        group: Requests of one group and one prompt are parallel samples: they share the prompt's KV even
            without a prefix cache (see `parallel_samples`).
        predicted_output: Number of output tokens that a predictor expects; all that a policy may know.
        output_length: Number of output tokens after which the answer really ends, where it is known
            beforehand (a trace, an earlier run). It is for the simulator, and a policy that reads it cheats;
            equality ignores it.

    Raises:
        ValueError: A field is out of range; the message names the request, the value and the remedy.
    """

    id: str
    prompt: Prompt
    max_tokens: int
    arrival: float = 0.0
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    client: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    group: str | None = None
    predicted_output: int | None = None
    output_length: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"a request's id is {self.id!r}; it must be a text that is not empty")
        object.__setattr__(self, "prompt", _checked_prompt(self.id, self.prompt))
        for name, optional in (("max_tokens", False), ("predicted_output", True), ("output_length", True)):
            value = getattr(self, name)
            if value is not None or not optional:
                object.__setattr__(self, name, _checked_count(self.id, name, value))
        for name, optional in (("arrival", False), ("deadline", True)):
            seconds = getattr(self, name)
            if seconds is not None or not optional:
                object.__setattr__(self, name, _checked_seconds(self.id, name, seconds))

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt's length in tokens; a text has none before it is tokenized."""
        if isinstance(self.prompt, int):
            return self.prompt
        if isinstance(self.prompt, str):
            raise ValueError(
                f"request {self.id!r}: the prompt is text; workloads.resolve_prompts turns it into token ids"
            )
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was turned away, with the reason; it keeps its place in the results."""

    id: str
    error: str
    arrival: float = 0.0


class RequestStatus(enum.Enum):
    """The queue that a request is in; it is in exactly one."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


def parallel_samples(request: Request, num_samples: int) -> tuple[Request, ...]:
    """Return `num_samples` requests for as many answers to one prompt, which share the prompt's KV.

    Their ids are the request's id with "/0", "/1" and so on behind it; the id itself names their group.

    Raises:
        ValueError: The number is below 1.
    """
    count = _checked_count(request.id, "num_samples", num_samples)
    return tuple(replace(request, id=f"{request.id}/{place}", group=request.id) for place in range(count))


class RequestState:
    """A request on its way through the scheduler, which alone changes it; policies read it.

    Attributes:
        request: The immutable request.
        order: Position in the order of submission; breaks every tie.
        status: The queue it is in.
        seat: Index of the batch slot it holds, or None.
        num_computed_tokens: Tokens whose KV is in the cache.
        output_token_ids: Tokens generated so far; a preemption keeps them.
        num_preemptions: How often it lost its seat before it was finished.
        token_times: Seconds at which each output token came out.
        first_scheduled: Seconds at which it first got a seat, or None.
        num_covered_tokens: Tokens whose KV it has had at any time, computed or found in the prefix cache.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache before it was ever computed.
        num_recomputed_tokens: Tokens computed again because a preemption threw their KV away.
        num_forgotten_tokens: Tokens whose KV was given back since they fell out of the sliding window.
        scheduled_step: Index of the last step that served it, or -1.
        finish_reason: "stop", "length" or "abort" once finished.
    """

    __slots__ = (
        "finish_reason",
        "first_scheduled",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_covered_tokens",
        "num_forgotten_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_tokens",
        "order",
        "output_token_ids",
        "request",
        "scheduled_step",
        "seat",
        "status",
        "token_times",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.order = order
        self.status = RequestStatus.WAITING
        self.seat: int | None = None
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_covered_tokens = 0
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_forgotten_tokens = 0
        self.num_preemptions = 0
        self.output_token_ids: list[int] = []
        self.token_times: list[float] = []
        self.first_scheduled: float | None = None
        self.scheduled_step = -1
        self.finish_reason: str | None = None

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.request.id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all known tokens, prompt and output; empty if of the prompt only the length is known."""
        prompt = self.request.prompt
        return (*prompt, *self.output_token_ids) if isinstance(prompt, tuple) else ()

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens were generated so far."""
        return len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Return how many known tokens lack their KV: the rest of the prompt, or 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_prefill(self) -> bool:
        """Return whether more than the newest token lacks its KV, or no token was generated yet."""
        return self.num_pending_tokens > 1 or not self.output_token_ids

    @property
    def predicted_remaining(self) -> int:
        """Return the predicted number of output tokens still to come, at least 1.

        Without a prediction, what `max_tokens` leaves.
        """
        expected = self.request.predicted_output or self.request.max_tokens
        return max(1, expected - len(self.output_token_ids))

    def __repr__(self) -> str:
        return (
            f"RequestState({self.id!r}, {self.status.value}, computed {self.num_computed_tokens} of "
            f"{self.num_tokens}, {self.num_output_tokens} generated)"
        )


def _checked_count(request_id: str, name: str, value: Any) -> int:
    """Return a count as a plain int, whatever integer type it came as."""
    try:
        count = None if isinstance(value, bool) else index(value)
    except TypeError:
        count = None
    if count is None or count < 1:
        raise ValueError(f"request {request_id!r}: {name} is {value!r}; it must be an integer of at least 1")
    return count


def _checked_seconds(request_id: str, name: str, value: Any) -> float:
    """Return a time as a plain float, whatever number type it came as."""
    try:
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"request {request_id!r}: {name} is {value!r}; it must be a finite number of seconds, 0 or more"
        )
    return seconds


def _checked_prompt(request_id: str, prompt: Prompt | Sequence[int]) -> Prompt:
    if isinstance(prompt, Integral) and not isinstance(prompt, bool):
        prompt = int(prompt)
    if isinstance(prompt, str | int) and not isinstance(prompt, bool):
        if not prompt or (isinstance(prompt, int) and prompt < 1):
            raise ValueError(f"request {request_id!r}: the prompt is {prompt!r}; give at least one token")
        return prompt
    try:
        token_ids = tuple(index(token) for token in prompt)  # type: ignore[union-attr]
    except TypeError:
        raise ValueError(
            f"request {request_id!r}: the prompt is {prompt!r}; give text, a list of token ids, or a length"
        ) from None
    if not token_ids:
        raise ValueError(f"request {request_id!r}: the prompt is empty; give at least one token")
    return token_ids
