"""Length distributions: lengths are drawn by quantile, so that prompts and outputs can be coupled."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cbresearch.checks import count, real
from cbresearch.request import Rejected, Request, listed
from cbresearch.workloads.common import Rng, checked, require

Tokens = NDArray[np.int64]
Fractions = NDArray[np.float64]

Draw = Callable[[Rng, int], Tokens]
"""Draws so many lengths in tokens, each at least 1; a plain function of your own will do."""

_MOST_TOKENS = 2**40
"""Longest length that is drawn, so that none exceeds an integer of 64 bits."""

DrawPairs = Callable[[Rng, int], tuple[Tokens, Tokens]] | tuple[Draw, Draw]
"""Draws so many prompt lengths, and the output lengths that belong to them; two `Draw` are independent."""


class Lengths(ABC):
    """A distribution of lengths in tokens; called with a random generator and a number, it draws as many.

    A length is the quantile at a uniform number. Where that is no whole number, it is rounded up or down at
    random by its fraction, which keeps the mean exact. Every distribution tells its `mean` in tokens.
    """

    __slots__ = ()

    @abstractmethod
    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length below which each fraction of the lengths lies; fractions are in [0, 1)."""

    def __call__(self, rng: Rng, num_requests: int) -> Tokens:
        """Return so many lengths."""
        return _rounded(rng, self.quantile(rng.random(num_requests)))


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """Draw each of minimum, …, maximum equally likely.

    Raises:
        ValueError: The range is empty or begins below 1.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.maximum)

    @property
    def mean(self) -> float:
        """Return the middle of the range."""
        return (self.minimum + self.maximum) / 2

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        return self.minimum + np.floor(fractions * (self.maximum - self.minimum + 1))


class Fixed(Uniform):
    """Give every request the same length in tokens; raises ValueError if it is below 1."""

    def __init__(self, tokens: int) -> None:
        Uniform.__init__(self, tokens, tokens)


@dataclass(frozen=True, slots=True)
class Geometric(Lengths):
    """Draw minimum, minimum + 1, … with a tail that never wears off: after each token the odds are the same.

    Nothing cuts the tail; its variance is (mean - minimum) · (mean - minimum + 1).

    Attributes:
        mean: Expected length in tokens; equal to `minimum`, all lengths are.
        minimum: Shortest length.

    Raises:
        ValueError: The mean is below the minimum, or that below 1.
    """

    mean: float
    minimum: int = 1

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.minimum)
        real("mean", self.mean, self.minimum, _MOST_TOKENS)

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        if self.mean == self.minimum:
            return np.full(len(fractions), float(self.minimum))
        going_on = math.log1p(-1 / (self.mean - self.minimum + 1))
        return np.asarray(self.minimum + np.floor(np.log1p(-fractions) / going_on))


@dataclass(frozen=True, slots=True)
class Lognormal(Lengths):
    """Draw from a lognormal distribution that is clipped to [minimum, maximum] and keeps its mean.

    Attributes:
        mean: Expected length in tokens after clipping; the location is solved for it.
        sigma: Standard deviation of the logarithm before clipping; 0 makes all lengths equal.
        maximum: Largest length.
        minimum: Smallest length.
        by_inversion: Draw by quantile, as every distribution does. False takes the normal scores from the
            random generator as they are: the same distribution, but other lengths for the same seed.

    Raises:
        ValueError: The numbers admit no such distribution; the message names them.
    """

    mean: float
    sigma: float
    maximum: int
    minimum: int = 1
    by_inversion: bool = True
    _location: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.maximum)
        real("sigma", self.sigma, 0, 10)
        if self.sigma:
            low, high, reach = math.log(self.minimum), math.log(self.maximum), 10 * self.sigma
            location = _solved(self._clipped_mean, self.mean, low - reach, high + reach)
        else:
            location = math.log(real("mean", self.mean, self.minimum, self.maximum))
        object.__setattr__(self, "_location", location)

    def __call__(self, rng: Rng, num_requests: int) -> Tokens:
        """Return so many lengths."""
        if self.by_inversion:
            return Lengths.__call__(self, rng, num_requests)
        return _rounded(rng, self._at(rng.standard_normal(num_requests)))

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length at each fraction, not rounded."""
        from scipy.special import ndtri

        return self._at(ndtri(fractions))

    def scaled(self, factor: float) -> "Lognormal":
        """Return it with mean and bounds times `factor`; the bounds become whole numbers of at least 1."""
        _check_factor(self.mean, factor)
        minimum = max(1, math.floor(self.minimum * factor))
        maximum = max(minimum, math.ceil(self.maximum * factor))
        return replace(self, mean=self.mean * factor, maximum=maximum, minimum=minimum)

    def _at(self, scores: Fractions) -> Fractions:
        if not self.sigma:
            return np.full(len(scores), float(self.mean))
        return np.asarray(np.exp(self._location + self.sigma * scores).clip(self.minimum, self.maximum))

    def _clipped_mean(self, location: float) -> float:
        from scipy.special import ndtr

        sigma, bounds = self.sigma, np.array([self.minimum, self.maximum])
        below, above = (np.log(bounds) - location) / sigma
        unclipped = math.exp(location + sigma**2 / 2) * (ndtr(above - sigma) - ndtr(below - sigma))
        return float(unclipped + bounds @ ndtr([below, -above]))


