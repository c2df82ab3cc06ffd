"""A request: what a client asks for, and its state in the scheduler."""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from operator import index
from typing import Any, NamedTuple

from cbresearch.checks import Bounds, check_numbers, count, real, text

Prompt = str | int | tuple[int, ...]
_LEAST_TEMPERATURE = 1e-3
_END_OF_TOKEN_IDS = 2**64
# What a policy reads most is at hand in the state, too.
_AT_HAND = (
    *("id", "prompt", "max_tokens", "arrival", "sampling", "priority", "client", "deadline"),
    "predicted_output",
)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities by the model's own logits, before any sampling parameter.

    Attributes:
        logprob: That of the chosen token.
        top_ids: The most likely tokens, as many as were asked for, the most likely first.
        top_logprobs: Those of `top_ids`, in the same order.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Say how output tokens are chosen and what ends the output; by default greedily.

    The logits pass through what follows in the order of transformers' `generate`: penalties, `min_tokens`,
    `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        temperature: Divides the logits before a token is drawn; 0 takes the most likely token.
        top_k: Draw from so many of the most likely tokens; None from all.
        top_p: Draw from the fewest of the most likely tokens that have this probability together.
        min_p: Draw from the tokens that are at least this fraction as likely as the most likely one.
        seed: Fixes what is drawn, whatever else is in the batch. Without one, the executor's seed and the
            request's id do.
        n: Number of answers to the prompt (see `parallel_samples`).
        repetition_penalty: Divides the logits above 0 of tokens that are in the prompt or the output, and
            multiplies those below (Keskar et al., CTRL, arXiv 1909.05858, 4.1).
        presence_penalty: Is taken from the logits of tokens that are in the output.
        frequency_penalty: Is taken from a token's logit as often as the token is in the output.
        min_tokens: Output tokens before which nothing but `max_tokens` ends the output.
        stop: Texts that end the output with the token that completes one of them; one text may be given
            alone. Needs a tokenizer.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Go on even where the model emits an end-of-sequence token.
        num_logprobs: Record the log-probability of each output token, and of so many of the most likely
            tokens in its place; None for neither.

    Raises:
        ValueError: A parameter is out of range; the message names it, the value and the range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_numbers(
            self,
            temperature=(0, 100),
            top_p=(0, 1),
            min_p=(0, 1),
            repetition_penalty=(0, 100),
            presence_penalty=(-100, 100),
            frequency_penalty=(-100, 100),
            seed=(0, math.inf),
            # A typing error must not fill the memory with requests.
            n=(1, 10_000),
            num_logprobs=(0, math.inf),
        )
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            remedy = f"give at least {_LEAST_TEMPERATURE}, or 0 to take the most likely token"
            raise ValueError(f"temperature is {self.temperature!r}; {remedy}")
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "repetition_penalty" if self.top_p else "top_p"
            raise ValueError(f"{name} is 0; it must be above 0, and 1 changes nothing")
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        token_ids = _checked_token_ids(
            "stop_token_ids", self.stop_token_ids, "give a list of token ids", is_ordered=False
        )
        object.__setattr__(self, "stop_token_ids", token_ids)


def _checked_stop(stop: Any) -> tuple[str, ...]:
    try:
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        raise ValueError(f"stop is {stop!r}; give a text or a list of texts") from None
    for one in texts:
        if not isinstance(one, str) or not one:
            raise ValueError(f"stop has {one!r}; give texts that are not empty")
        text("stop", one)
    return texts


def _checked_token_ids(name: str, value: Any, remedy: str, is_ordered: bool) -> tuple[int, ...]:
    try:
        # The bytes of a text are no token ids, and a mapping is no list of them.
        refused = (bytes, bytearray, memoryview, Mapping, *([Set] if is_ordered else []))
        if isinstance(value, refused):
            raise TypeError
        # An array or a tensor becomes plain numbers, or lists of them if it is a batch.
        given = tuple(value.tolist() if hasattr(value, "tolist") else value)
        kept = tuple(map(index, given))
    except TypeError:
        raise ValueError(f"{name} is {value!r}; {remedy}") from None
    if kept and (bool in set(map(type, given)) or min(kept) < 0 or max(kept) >= _END_OF_TOKEN_IDS):
        odd = next(one for one in given if isinstance(one, bool) or not 0 <= one < _END_OF_TOKEN_IDS)
        raise ValueError(f"{name} has {odd!r}; token ids are integers of at least 0 and below 2**64")
    return kept


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
        client: The client that sends the request, for fair-share policies.
        deadline: Seconds since the start of the run by which the answer is wanted.
        cache_salt: Requests share cached prefixes only with requests of the same salt; None is a salt too.
        group: Requests of one group and one prompt are parallel samples: they share the prompt's KV even
            without a prefix cache (see `parallel_samples`).
        predicted_output: Number of output tokens that a predictor expects; all that a policy may know.
        output_length: Number of output tokens after which the answer really ends, where it is known
            beforehand (a trace, an earlier run). It is for the simulator: a policy that reads it cheats.
            Equality ignores it.

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
        put, request = partial(object.__setattr__, self), f"request {self.id!r}"
        for name in ("id", "client", "cache_salt", "group"):
            text(f"{request}: {name}", getattr(self, name), optional=name in ("cache_salt", "group"))
        put("prompt", _checked_prompt(request, self.prompt))
        put("max_tokens", count(f"{request}: max_tokens", self.max_tokens))
        put("arrival", real(f"{request}: arrival", self.arrival, unit="seconds"))
        put("priority", count(f"{request}: priority", self.priority, *Bounds()))
        if self.deadline is not None:
            put("deadline", real(f"{request}: deadline", self.deadline, unit="seconds"))
            if self.deadline < (arrival := self.arrival):
                what = f"deadline is {self.deadline}, before the arrival at {arrival}"
                raise ValueError(f"{request}: {what}; count both in seconds since the start of the run")
        for name in ("predicted_output", "output_length"):
            if (tokens := getattr(self, name)) is not None:
                put(name, count(f"{request}: {name}", tokens))
        if self.predicted_output is not None:
            # Policies weigh it in floats.
            count(f"{request}: predicted_output", self.predicted_output, most=2**53)
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"{request}: sampling is {self.sampling!r}; give SamplingParams(…)")
        if self.sampling.min_tokens > self.max_tokens:
            least = self.sampling.min_tokens
            raise ValueError(f"{request}: min_tokens is {least}, over max_tokens of {self.max_tokens}")

    def moved(self, arrival: float) -> "Request":
        """Return the request with another arrival; a deadline that is past by then becomes the arrival."""
        is_past = self.deadline is not None and self.deadline < arrival
        return replace(self, arrival=arrival, deadline=arrival if is_past else self.deadline)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt's length in tokens; a text has none before it is tokenized."""
        if isinstance(self.prompt, int):
            return self.prompt
        if isinstance(self.prompt, str):
            remedy = "workloads.resolve_prompts turns it into token ids"
            raise ValueError(f"request {self.id!r}: the prompt is text; {remedy}")
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected request, with the reason; it keeps its place in the results."""

    id: str
    error: str
    arrival: float = 0.0

    def moved(self, arrival: float) -> "Rejected":
        """Return the same with another arrival."""
        return replace(self, arrival=arrival)


class RequestStatus(enum.Enum):
    """The queue that a request is in; it is in exactly one."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


def parallel_samples(request: Request, num_samples: int | None = None) -> tuple[Request, ...]:
    """Return `num_samples` requests for as many answers to one prompt, which share the prompt's KV.

    Their ids are the request's id with "/0", "/1" and so on behind it; the id itself names their group. If
    the request has a seed, sample k has that seed + k.

    Args:
        request: The request to repeat.
        num_samples: Number of answers; by default `sampling.n` of the request.

    Raises:
        ValueError: The number is below 1.
    """
    sampling = request.sampling
    number = count(f"request {request.id!r}: num_samples", sampling.n if num_samples is None else num_samples)
    return tuple(
        replace(
            request,
            id=f"{request.id}/{place}",
            group=request.id,
            sampling=replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + place),
        )
        for place in range(number)
    )


def listed(requests: Iterable[Request | Rejected]) -> list[Request | Rejected]:
    """Return requests as a list.

    Raises:
        TypeError: They are no list or the like, or something else is among them.
    """
    remedy = "give a list of requests, such as [Request('a', prompt=100, max_tokens=20)]"
    if not isinstance(requests, Iterable):
        raise TypeError(f"the requests are {requests!r}; {remedy}")
    given = list(requests)
    for place, one in enumerate(given):
        if not isinstance(one, Request | Rejected):
            raise TypeError(f"entry {place} of the requests is {one!r}; {remedy}")
    return given


def expand(requests: Iterable[Request | Rejected]) -> list[Request | Rejected]:
    """Return the requests, with parallel samples in the place of each that asks for more than one answer."""
    expanded: list[Request | Rejected] = []
    for request in listed(requests):
        if isinstance(request, Request) and request.sampling.n > 1:
            expanded += parallel_samples(request)
        else:
            expanded.append(request)
    return expanded


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """A request on its way through the scheduler, which alone changes it; policies read it.

    Its id, prompt, limits and so on are those of the request.

    Attributes:
        request: The immutable request.
        order: Position in the order of submission; breaks every tie.
        queued: Seconds at which the scheduler got to know it; it may have arrived earlier.
        status: The queue it is in.
        seat: Index of the batch slot it holds, or None.
        num_computed_tokens: Tokens whose KV is in the cache.
        output_token_ids: Tokens generated so far; a preemption keeps them.
        num_preemptions: How often it lost its seat before it was finished.
        token_times: Seconds at which each output token came out.
        first_scheduled: Seconds at which it first got a seat, or None.
        num_peak_computed_tokens: Most tokens whose KV it has had at any time, computed or found in the cache.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache before it was ever computed.
        num_recomputed_tokens: Tokens computed again because a preemption threw their KV away.
        num_skipped_tokens: Tokens whose KV was given back since they fell out of the sliding window.
        num_transferred_tokens: Tokens whose KV comes from another scheduler when it first joins
            (disaggregated prefill).
        scheduled_step: Index of the last step that served it, or -1.
        finish_reason: "stop", "length", "abort" or "error" once finished.
        logprobs: Those of each output token, if they were asked for.
        error: What it failed of, or None.
    """

    request: Request
    order: int
    queued: float = 0.0
    id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    seat: int | None = None
    num_computed_tokens: int = 0
    num_peak_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_skipped_tokens: int = 0
    num_transferred_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    first_scheduled: float | None = None
    scheduled_step: int = -1
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    prompt: Prompt = field(init=False)
    max_tokens: int = field(init=False)
    arrival: float = field(init=False)
    sampling: SamplingParams = field(init=False)
    priority: int = field(init=False)
    client: str = field(init=False)
    deadline: float | None = field(init=False)
    predicted_output: int | None = field(init=False)

    def __post_init__(self) -> None:
        for name in _AT_HAND:
            setattr(self, name, getattr(self.request, name))
        self.num_tokens = self.num_prompt_tokens = self.request.num_prompt_tokens

    def resume(self, transferred: "RequestState") -> None:
        """Go on where another scheduler stopped, with the KV that it computed."""
        self.num_tokens = transferred.num_tokens
        self.num_peak_computed_tokens = self.num_transferred_tokens = transferred.num_computed_tokens
        self.num_cached_tokens = transferred.num_cached_tokens
        self.num_recomputed_tokens = transferred.num_recomputed_tokens
        self.num_preemptions = transferred.num_preemptions
        self.output_token_ids = list(transferred.output_token_ids)
        self.token_times = list(transferred.token_times)
        self.first_scheduled = transferred.first_scheduled

    @property
    def num_kv_tokens(self) -> int:
        """Return the tokens whose KV the request refers to."""
        return self.num_computed_tokens - self.num_skipped_tokens

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
        return self.num_tokens - self.num_computed_tokens > 1 or not self.output_token_ids

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


def take_decode_steps(
    states: Iterable[RequestState], tokens: Sequence[int], times: Sequence[float], last_step: int
) -> None:
    """Let each of some requests take in consecutive decode steps, the same for all.

    Args:
        states: The requests.
        tokens: New token ids, one a step.
        times: Seconds at which they came out.
        last_step: Index of the last step.
    """
    number = len(tokens)
    for state in states:
        start, peak = state.num_computed_tokens, state.num_peak_computed_tokens
        end = state.num_computed_tokens = start + number
        if start < peak:
            state.num_recomputed_tokens += min(end, peak) - start
        if end > peak:
            state.num_peak_computed_tokens = end
        state.num_tokens += number
        state.scheduled_step = last_step
        state.output_token_ids += tokens
        state.token_times += times


def _checked_prompt(request: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str | Integral) and not isinstance(prompt, bool):
        length = len(prompt) if isinstance(prompt, str) else int(prompt)
        if length < 1:
            raise ValueError(f"{request}: the prompt is {prompt!r}; give at least one token")
        if isinstance(prompt, str):
            text(f"{request}: the prompt", prompt)
        return prompt if isinstance(prompt, str) else length
    remedy = "give text, a list of token ids, or a length"
    token_ids = _checked_token_ids(f"{request}: the prompt", prompt, remedy, is_ordered=True)
    if not token_ids:
        raise ValueError(f"{request}: the prompt is empty; give at least one token")
    return token_ids
