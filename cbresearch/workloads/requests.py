"""Make requests of arrivals, lengths and shared prefixes, and turn prompts into what an executor serves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cbresearch.checks import count, text
from cbresearch.request import Prompt, Rejected, Request, SamplingParams, listed
from cbresearch.workloads.arrivals import Arrivals, draw_times
from cbresearch.workloads.common import Rng, checked_rng, require, split_rng
from cbresearch.workloads.lengths import Draw, DrawPairs, Zipf, checked_lengths, drawn_lengths

Encode = Callable[[str], Sequence[int]]

TO_THE_END = SamplingParams(ignore_eos=True)
"""Outputs run to `max_tokens`, so that a model's are as long as the workload says."""

MAX_DRAWN_TOKENS = 2**24
"""Longest prompt that `resolve_prompts` draws; a typing error in a length must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Texts with which prompts begin: system prompts, documents, few-shot examples.

    Prompts share the KV of a prefix's full blocks, and only that: what follows is drawn for each alone.

    Attributes:
        count: How many different ones there are.
        lengths: Their lengths in tokens.
        exponent: Zipf exponent of their popularity: the k-th is taken with odds k^-exponent; 0 is uniform.

    Raises:
        ValueError: The count is below 1, or the exponent negative.
    """

    count: int
    lengths: Draw
    exponent: float = 0.0

    def __post_init__(self) -> None:
        count("count of prefixes", self.count)
        Zipf(self.exponent, self.count)

    def draw(self, rng: Rng, num_requests: int) -> list[tuple[int, ...]]:
        """Return the prefix that each of so many requests begins with, as token ids."""
        lengths = drawn_lengths(self.lengths, rng, self.count)
        known = [draw_tokens(rng, length) for length in lengths]
        chosen = Zipf(self.exponent, self.count).quantile(rng.random(num_requests))
        return [known[int(place) - 1] for place in chosen]


def make_requests(
    arrivals: Arrivals,
    lengths: DrawPairs,
    num_requests: int,
    rng: Rng,
    *,
    prefixes: Prefixes | None = None,
    client: str = "",
) -> list[Request]:
    """Return requests with these arrivals, prompt lengths and output lengths.

    Each of the three has a random generator of its own, so that another arrival process leaves the lengths as
    they are, and policies or rates can be compared on the same requests.

    Args:
        arrivals: An arrival process, such as `Poisson(4.0)`.
        lengths: Pairs, such as `Coupled(prompts, outputs, -0.4)` or `Joint.of(trace)`; or a distribution of
            prompts and one of outputs, which are then independent.
        num_requests: Number of requests.
        rng: Gives one number, which all else depends on.
        prefixes: What prompts begin with, in front of the tokens that `lengths` draws. Prompts are then token
            ids, and without it they are lengths.
        client: The client of all requests. The ids are "0", "1", … or, with a client, "client/0", …

    Returns:
        The requests in order of arrival. Outputs run to their full length.

    Raises:
        ValueError: What was drawn are no arrivals or no lengths.
    """
    for_times, for_lengths, for_prefixes = split_rng(rng, 3)
    times = draw_times(arrivals, for_times, num_requests)
    prompts, outputs = checked_pairs(lengths, for_lengths, num_requests)
    if prefixes is None:
        return bundled(prompts, outputs, times, client)
    begins = zip(prefixes.draw(for_prefixes, num_requests), prompts, strict=True)
    prefixed = [begin + draw_tokens(for_prefixes, length) for begin, length in begins]
    return bundled(prefixed, outputs, times, client)


def bundled(
    prompts: Iterable[Prompt], outputs: Iterable[int], times: Iterable[float], client: str = ""
) -> list[Request]:
    """Return one request for each prompt, output length in tokens and arrival in seconds."""
    name = f"{client}/" if client else ""
    return [
        Request(f"{name}{place}", prompt, output, time, TO_THE_END, client=client)
        for place, (prompt, output, time) in enumerate(zip(prompts, outputs, times, strict=True))
    ]


def resolve_prompts(
    requests: Iterable[Request | Rejected], encode: Encode | None, vocab_size: int | None, rng: Rng
) -> list[Request | Rejected]:
    """Turn prompts into what an executor serves: token ids for a model, lengths for a simulation.

    Args:
        requests: The workload; a `Rejected` is passed on.
        encode: Turns text into token ids. None is for a simulation: a text becomes a length in tokens,
            estimated as a quarter of its UTF-8 bytes, rounded up.
        vocab_size: Number of token ids of the model. A length becomes that many ids drawn uniformly
            below it, and given ids are checked against it. None leaves lengths and ids as they are.
        rng: Gives one number. The ids drawn for a request depend on it and on the request's position
            only, never on the other requests.

    Returns:
        The requests in their order, with a `Rejected` in the place of each that cannot be resolved.

    Raises:
        TypeError: An entry is no request, or the workload no list of them.
        ValueError: `vocab_size` is below 1.
    """
    vocab_size = None if vocab_size is None else count("vocab_size", vocab_size)
    seed = int(checked_rng(rng).integers(2**63))
    resolved: list[Request | Rejected] = []
    for position, request in enumerate(listed(requests)):
        if isinstance(request, Request):
            try:
                prompt = _resolved(request.prompt, encode, vocab_size, [seed, position])
                # To make a request anew checks all of it again.
                request = request if prompt is request.prompt else replace(request, prompt=prompt)
            except ValueError as error:
                request = Rejected(request.id, f"request {request.id!r}: {error}", request.arrival)
        resolved.append(request)
    return resolved


def _resolved(prompt: Prompt, encode: Encode | None, vocab_size: int | None, seed: list[int]) -> Prompt:
    if isinstance(prompt, str):
        num_tokens = estimated_tokens("the prompt", prompt)
        if encode is None:
            return num_tokens
        given, prompt = prompt, tuple(encode(prompt))
        require(len(prompt) > 0, "the prompt", given, "it encodes to no token; give at least one")
    if vocab_size is None:
        return prompt
    if isinstance(prompt, int):
        require(prompt <= MAX_DRAWN_TOKENS, "the prompt's length", prompt, f"give at most {MAX_DRAWN_TOKENS}")
        return tuple(np.random.default_rng(seed).integers(vocab_size, size=prompt).tolist())
    if (token := max(prompt)) >= vocab_size:
        place = prompt.index(token)
        raise ValueError(f"the prompt's token {place} is {token}; use ids from 0 to {vocab_size - 1}")
    return prompt


def estimated_tokens(name: str, value: str) -> int:
    """Return about how many tokens a text has: a quarter of its bytes in UTF-8, rounded up."""
    text(name, value)
    return -(-len(value.encode()) // 4)


def draw_tokens(rng: Rng, num_tokens: int) -> tuple[int, ...]:
    """Return so many token ids, each of 1 to 255 equally likely.

    Every vocabulary has these, and 0 is what the simulator answers.
    """
    return tuple(rng.integers(1, 256, num_tokens).tolist())


def checked_pairs(lengths: DrawPairs, rng: Rng, number: int) -> tuple[list[int], list[int]]:
    """Draw prompt and output lengths and check them; raises ValueError."""
    if isinstance(lengths, tuple) and len(lengths) == 2:
        return drawn_lengths(lengths[0], rng, number), drawn_lengths(lengths[1], rng, number)
    drawn: Any = lengths(rng, number) if callable(lengths) else None
    remedy = "give those of prompts and of outputs, such as (Fixed(100), Fixed(20))"
    require(np.shape(drawn)[:1] == (2,), "lengths", lengths, remedy)
    return checked_lengths(drawn[0], number), checked_lengths(drawn[1], number)