@dataclass(frozen=True, slots=True)
class Zipf(Lengths):
    """Draw minimum, …, maximum with odds that fall with a power of the length.

    The maximum is part of the distribution (odds of k are k^-exponent over the sum of all), so that `mean` is
    exact; nothing is clipped afterwards.

    Attributes:
        exponent: The power, 0 or more; 0 is uniform.
        maximum: Largest length in tokens.
        minimum: Smallest length.

    Raises:
        ValueError: The exponent is negative or not finite, or the range empty.
    """

    exponent: float
    maximum: int
    minimum: int = 1

    def __post_init__(self) -> None:
        # It is summed over all lengths.
        _check_range(self.minimum, self.maximum, 2**24)
        real("exponent", self.exponent)

    @property
    def mean(self) -> float:
        """Return the expected length, summed over all."""
        return float(self._odds() @ np.arange(self.minimum, self.maximum + 1))

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        # The sum of all odds may round to less than 1.
        places = np.searchsorted(np.cumsum(self._odds())[:-1], fractions, side="right")
        return (self.minimum + places).astype(np.float64)

    def _odds(self) -> Fractions:
        odds = np.arange(self.minimum, self.maximum + 1, dtype=np.float64) ** -self.exponent
        return np.asarray(odds / odds.sum())


@dataclass(frozen=True, slots=True)
class Empirical(Lengths):
    """Draw with replacement from measured lengths.

    Attributes:
        lengths: The measured lengths in tokens, which are sorted.

    Raises:
        ValueError: The list is empty, or one is no whole number of at least 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(sorted(_measured(self.lengths))))

    @property
    def mean(self) -> float:
        """Return the mean of the measured lengths."""
        return sum(self.lengths) / len(self.lengths)

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the measured length at each fraction."""
        return np.array(self.lengths, dtype=np.float64)[(fractions * len(self.lengths)).astype(np.int64)]


