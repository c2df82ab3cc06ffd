"""How long prompts and outputs are: lengths are drawn by quantile, so that two can be coupled."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from cbresearch.request import Refusal, Request
from cbresearch.workloads.draws import check_range, lognormal_location

Tokens = NDArray[np.int64]
Fractions = NDArray[np.float64]

Draw = Callable[[np.random.Generator, int], Tokens]
"""Draws so many lengths in tokens, each at least 1; a plain function of your own will do."""

DrawPairs = Callable[[np.random.Generator, int], tuple[Tokens, Tokens]]
"""Draws so many prompt lengths, and the output lengths that belong to them."""

_NORMAL = NormalDist()


class Lengths(ABC):
    """A distribution of lengths in tokens; called with a generator and a number, it draws as many.

    A length is the quantile at a uniform number. Where that is no whole number, it is rounded up or down at
    random by its fraction, which keeps the mean exact. Every distribution tells its `mean` in tokens.
    """

    __slots__ = ()

    @abstractmethod
    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length below which each fraction of the lengths lies; fractions are in [0, 1)."""

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Tokens:
        """Return so many lengths."""
        return _rounded(rng, self.quantile(rng.random(num_requests)))


@dataclass(frozen=True, slots=True)
class Fixed(Lengths):
    """Give every request the same length.

    Attributes:
        tokens: That length.

    Raises:
        ValueError: It is below 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        check_range(self.tokens, self.tokens)

    @property
    def mean(self) -> float:
        """Return the length."""
        return float(self.tokens)

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length for every fraction."""
        return np.full(len(fractions), float(self.tokens))


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """Draw each of minimum, …, maximum equally likely.

    Raises:
        ValueError: The range is empty or begins below 1.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        check_range(self.minimum, self.maximum)

    @property
    def mean(self) -> float:
        """Return the middle of the range."""
        return (self.minimum + self.maximum) / 2

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        return self.minimum + np.floor(fractions * (self.maximum - self.minimum + 1))


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
        check_range(self.minimum, self.minimum)
        if not self.minimum <= self.mean < math.inf:
            raise ValueError(
                f"mean is {self.mean!r}; it must be finite, and at least minimum = {self.minimum}"
            )

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        if self.mean == self.minimum:
            return np.full(len(fractions), float(self.minimum))
        going_on = 1 - 1 / (self.mean - self.minimum + 1)
        lengths: Fractions = self.minimum + np.floor(np.log1p(-fractions) / math.log(going_on))
        return lengths


@dataclass(frozen=True, slots=True)
class Lognormal(Lengths):
    """Draw from a lognormal distribution that is clipped to [minimum, maximum] and keeps its mean.

    Attributes:
        mean: Expected length in tokens after clipping; the location is solved for it.
        sigma: Standard deviation of the logarithm before clipping; 0 makes all lengths equal.
        maximum: Largest length.
        minimum: Smallest length.

    Raises:
        ValueError: The numbers admit no such distribution; the message names them.
    """

    mean: float
    sigma: float
    maximum: int
    minimum: int = 1
    _location: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        location = lognormal_location(self.mean, self.sigma, self.maximum, self.minimum)
        object.__setattr__(self, "_location", location)

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length at each fraction, not rounded."""
        if not self.sigma:
            return np.full(len(fractions), float(self.mean))
        scores = np.array([_NORMAL.inv_cdf(min(max(u, 1e-300), 1 - 1e-16)) for u in fractions.tolist()])
        lengths: Fractions = np.exp(self._location + self.sigma * scores).clip(self.minimum, self.maximum)
        return lengths

    def scaled(self, factor: float) -> "Lognormal":
        """Return it with mean and bounds times `factor`; the bounds become whole numbers of at least 1."""
        _check_factor(self.mean, factor)
        minimum = max(1, math.floor(self.minimum * factor))
        return Lognormal(
            self.mean * factor, self.sigma, max(minimum, math.ceil(self.maximum * factor)), minimum
        )


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
        check_range(self.minimum, self.maximum)
        check_exponent(self.exponent)

    @property
    def mean(self) -> float:
        """Return the expected length, summed over all."""
        odds = zipf_odds(self.maximum, self.exponent, self.minimum)
        return float(odds @ np.arange(self.minimum, self.maximum + 1))

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the whole length at each fraction."""
        below = np.cumsum(zipf_odds(self.maximum, self.exponent, self.minimum))
        # The sum of all odds may round to less than 1.
        places = np.searchsorted(below[:-1], fractions, side="right")
        return (self.minimum + places).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Empirical(Lengths):
    """Draw with replacement from lengths that somebody measured.

    Attributes:
        lengths: Those, in tokens; they are kept in order.

    Raises:
        ValueError: There is none, or one is no whole number of at least 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(sorted(_checked(self.lengths))))

    @property
    def mean(self) -> float:
        """Return their mean."""
        return sum(self.lengths) / len(self.lengths)

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the measured length at each fraction."""
        places = (fractions * len(self.lengths)).astype(np.int64)
        return np.array(self.lengths, dtype=np.float64)[places]


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
        object.__setattr__(self, "points", tuple((float(u), float(x)) for u, x in self.points))
        fractions, lengths = np.array(self.points).T
        if fractions[0] != 0 or fractions[-1] != 1 or np.any(np.diff(fractions) <= 0):
            raise ValueError(f"the fractions are {fractions.tolist()}; they must grow from 0 to 1")
        if lengths[0] < 1 or np.any(np.diff(lengths) < 0) or not math.isfinite(lengths[-1]):
            raise ValueError(f"the lengths are {lengths.tolist()}; they must be at least 1 and grow")
        object.__setattr__(self, "_power", _solved_power(self.mean, fractions, lengths))

    def quantile(self, fractions: Fractions) -> Fractions:
        """Return the length at each fraction, not rounded."""
        at, lengths = np.array(self.points).T
        # Relative to the largest, so that no power overflows.
        top = lengths[-1]
        if abs(self._power) < _NO_POWER:
            grown: Fractions = np.exp(np.interp(fractions, at, np.log(lengths / top)))
        else:
            grown = np.interp(fractions, at, (lengths / top) ** self._power) ** (1 / self._power)
        return np.asarray((grown * top).clip(lengths[0], top))

    def scaled(self, factor: float) -> "Quantiles":
        """Return it with mean and percentiles times `factor`; no percentile falls below 1 token."""
        _check_factor(self.mean, factor)
        return Quantiles(self.mean * factor, tuple((u, max(1.0, x * factor)) for u, x in self.points))


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
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation is {self.correlation!r}; it must lie between -1 and 1")

    def __call__(self, rng: np.random.Generator, num_requests: int) -> tuple[Tokens, Tokens]:
        """Return so many prompt lengths and output lengths."""
        first, own = rng.standard_normal((2, num_requests))
        second = self.correlation * first + math.sqrt(1 - self.correlation**2) * own
        prompts = _rounded(rng, self.prompts.quantile(_normal_cdf(first)))
        return prompts, _rounded(rng, self.outputs.quantile(_normal_cdf(second)))


@dataclass(frozen=True, slots=True)
class Joint:
    """Draw whole pairs with replacement, so that whatever couples a prompt to its output stays.

    Attributes:
        prompts: Measured prompt lengths in tokens.
        outputs: The output lengths that belong to them.

    Raises:
        ValueError: There is none, one is below 1, or they are not as many.
    """

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("prompts", "outputs"):
            object.__setattr__(self, name, tuple(_checked(getattr(self, name))))
        if len(self.prompts) != len(self.outputs):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.outputs)} outputs; give pairs")

    @classmethod
    def of(cls, requests: Iterable[Request | Refusal]) -> "Joint":
        """Return the pairs of a trace's requests, those that were refused left out."""
        known = [request for request in requests if isinstance(request, Request)]
        return cls(
            tuple(request.num_prompt_tokens for request in known),
            tuple(min(request.output_length or request.max_tokens, request.max_tokens) for request in known),
        )

    def __call__(self, rng: np.random.Generator, num_requests: int) -> tuple[Tokens, Tokens]:
        """Return so many prompt lengths and output lengths."""
        places = rng.integers(len(self.prompts), size=num_requests)
        return np.array(self.prompts)[places], np.array(self.outputs)[places]


