"""Arrival processes: each is called with a random generator and a number, and returns as many times."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from cbresearch.checks import check_numbers, count, real
from cbresearch.request import Rejected, Request, listed
from cbresearch.workloads.common import Requests, Rng, checked, require

Times = NDArray[np.float64]
"""Seconds since the start of the run, in order."""

Arrivals = Callable[[Rng, int], Times]
"""Draws so many arrival times; a plain function of your own will do."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """Let requests arrive in gaps of a gamma distribution: vLLM's `--burstiness`.

    A gap's shape is `burstiness` and its scale 1 / (rate · burstiness), so its mean is 1 / rate and its
    squared coefficient of variation 1 / burstiness: 1 is Poisson, less is burstier, much more a metronome.

    Source: vLLM, `bench serve` (version 0.32.0).

    Attributes:
        rate: Requests per second.
        burstiness: Shape of the gaps.
        exact_span: Stretch the times so that the last of n comes at n / rate exactly, as vLLM does. The gaps
            are then no longer independent.

    Raises:
        ValueError: The rate or the burstiness is not a positive number.
    """

    rate: float
    burstiness: float
    exact_span: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def __call__(self, rng: Rng, num_requests: int) -> Times:
        """Return the times; the last of n is expected at n / rate."""
        scale = 1 / (self.rate * self.burstiness)
        times = np.cumsum(rng.gamma(self.burstiness, scale, num_requests))
        if self.exact_span and num_requests:
            times *= num_requests / self.rate / times[-1]
        return times


class Poisson(Gamma):
    """Let requests arrive independently of one another: gaps are exponential, and none is cut short."""

    def __init__(self, rate: float) -> None:
        """Take the requests per second; raises ValueError if that is not a positive number."""
        Gamma.__init__(self, rate, 1.0)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Let requests arrive in bursts: a Poisson process whose rate a Markov chain of two states switches.

    The chain stays on for an exponential time of mean `on_seconds`, then off for one of mean `off_seconds`,
    and so on; it begins in equilibrium. While it is off, requests arrive at `off_rate`; while it is on, at
    the rate that makes the long-run mean `rate`. An `off_rate` of 0 gives the interrupted Poisson process.

    Source: Fischer and Meier-Hellstern, "The Markov-modulated Poisson process (MMPP) cookbook", 1993;
    Kuczura, "The interrupted Poisson process as an overflow process", 1973.

    Attributes:
        rate: Requests per second in the long run.
        on_seconds: Mean seconds of an on period.
        off_seconds: Mean seconds of an off period.
        off_rate: Requests per second while off.

    Raises:
        ValueError: A number is not positive, or `off_rate` does not lie between 0 and `rate`.
    """

    rate: float
    on_seconds: float
    off_seconds: float
    off_rate: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, off_rate=(0, self.rate))

    @property
    def on_fraction(self) -> float:
        """Return the long-run fraction of time that is on."""
        return self.on_seconds / (self.on_seconds + self.off_seconds)

    @property
    def on_rate(self) -> float:
        """Return the requests per second while on."""
        return (self.rate - (1 - self.on_fraction) * self.off_rate) / self.on_fraction

    def dispersion(self, window_seconds: float) -> float:
        """Return the variance over the mean of the arrivals in a window; 1 for a Poisson process.

        With switching rate κ = 1/on + 1/off, difference d of the rates and on fraction p, the rate's
        autocovariance is d² p (1 - p) e^(-κτ); twice its integral over the window gives the excess variance.

        Args:
            window_seconds: Length of the window, above 0.
        """
        switching = 1 / self.on_seconds + 1 / self.off_seconds
        excess = (self.on_rate - self.off_rate) ** 2 * self.on_fraction * (1 - self.on_fraction) / self.rate
        exponent = switching * real("window_seconds", window_seconds, positive=True, unit="seconds")
        return 1 + 2 * excess / switching * (1 + math.expm1(-exponent) / exponent)

    def __call__(self, rng: Rng, num_requests: int) -> Times:
        """Return the times of a unit Poisson process, on the clock that the switching rate makes of it."""
        work = np.cumsum(rng.exponential(1.0, num_requests))
        is_on = bool(rng.random() < self.on_fraction)
        cycle = (self.on_seconds, self.off_seconds) if is_on else (self.off_seconds, self.on_seconds)
        rates = (self.on_rate, self.off_rate) if is_on else (self.off_rate, self.on_rate)
        ends, done = np.zeros(1), np.zeros(1)
        # Without requests, there is no work, and no period is drawn.
        while np.any(done[-1] <= work[-1:]):
            lengths = rng.exponential(1.0, (64, 2)) * cycle
            ends = np.append(ends, ends[-1] + np.cumsum(lengths))
            done = np.append(done, done[-1] + np.cumsum(lengths * rates))
        return np.interp(work, done, ends)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Let all requests arrive at the same time, as a batch job does.

    Attributes:
        at: Seconds since the start of the run.

    Raises:
        ValueError: The time is negative or not finite.
    """

    at: float = 0.0

    def __post_init__(self) -> None:
        real("at", self.at, unit="seconds")

    def __call__(self, rng: Rng, num_requests: int) -> Times:
        """Return the time as often as there are requests; nothing is drawn."""
        return np.full(num_requests, float(self.at))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Let requests arrive at recorded times, such as those of a trace.

    Attributes:
        times: Seconds since the start of the run, in order.

    Raises:
        ValueError: The times are negative, not finite or not in order.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        times = tuple(self.times)
        object.__setattr__(self, "times", tuple(_checked_times(times, len(times))))

    def __call__(self, rng: Rng, num_requests: int) -> Times:
        """Return the first times; nothing is drawn.

        Raises:
            ValueError: Fewer were recorded.
        """
        if num_requests > len(self.times):
            raise ValueError(f"{num_requests} arrivals are asked for, and {len(self.times)} were recorded")
        return np.array(self.times[:num_requests])


def scale_rate(requests: Requests, factor: float) -> list[Request | Rejected]:
    """Return the requests `factor` times as fast: every interval, from time 0 on, is divided by it.

    So the rate is multiplied, the span divided, and their order and the shape of the gaps stay. A deadline
    keeps its distance from the arrival: a client that asks more often is not in more of a hurry.

    Args:
        requests: The workload.
        factor: 2 is twice as fast.

    Raises:
        TypeError: An entry is no request, or the workload no list of them.
        ValueError: The factor is not a positive number.
    """
    factor = real("factor", factor, positive=True)
    scaled: list[Request | Rejected] = []
    for request in listed(requests):
        arrival = request.arrival / factor
        moved = request.moved(arrival)
        if isinstance(request, Request) and isinstance(moved, Request) and request.deadline is not None:
            moved = replace(moved, deadline=arrival + (request.deadline - request.arrival))
        scaled.append(moved)
    return scaled


def merge(*workloads: Requests) -> list[Request | Rejected]:
    """Return the requests of several workloads in order of arrival; equal times keep the order given.

    Raises:
        TypeError: An entry is no request, or the workload no list of them.
        ValueError: Two requests have one id; name a `client` for each in `make_requests`.
    """
    together = [request for workload in workloads for request in listed(workload)]
    repeated = [name for name, times in Counter(request.id for request in together).items() if times > 1]
    if repeated:
        raise ValueError(f"id {repeated[0]!r} is in two workloads; give each a client of its own")
    return sorted(together, key=lambda request: request.arrival)


def spread_arrivals(requests: Requests, rng: Rng, tick: float) -> list[Request | Rejected]:
    """Spread requests that a trace recorded at one time over the time until the next ones; this is invented.

    Some traces round their times: in Mooncake's conversation trace about ten requests arrive at once every
    3 seconds, which no server ever saw, and each of them waits for the prefills of the other nine. Requests
    of one arrival are moved to uniform times in [arrival, arrival + tick), in the given order, and never
    past the next recorded arrival.

    Args:
        requests: The workload, in order of arrival.
        rng: The random generator.
        tick: Seconds to which the times were rounded.

    Raises:
        TypeError: An entry is no request, or the workload no list of them.
        ValueError: `tick` is not a positive number, or the arrivals are not in order.
    """
    tick = real("tick", tick, positive=True, unit="seconds")
    by_arrival = groupby(listed(requests), lambda request: request.arrival)
    groups = [(time, list(group)) for time, group in by_arrival]
    spread: list[Request | Rejected] = []
    for (arrival, group), (following, _) in zip(groups, [*groups[1:], (math.inf, [])], strict=True):
        if following < arrival:
            raise ValueError(f"an arrival at {following!r} follows one at {arrival!r}; sort by arrival")
        offsets = np.sort(rng.random(len(group))) * min(tick, following - arrival)
        pairs = zip(group, offsets.tolist(), strict=True)
        spread += [request.moved(arrival + offset) for request, offset in pairs]
    return spread


def draw_times(arrivals: Arrivals, rng: Rng, num_requests: int) -> list[float]:
    """Draw arrival times and check them; raises ValueError with the first that is wrong."""
    num_requests = count("the number of requests", num_requests, 0, 10**7)
    require(callable(arrivals), "arrivals", arrivals, "give an arrival process, such as Poisson(4.0)")
    return _checked_times(arrivals(rng, num_requests), num_requests)


def _checked_times(drawn: Times | Sequence[float], number: int) -> list[float]:
    remedy = "times are finite seconds from 0 on, in order"
    times = checked("arrival", drawn, number, remedy)
    for place, (before, time) in enumerate(pairwise(times), start=1):
        if time < before:
            raise ValueError(f"arrival {place} is {time!r}, behind {before!r}; {remedy}")
    return times