@dataclass(frozen=True, slots=True)
class Quantiles(Lengths):
    """Draw from a distribution that has published percentiles and the published mean.

    Between two percentiles, a power of the length grows linearly with the fraction. The power is the same
    everywhere and is solved for the mean: it is what a table of percentiles leaves open.

    Attributes:
        mean: Expected length in tokens.
        points: (fraction, length) from (0, minimum) to (1, maximum), both growing.

    Raises:
        ValueError: The points are not such, or no distribution through them has that mean.
    """

    mean: float
    points: tuple[tuple[float, float], ...]
    _power: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        points = np.asarray(self.points)
        is_table = points.ndim == 2 and points.shape[1] == 2 and points.dtype.kind in "iuf"
        remedy = "give pairs of numbers, such as ((0, 1), (0.5, 20), (1, 90))"
        require(is_table, "points", self.points, remedy)
        fractions, lengths = points.T
        if fractions[0] != 0 or fractions[-1] != 1 or np.any(np.diff(fractions) <= 0):
            raise ValueError(f"the fractions are {fractions.tolist()}; they must grow from 0 to 1")
        if lengths[0] < 1 or np.any(np.diff(lengths) < 0) or not math.isfinite(lengths[-1]):
            raise ValueError(f"the lengths are {lengths.tolist()}; they must be at least 1 and grow")
        # (1 / 10^6)^-50 is still a float.
        object.__setattr__(self, "_power", _solved(self._mean_under, self.mean, -50.0, 50.0))

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length at each fraction, not rounded."""
        at, lengths = np.array(self.points).T
        # Relative to the largest, so that no power overflows.
        least, top = lengths[0], lengths[-1]
        # At a power of 0, the logarithm grows linearly, which a power next to 0 comes close to.
        power = math.copysign(max(abs(self._power), 1e-7), self._power)
        grown = np.interp(fractions, at, (lengths / top) ** power) ** (1 / power)
        return np.asarray((grown * top).clip(least, top))

    def scaled(self, factor: float) -> "Quantiles":
        """Return it with mean and percentiles times `factor`; no percentile falls below 1 token."""
        _check_factor(self.mean, factor)
        return Quantiles(self.mean * factor, tuple((u, max(1.0, x * factor)) for u, x in self.points))

    def _mean_under(self, power: float) -> float:
        """Return the mean if this power grows linearly; between two points it is their Stolarsky mean."""
        from scipy.special import exprel

        fractions, lengths = np.array(self.points).T
        above, logarithms = lengths[1:], np.log(lengths[1:] / lengths[:-1])
        means = above * exprel(-(power + 1) * logarithms) / exprel(-power * logarithms)
        return float(np.diff(fractions) @ means)


@dataclass(frozen=True, slots=True)
class Coupled:
    """Draw prompts and outputs that go together: a Gaussian copula, which leaves each distribution as it is.

    Attributes:
        prompts: Prompt lengths.
        outputs: Output lengths.
        correlation: Of the two normal scores, from -1 to 1; 0 is independent, 1 gives the longest prompt the
            longest output. The correlation of the lengths themselves is weaker, the more so the heavier
            their tails.

    Raises:
        ValueError: The correlation is out of range.
    """

    prompts: Lengths
    outputs: Lengths
    correlation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompts", "outputs"):
            lengths = getattr(self, name)
            require(isinstance(lengths, Lengths), name, lengths, "give a distribution, such as Fixed(100)")
        real("correlation", self.correlation, -1, 1)

    def __call__(self, rng: Rng, num_requests: int) -> tuple[Tokens, Tokens]:
        """Return so many prompt lengths and output lengths."""
        from scipy.special import ndtr

        first, own = rng.standard_normal((2, num_requests))
        second = self.correlation * first + math.sqrt(1 - self.correlation**2) * own
        # Below 1 even for a score in the far tail, since fractions are.
        uniform = ndtr([first, second]).clip(0, 1 - 2**-53)
        prompts = _rounded(rng, self.prompts.quantile(uniform[0]))
        return prompts, _rounded(rng, self.outputs.quantile(uniform[1]))


@dataclass(frozen=True, slots=True)
class Joint:
    """Draw whole pairs with replacement, so that whatever couples a prompt to its output stays.

    Attributes:
        prompts: Measured prompt lengths in tokens.
        outputs: The output lengths that belong to them.

    Raises:
        ValueError: A list is empty, a length is below 1, or the lists differ in length.
    """

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("prompts", "outputs"):
            object.__setattr__(self, name, tuple(_measured(getattr(self, name))))
        if len(self.prompts) != len(self.outputs):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.outputs)} outputs; give pairs")

    @classmethod
    def of(cls, requests: Iterable[Request | Rejected]) -> "Joint":
        """Return the pairs of a trace's requests, rejected ones left out.

        Raises:
            TypeError: An entry is no request, or the workload no list of them.
            ValueError: No request is left, or a prompt is text.
        """
        known = [request for request in listed(requests) if isinstance(request, Request)]
        return cls(tuple(request.num_prompt_tokens for request in known), tuple(map(true_length, known)))

    def __call__(self, rng: Rng, num_requests: int) -> tuple[Tokens, Tokens]:
        """Return so many prompt lengths and output lengths."""
        places = rng.integers(len(self.prompts), size=num_requests)
        return np.array(self.prompts)[places], np.array(self.outputs)[places]


def checked_lengths(drawn: Sequence[int] | Tokens, number: int) -> list[int]:
    """Return drawn lengths as a list; raises ValueError unless they are so many whole numbers from 1 on."""
    return checked("length", drawn, number, "lengths are whole numbers of at least 1 token", whole=True)


def drawn_lengths(draw: Draw, rng: Rng, number: int) -> list[int]:
    """Draw lengths and check them; raises ValueError."""
    require(callable(draw), "the lengths", draw, "give a distribution, such as Fixed(100)")
    return checked_lengths(draw(rng, number), number)


def true_length(request: Request) -> int:
    """Return the output tokens that a request comes to: its `output_length`, at most `max_tokens`."""
    return min(request.output_length or request.max_tokens, request.max_tokens)


def _check_range(minimum: int, maximum: int, most: int = _MOST_TOKENS) -> None:
    count("minimum of the lengths", minimum, 1, most)
    count("maximum of the lengths", maximum, minimum, most)


def _check_factor(mean: float, factor: float) -> None:
    scaled = mean * real("size", factor)
    remedy = f"it makes a mean of {mean!r} tokens one of {scaled:.4g}; give a size above {1 / mean:.4g}"
    require(1 < scaled < math.inf, "size", factor, remedy)


def _solved(mean_of: Callable[[float], float], mean: float, low: float, high: float) -> float:
    """Return the parameter from low to high that makes a mean, which grows with it; raises ValueError."""
    from scipy.optimize import brentq

    real("mean", mean)
    least, most = mean_of(low), mean_of(high)
    if least == mean == most:
        return low
    remedy = f"it must lie between {least:.6g} and {most:.6g}, and off both"
    require(least < mean < most, "mean", mean, remedy)
    return float(brentq(lambda parameter: mean_of(parameter) - mean, low, high, xtol=1e-15))


def _rounded(rng: Rng, values: Fractions) -> Tokens:
    whole = np.floor(values)
    return np.asarray(whole + (rng.random(len(values)) < values - whole), dtype=np.int64)


def _measured(lengths: Iterable[int]) -> list[int]:
    lengths = tuple(lengths)
    require(len(lengths) > 0, "the number of lengths to draw from", 0, "give at least one")
    return checked_lengths(lengths, len(lengths))