def zipf_odds(maximum: int, exponent: float, minimum: int = 1) -> Fractions:
    """Return the probabilities of minimum, …, maximum under Zipf's law."""
    odds: Fractions = np.arange(minimum, maximum + 1, dtype=np.float64) ** -exponent
    odds /= odds.sum()
    return odds


def check_exponent(exponent: float) -> None:
    """Refuse an exponent below 0; raises ValueError."""
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent is {exponent!r}; it must be a finite number, 0 or more")


_NO_POWER = 1e-9
# (1 / 10^6)^-50 is still a float.
_LARGEST_POWER = 50.0
_erfc = np.frompyfunc(math.erfc, 1, 1)


def _check_factor(mean: float, factor: float) -> None:
    """Refuse a factor that leaves less than a token; raises ValueError."""
    if not 1 < mean * factor < math.inf:
        raise ValueError(
            f"size is {factor!r}, which makes a mean of {mean!r} tokens one of {mean * factor:.4g}; "
            f"give a size above {1 / mean:.4g}"
        )


def _normal_cdf(scores: Fractions) -> Fractions:
    # Below 1 even for a score in the far tail, since fractions are.
    below: Fractions = np.asarray(_erfc(-scores / math.sqrt(2)), dtype=np.float64) / 2
    return below.clip(0, 1 - 2**-53)


