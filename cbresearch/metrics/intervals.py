"""How sure a number is, and which part of a run it should be taken from."""

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from cbresearch.metrics.basic import sample_of

__all__ = ["Interval", "batch_means_interval", "mean_interval", "percentile_interval", "warm_up_length"]


class Interval(NamedTuple):
    """An estimate and the interval that covers the true value with the wanted confidence.

    Attributes:
        estimate: The estimated value.
        low: Lower end, or None where the sample is too small to have one.
        high: Upper end, or None.
        n: Number of values behind it.
    """

    estimate: float
    low: float | None
    high: float | None
    n: int


def percentile_interval(values: Iterable[float], q: float, confidence: float = 0.95) -> Interval | None:
    """Return a percentile with the order statistics around it, ranks n·p ± z·√(n·p·(1 − p)).

    The ends need no assumption about the distribution, only that the values are independent; latencies of one
    run are not quite, so that theirs is too narrow. A rank outside the sample has no end: with 100 values
    nothing bounds p99 from above.

    Args:
        values: The sample.
        q: Percent, above 0 and below 100.
        confidence: Confidence of the interval, between 0 and 1.

    Returns:
        None without values.

    Raises:
        ValueError: q or the confidence is out of range, or a value is not finite.
    """
    if not 0 < q < 100:
        raise ValueError(f"q is {q!r}; an interval is there for percentiles between 0 and 100")
    z = _quantile(confidence)
    sample = np.sort(sample_of(values))
    n, p = sample.size, q / 100
    if not n:
        return None
    spread = z * math.sqrt(n * p * (1 - p))
    low, high = math.floor(n * p - spread), math.ceil(n * p + spread) + 1
    return Interval(
        float(np.percentile(sample, q)),
        float(sample[low - 1]) if low >= 1 else None,
        float(sample[high - 1]) if high <= n else None,
        n,
    )


def mean_interval(values: Iterable[float], confidence: float = 0.95) -> Interval | None:
    """Return a mean with the interval of Student's t, for independent values such as one a seed.

    Args:
        values: The sample.
        confidence: Confidence of the interval, between 0 and 1.

    Returns:
        None without values; no ends with one value.

    Raises:
        ValueError: The confidence is out of range, or a value is not finite.
    """
    _quantile(confidence)
    sample = sample_of(values)
    n = sample.size
    if not n:
        return None
    mean = float(sample.mean())
    if n == 1:
        return Interval(mean, None, None, 1)
    half = _student(confidence, n - 1) * float(sample.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def batch_means_interval(
    values: Iterable[float], num_batches: int = 20, confidence: float = 0.95
) -> Interval | None:
    """Return the mean of values that depend on their neighbours, such as the latencies of one run in order.

    The values are cut into equal batches, whose means depend on each other far less (Law, Simulation
    Modeling and Analysis, 9.5.3); values that do not fill the last batch are left out.

    Args:
        values: The sample in its order.
        num_batches: Batches, at least 2.
        confidence: Confidence of the interval, between 0 and 1.

    Returns:
        None if there are fewer values than batches.

    Raises:
        ValueError: There are fewer than 2 batches, or the confidence is out of range.
    """
    if num_batches < 2:
        raise ValueError(f"num_batches is {num_batches!r}; an interval needs at least 2")
    sample = sample_of(values)
    size = sample.size // num_batches
    if not size:
        return None
    means = sample[: size * num_batches].reshape(num_batches, size).mean(axis=1)
    interval = mean_interval(means, confidence)
    return None if interval is None else interval._replace(n=size * num_batches)


def warm_up_length(values: Iterable[float], batch_size: int = 5) -> int:
    """Return how many values at the start should be left out, since the run was not in its steady state yet.

    The cut is where the standard error of what remains is least (MSER-5: White, Cobb and Spratt, 2000). It is
    at most half of the values; if it is as much, the run is too short to say.

    Args:
        values: A series in its order, such as latencies by arrival.
        batch_size: Values that are averaged before the cut is chosen.

    Raises:
        ValueError: The batch size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; it must be at least 1")
    sample = sample_of(values)
    num_batches = sample.size // batch_size
    if num_batches < 2:
        return 0
    means = sample[: num_batches * batch_size].reshape(num_batches, batch_size).mean(axis=1)
    rest = num_batches - np.arange(num_batches // 2 + 1)
    # Sums from each place to the end.
    sums = np.cumsum(means[::-1])[::-1][: len(rest)]
    squares = np.cumsum(means[::-1] ** 2)[::-1][: len(rest)]
    errors = (squares - sums**2 / rest) / rest**2
    return int(errors.argmin()) * batch_size


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence!r}; it must be between 0 and 1")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _student(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, freedom))
