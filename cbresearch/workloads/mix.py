"""Make requests of arrivals, lengths and shared prefixes."""

from dataclasses import dataclass

import numpy as np

from cbresearch.request import Prompt, Request, SamplingParams
from cbresearch.workloads.arrivals import Arrivals, draw_times
from cbresearch.workloads.lengths import Draw, DrawPairs, Tokens, check_exponent, zipf_odds

TO_THE_END = SamplingParams(ignore_eos=True)
"""Outputs run to `max_tokens`, so that a model's are as long as the workload says."""

NUM_DRAWN_IDS = 256
"""Drawn token ids are from 1 to 255: every vocabulary has them, and 0 is what the simulator answers."""


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
        if self.count < 1:
            raise ValueError(f"count is {self.count!r}; give at least one prefix")
        check_exponent(self.exponent)

    def draw(self, rng: np.random.Generator) -> tuple[tuple[int, ...], ...]:
        """Return the prefixes themselves."""
        return tuple(draw_tokens(rng, length) for length in checked_lengths(self.lengths, rng, self.count))

    def choose(self, rng: np.random.Generator, num_requests: int) -> list[int]:
        """Return which prefix each request begins with."""
        chosen: list[int] = rng.choice(
            self.count, num_requests, p=zipf_odds(self.count, self.exponent)
        ).tolist()
        return chosen


def make_requests(
    arrivals: Arrivals,
    lengths: DrawPairs | tuple[Draw, Draw],
    num_requests: int,
    rng: np.random.Generator,
    *,
    prefixes: Prefixes | None = None,
    client: str = "",
) -> list[Request]:
    """Return requests with these arrivals, prompt lengths and output lengths.

    Each of the three has a source of chance of its own, so that another arrival process leaves the lengths as
    they are, and policies or rates can be compared on the same requests.

    Args:
        arrivals: When they come, such as `Poisson(4.0)`.
        lengths: Pairs, such as `Coupled(prompts, outputs, -0.4)` or `Joint.of(trace)`; or a distribution of
            prompts and one of outputs, which are then independent.
        num_requests: How many.
        rng: Gives one number, which all else depends on.
        prefixes: What prompts begin with, in front of the tokens that `lengths` draws. Prompts are then token
            ids, and without it they are lengths.
        client: Who asks. The ids are "0", "1", … or, with a client, "client/0", "client/1", …

    Returns:
        The requests in order of arrival. Outputs run to their full length.

    Raises:
        ValueError: What was drawn are no arrivals or no lengths.
    """
    seed = int(rng.integers(2**63))
    for_times, for_lengths, for_prefixes = (np.random.default_rng([seed, part]) for part in range(3))
    times = draw_times(arrivals, for_times, num_requests)
    prompts, outputs = checked_pairs(lengths, for_lengths, num_requests)
    own: list[Prompt] = list(prompts)
    if prefixes is not None:
        texts = prefixes.draw(for_prefixes)
        chosen = prefixes.choose(for_prefixes, num_requests)
        own = [
            texts[place] + draw_tokens(for_prefixes, length)
            for place, length in zip(chosen, prompts, strict=True)
        ]
    name = f"{client}/" if client else ""
    return [
        Request(f"{name}{place}", prompt, output, time, TO_THE_END, client=client)
        for place, (prompt, output, time) in enumerate(zip(own, outputs, times.tolist(), strict=True))
    ]


def draw_tokens(rng: np.random.Generator, num_tokens: int) -> tuple[int, ...]:
    """Return so many token ids, each of 1 to 255 equally likely."""
    return tuple(rng.integers(1, NUM_DRAWN_IDS, num_tokens).tolist())


def checked_pairs(
    lengths: DrawPairs | tuple[Draw, Draw], rng: np.random.Generator, num_requests: int
) -> tuple[list[int], list[int]]:
    """Draw prompt and output lengths, and refuse what is none; raises ValueError."""
    if isinstance(lengths, tuple):
        drawn = lengths[0](rng, num_requests), lengths[1](rng, num_requests)
    else:
        drawn = lengths(rng, num_requests)
    return _checked(drawn[0], num_requests), _checked(drawn[1], num_requests)


def checked_lengths(lengths: Draw, rng: np.random.Generator, number: int) -> list[int]:
    """Draw lengths, and refuse what is none; raises ValueError."""
    return _checked(lengths(rng, number), number)


def _checked(drawn: Tokens, number: int) -> list[int]:
    lengths = np.asarray(drawn)
    if lengths.shape != (number,) or (number and lengths.dtype.kind not in "iu"):
        raise ValueError(
            f"the lengths are {lengths.dtype} of the shape {lengths.shape}; {number} integers were asked for"
        )
    if number and lengths.min() < 1:
        raise ValueError(f"a length is {lengths.min()}; every prompt and output has at least 1 token")
    listed: list[int] = lengths.tolist()
    return listed