def _rounded(rng: np.random.Generator, values: Fractions) -> Tokens:
    whole = np.floor(values)
    return np.asarray(whole + (rng.random(len(values)) < values - whole), dtype=np.int64)


def _checked(lengths: Iterable[int]) -> list[int]:
    known = list(lengths)
    if not known:
        raise ValueError("there is no length to draw from; give at least one")
    for length in known:
        if isinstance(length, bool) or int(length) != length or length < 1:
            raise ValueError(f"a length is {length!r}; lengths are whole numbers of at least 1")
    return [int(length) for length in known]


def _solved_power(mean: float, fractions: Fractions, lengths: Fractions) -> float:
    """Return the power in which the quantiles are linear, given that their mean is to be this."""
    widths, below, above = np.diff(fractions), lengths[:-1], lengths[1:]
    if np.all(below == above) and mean == lengths[0]:
        return 1.0

    def mean_under(power: float) -> float:
        return float(widths @ [_segment_mean(a, b, power) for a, b in zip(below, above, strict=True)])

    low, high = -_LARGEST_POWER, _LARGEST_POWER
    least, most = mean_under(low), mean_under(high)
    if not least < mean < most:
        raise ValueError(
            f"mean is {mean!r}; through these percentiles it can lie between {least:.6g} and {most:.6g}"
        )
    # The mean grows with the power, and 80 halvings use up the digits of a float.
    for _ in range(80):
        power = (low + high) / 2
        low, high = (power, high) if mean_under(power) < mean else (low, power)
    return power


def _segment_mean(a: float, b: float, power: float) -> float:
    """Return the mean of the lengths from a to b whose power grows linearly: Stolarsky's mean of a and b."""
    if a == b:
        return a
    logarithm = math.log(b / a)
    if abs(power) < _NO_POWER:
        return (b - a) / logarithm
    if abs(power + 1) < _NO_POWER:
        return a * b * logarithm / (b - a)
    # As multiples of b, in which nothing overflows for either sign: expm1(-k L) is (a / b)^k - 1.
    return b * power / (power + 1) * math.expm1(-(power + 1) * logarithm) / math.expm1(-power * logarithm)
