"""When requests come: each process is called with a generator and a number, and returns as many times."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbresearch.request import Refusal, Request
from cbresearch.workloads.draws import poisson_arrivals

Times = NDArray[np.float64]
"""Seconds since the start of the run, in order."""

Arrivals = Callable[[np.random.Generator, int], Times]
"""Draws so many arrival times; a plain function of your own will do."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Let requests come independently of one another: gaps are exponential, and none is cut short.

    Attributes:
        rate: Requests per second.

    Raises:
        ValueError: The rate is not a positive number.
    """

    rate: float

    def __post_init__(self) -> None:
        check_positive("rate", self.rate, "requests per second")

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Return the times; the last of n is expected at n / rate."""
        return np.asarray(poisson_arrivals(rng, num_requests, self.rate), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Let requests come in gaps of a gamma distribution: vLLM's `--burstiness`.

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
        check_positive("rate", self.rate, "requests per second")
        check_positive("burstiness", self.burstiness, "1 is Poisson")

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Return the times; the last of n is expected at n / rate."""
        scale = 1 / (self.rate * self.burstiness)
        times = np.cumsum(rng.gamma(self.burstiness, scale, num_requests))
        if self.exact_span and num_requests:
            times *= num_requests / self.rate / times[-1]
        return times


@dataclass(frozen=True, slots=True)
class OnOff:
    """Let requests come in bursts: a Poisson process whose rate a Markov chain of two states switches.

    The chain stays on for an exponential time of mean `on_seconds`, then off for one of mean `off_seconds`,
    and so on; it begins in equilibrium. While it is off, requests come at `off_rate`; while it is on, at the
    rate that makes the long-run mean `rate`. With an `off_rate` of 0 it is the interrupted Poisson process.

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
        check_positive("rate", self.rate, "requests per second")
        check_positive("on_seconds", self.on_seconds, "mean seconds")
        check_positive("off_seconds", self.off_seconds, "mean seconds")
        if not 0 <= self.off_rate <= self.rate:
            raise ValueError(f"off_rate is {self.off_rate!r}; it must lie between 0 and rate = {self.rate!r}")

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
        exponent = switching * window_seconds
        return 1 + 2 * excess / switching * (1 + math.expm1(-exponent) / exponent)

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Return the times of a unit Poisson process, on the clock that the switching rate makes of it."""
        if not num_requests:
            return np.empty(0)
        work = np.cumsum(rng.exponential(1.0, num_requests))
        is_on = bool(rng.random() < self.on_fraction)
        cycle = (self.on_seconds, self.off_seconds) if is_on else (self.off_seconds, self.on_seconds)
        rates = (self.on_rate, self.off_rate) if is_on else (self.off_rate, self.on_rate)
        ends, done = np.zeros(1), np.zeros(1)
        while done[-1] <= work[-1]:
            lengths = rng.exponential(1.0, (64, 2)) * cycle
            ends = np.append(ends, ends[-1] + np.cumsum(lengths))
            done = np.append(done, done[-1] + np.cumsum(lengths * rates))
        return np.interp(work, done, ends)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Let all requests come at the same time, as a batch job does.

    Attributes:
        at: Seconds since the start of the run.

    Raises:
        ValueError: The time is negative or not finite.
    """

    at: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.at < math.inf:
            raise ValueError(f"at is {self.at!r}; it must be a finite number of seconds, 0 or more")

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Return the time as often as there are requests; nothing is drawn."""
        return np.full(num_requests, float(self.at))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Let requests come when others did, such as those of a trace.

    Attributes:
        times: Seconds since the start of the run, in order.

    Raises:
        ValueError: The times are negative, not finite or not in order.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(map(float, self.times)))
        check_times(np.array(self.times), len(self.times))

    def __call__(self, rng: np.random.Generator, num_requests: int) -> Times:
        """Return the first times; nothing is drawn.

        Raises:
            ValueError: There are fewer.
        """
        if num_requests > len(self.times):
            raise ValueError(f"{num_requests} arrivals are asked for, and {len(self.times)} were recorded")
        return np.array(self.times[:num_requests])


def scale_rate(requests: Sequence[Request | Refusal], factor: float) -> list[Request | Refusal]:
    """Return the requests `factor` times as fast: every interval, from time 0 on, is divided by it.

    So the rate is multiplied, the span divided, and their order and the shape of the gaps stay. A deadline
    keeps its distance from the arrival: who asks more often is not in more of a hurry.

    Args:
        requests: Whom to scale.
        factor: 2 is twice as fast.

    Raises:
        ValueError: The factor is not a positive number.
    """
    check_positive("factor", factor, "2 is twice as fast")
    return [request if factor == 1 else _moved(request, request.arrival / factor) for request in requests]


def merge(*workloads: Sequence[Request | Refusal]) -> list[Request | Refusal]:
    """Return the requests of several workloads in order of arrival; equal times keep the order given.

    Raises:
        ValueError: Two requests have one id; name a `client` for each in `make_requests`.
    """
    together = [request for workload in workloads for request in workload]
    seen: set[str] = set()
    for request in together:
        if request.id in seen:
            raise ValueError(f"id {request.id!r} is in two workloads; give each a client of its own")
        seen.add(request.id)
    return sorted(together, key=lambda request: request.arrival)


def draw_times(arrivals: Arrivals, rng: np.random.Generator, num_requests: int) -> Times:
    """Draw arrivals, and refuse what are none; raises ValueError."""
    if num_requests < 0:
        raise ValueError(f"{num_requests} requests are asked for; give 0 or more")
    times = np.asarray(arrivals(rng, num_requests), dtype=np.float64)
    check_times(times, num_requests)
    return times


def check_times(times: Times, num_requests: int) -> None:
    """Refuse what are no arrival times; raises ValueError with the first that is wrong."""
    if times.shape != (num_requests,):
        raise ValueError(f"the arrivals have the shape {times.shape}; {num_requests} times were asked for")
    steps = np.diff(times, prepend=0.0)
    bad = np.flatnonzero(~(np.isfinite(times) & (steps >= 0)))
    if bad.size:
        place = int(bad[0])
        before = float(times[place - 1]) if place else 0.0
        raise ValueError(
            f"arrival {place} is {float(times[place])!r}, behind {before!r}; "
            "times are finite seconds from 0 on, in order"
        )


def check_positive(name: str, value: float, unit: str) -> None:
    """Refuse what is no positive finite number; raises ValueError."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be a positive number ({unit})")


def _moved(request: Request | Refusal, arrival: float) -> Request | Refusal:
    if isinstance(request, Refusal) or request.deadline is None:
        return replace(request, arrival=arrival)
    return replace(request, arrival=arrival, deadline=arrival + (request.deadline - request.arrival))
