"""Seeded arrivals and lengths."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from cbresearch.request import Refusal, Request


def poisson_arrivals(rng: np.random.Generator, num_requests: int, rate: float) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds from its start.

    The gaps, the first one included, are independent and exponential with mean 1 / rate, and none is
    cut short, so the last of n arrivals is expected at n / rate.

    Args:
        rng: The source of chance.
        num_requests: How many arrivals.
        rate: Requests per second.

    Raises:
        ValueError: The rate is not a positive number.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate!r}; it must be a positive number of requests per second")
    arrivals: list[float] = np.cumsum(rng.exponential(1 / rate, num_requests)).tolist()
    return arrivals


def lognormal_lengths(
    rng: np.random.Generator, num_requests: int, mean: float, sigma: float, maximum: int, minimum: int = 1
) -> list[int]:
    """Draw whole lengths from a lognormal distribution that is clipped to [minimum, maximum].

    `mean` is the expected length after clipping: the location of the lognormal is solved for it. A
    clipped value is rounded up or down at random by its fraction, which keeps that expectation exact.

    Args:
        rng: The source of chance.
        num_requests: How many lengths.
        mean: Expected length in tokens.
        sigma: Standard deviation of the logarithm before clipping; 0 makes all lengths equal `mean`, up
            to that rounding.
        maximum: Largest length in tokens.
        minimum: Smallest length in tokens.

    Raises:
        ValueError: The arguments admit no such distribution; the message names them.
    """
    location = lognormal_location(mean, sigma, maximum, minimum)
    values = np.full(num_requests, float(mean))
    if sigma:
        values = np.exp(rng.normal(location, sigma, num_requests)).clip(minimum, maximum)
    whole = np.floor(values)
    lengths: list[int] = (whole + (rng.random(num_requests) < values - whole)).astype(np.int64).tolist()
    return lengths


def uniform_lengths(rng: np.random.Generator, num_requests: int, minimum: int, maximum: int) -> list[int]:
    """Draw whole lengths in tokens, each of minimum, …, maximum equally likely.

    Raises:
        ValueError: The range is empty or begins below 1.
    """
    check_range(minimum, maximum)
    lengths: list[int] = rng.integers(minimum, maximum, num_requests, endpoint=True).tolist()
    return lengths


def spread_arrivals(
    requests: Sequence[Request | Refusal], rng: np.random.Generator, tick: float
) -> list[Request | Refusal]:
    """Spread requests that a trace recorded at one time over the time until the next ones; this is invented.

    Some traces round their times: in Mooncake's conversation trace about ten requests arrive at once every
    3 seconds, which no server ever saw, and who waits for a first token waits for the other nine. Requests of
    one arrival are moved to uniform times in [arrival, arrival + tick), in the given order, and never
    past the next recorded arrival.

    Args:
        requests: Whom to spread, in order of arrival.
        rng: The source of chance.
        tick: Seconds to which the times were rounded.

    Raises:
        ValueError: `tick` is not a positive number, or the arrivals are not in order.
    """
    if not (math.isfinite(tick) and tick > 0):
        raise ValueError(f"tick is {tick!r}; it must be a positive number of seconds")
    groups = [(time, list(group)) for time, group in groupby(requests, lambda request: request.arrival)]
    spread: list[Request | Refusal] = []
    for (arrival, group), (following, _) in zip(groups, [*groups[1:], (math.inf, [])], strict=True):
        if following < arrival:
            raise ValueError(f"an arrival at {following!r} follows one at {arrival!r}; sort by arrival")
        offsets = np.sort(rng.random(len(group))) * min(tick, following - arrival)
        spread += [
            replace(request, arrival=arrival + offset)
            for request, offset in zip(group, offsets.tolist(), strict=True)
        ]
    return spread


def lognormal_location(mean: float, sigma: float, maximum: int, minimum: int = 1) -> float:
    """Return the mu for which exp(N(mu, sigma²)), clipped to [minimum, maximum], has this mean.

    Raises:
        ValueError: The arguments admit no such distribution; the message names them.
    """
    check_range(minimum, maximum)
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma is {sigma!r}; it must lie between 0 and 10")
    if not (minimum < mean < maximum or (sigma == 0 and minimum <= mean <= maximum)):
        raise ValueError(
            f"mean is {mean!r}; it must lie between minimum = {minimum} and maximum = {maximum}, "
            "and off both unless sigma is 0"
        )
    if not sigma:
        return math.log(mean)

    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = math.log(minimum) - 10 * sigma, math.log(maximum) + 10 * sigma
    # The clipped mean grows with mu, and 100 halvings use up the digits of a float.
    for _ in range(100):
        mu = (low + high) / 2
        below, above = ((math.log(bound) - mu) / sigma for bound in (minimum, maximum))
        inside = math.exp(mu + sigma**2 / 2) * (cdf(above - sigma) - cdf(below - sigma))
        too_low = minimum * cdf(below) + inside + maximum * cdf(-above) < mean
        low, high = (mu, high) if too_low else (low, mu)
    return mu


def check_range(minimum: int, maximum: int) -> None:
    """Refuse a range of lengths that is empty or begins below 1; raises ValueError."""
    if not 1 <= minimum <= maximum:
        raise ValueError(f"lengths from {minimum!r} to {maximum!r}: need 1 <= minimum <= maximum")
