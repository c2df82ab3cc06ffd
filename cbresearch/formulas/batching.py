"""Steps, slots and speed-up of static and continuous batching.

Letters: B slots, X a request's output length (one step a token), M_B the largest of B independent X, F the
distribution function of X; a step of n rows takes t0 + t1·n seconds.
"""

import math
from heapq import heapreplace

import numpy as np

from cbresearch.formulas.checks import Lengths, count, lengths_array, non_negative, positive

__all__ = [
    "continuous_seconds", "continuous_steps", "expected_max", "expected_max_exponential",
    "expected_max_geometric", "expected_max_uniform", "finite_speed_up", "graham_bounds", "light_load_rate",
    "mean_occupancy_static", "occupancy_by_littles_law", "speed_up", "speed_up_with_step_cost",
    "static_seconds", "static_steps", "static_utilization", "throughput_decode",
]  # fmt: skip


def expected_max(lengths: Lengths, num_slots: int) -> float:
    """Return E[M_B] when each length is drawn anew from an observed sample.

    P(M_B <= x) = F(x)^B, so E[M_B] = Σ x (F(x)^B − F(x⁻)^B) over the distinct x: exact, O(n log n).
    Source: David and Nagaraja, Order Statistics, 2003, chapter 2.

    Args:
        lengths: Observed lengths in tokens.
        num_slots: Slots B.
    """
    slots = count("num_slots", num_slots)
    values, counts = np.unique(lengths_array("lengths", lengths), return_counts=True)
    below_or_at = (np.cumsum(counts) / counts.sum()) ** slots
    return float(values @ np.diff(below_or_at, prepend=0.0))


def expected_max_uniform(low: int, high: int, num_slots: int) -> float:
    """Return E[M_B] for integers that are uniform on low..high.

    E[M_B] = high − Σ_{k=low}^{high−1} P(M_B <= k), with P(M_B <= k) = ((k − low + 1)/(high − low + 1))^B.
    Source: the tail sum of an integer variable; David and Nagaraja, Order Statistics, 2003, chapter 2.

    Args:
        low: Smallest length in tokens.
        high: Largest length in tokens.
        num_slots: Slots B.
    """
    low, high, slots = count("low", low), count("high", high), count("num_slots", num_slots)
    if high < low:
        raise ValueError(f"high is {high!r}, below low {low!r}")
    return high - float(np.sum((np.arange(1, high - low + 1) / (high - low + 1)) ** slots))


def expected_max_exponential(mean: float, num_slots: int) -> float:
    """Return E[M_B] = mean · H_B for exponential lengths, H_B = 1 + 1/2 + ... + 1/B.

    Source: Rényi, 1953: while k are left, the wait for the next to end is exponential with mean / k.

    Args:
        mean: Mean length in tokens.
        num_slots: Slots B.
    """
    positive(mean=mean)
    return float(mean * _harmonic(count("num_slots", num_slots)))


def expected_max_geometric(p: float, num_slots: int) -> float:
    """Return E[M_B] for lengths on 1, 2, ... of which each token is the last with probability p.

    With q = 1 − p, E[M_B] = Σ_{k>=0} P(M_B > k) = Σ_{k>=0} (1 − (1 − q^k)^B). All terms are positive; the
    textbook Σ_k (−1)^{k+1} C(B,k)/(1 − q^k) cancels away every digit from B of about 50.
    Source: Eisenberg, Statistics & Probability Letters 78, 2008, with the limit H_B/(−ln q) + 1/2 for p → 0.

    Args:
        p: Probability that a token is the last; the mean length is 1/p tokens.
        num_slots: Slots B.
    """
    slots = count("num_slots", num_slots)
    if not 0 < p <= 1:
        raise ValueError(f"p is {p!r}; it must be a probability above 0")
    rate = -math.log1p(-p) if p < 1 else math.inf
    if rate < 1e-5:
        # The limit is off by less than rate / 12 here, and the sum would be too long.
        return _harmonic(slots) / rate + 0.5
    # What follows the last term is below B q^k / p: 10^-17 of the mean length.
    num_terms = math.ceil((math.log(slots) + 40) / rate)
    power = np.exp(-rate * np.arange(1, num_terms))
    return 1.0 + float(np.sum(-np.expm1(slots * np.log1p(-power))))


def static_utilization(mean_length: float, expected_maximum: float) -> float:
    """Return the useful share of a static batch's slot steps, E[X]/E[M_B].

    A batch of B holds its slots for M_B steps and needs ΣX of its B·M_B slot steps; over many batches the
    ratio of the sums is the ratio of the means (renewal-reward theorem).
    Source: the waste is described in Orca, OSDI'22, section 3; the form is our own.

    Args:
        mean_length: E[X] in tokens.
        expected_maximum: E[M_B] in tokens.
    """
    positive(mean_length=mean_length, expected_maximum=expected_maximum)
    if expected_maximum < mean_length * (1 - 1e-12):
        raise ValueError(f"expected_maximum is {expected_maximum!r}, below mean_length {mean_length!r}")
    return float(mean_length / expected_maximum)


def mean_occupancy_static(mean_length: float, expected_maximum: float, num_slots: int) -> float:
    """Return the useful rows in the mean step of static batching: B times `static_utilization`.

    Args:
        mean_length: E[X] in tokens.
        expected_maximum: E[M_B] in tokens.
        num_slots: Slots B.
    """
    return count("num_slots", num_slots) * static_utilization(mean_length, expected_maximum)


def speed_up(mean_length: float, expected_maximum: float) -> float:
    """Return throughput of continuous over static batching, E[M_B]/E[X]: endless queue, equal step times.

    Source: continuous batching keeps all slots useful, static batching the share `static_utilization`.

    Args:
        mean_length: E[X] in tokens.
        expected_maximum: E[M_B] in tokens.
    """
    return 1 / static_utilization(mean_length, expected_maximum)


def speed_up_with_step_cost(
    mean_length: float, expected_maximum: float, num_slots: int, t0: float, t1: float, *, padded: bool
) -> float:
    """Return throughput of continuous over static batching when a step of n rows takes t(n) = t0 + t1·n.

    Endless queue; prefill and the growth of the context are left out. Continuous batching serves B requests
    in E[X] steps of B rows: (t0 + t1·B)·E[X]. Static batching needs M_B steps for them, and
    - released (finished rows leave): the rows of all steps add up to ΣX, so t0·E[M_B] + t1·B·E[X], and
      S = (t0·E[M_B] + t1·B·E[X]) / ((t0 + t1·B)·E[X]), which falls to 1 as t1·B outgrows t0;
    - padded (all B rows are computed to the end): (t0 + t1·B)·E[M_B], and S = E[M_B]/E[X] for any t0, t1.
    Source: own derivation.

    Args:
        mean_length: E[X] in tokens.
        expected_maximum: E[M_B] in tokens.
        num_slots: Slots B.
        t0: Seconds of a step, whatever is in it.
        t1: Seconds of each row in it.
        padded: Whether the static batch computes finished rows until its longest request is done.
    """
    _check_step_cost(t0, t1)
    equal_steps, rows = speed_up(mean_length, expected_maximum), t1 * count("num_slots", num_slots)
    return equal_steps if padded else float((t0 * equal_steps + rows) / (t0 + rows))


def static_steps(lengths: Lengths, num_slots: int) -> int:
    """Return the steps that static batching takes: the sum of the batches' maxima, filled in order.

    One token a request and step, prompts computed within the first step. Source: definition.

    Args:
        lengths: Output lengths in tokens, in the order of service.
        num_slots: Slots B.
    """
    return sum(max(batch) for batch in _batches(lengths, num_slots))


def continuous_steps(lengths: Lengths, num_slots: int) -> int:
    """Return the steps that continuous batching takes: each request in order joins the first free slot.

    This is list scheduling, and exact for first come, first served with memory and budget for all.
    Source: Graham, SIAM J. Appl. Math. 17, 1969.

    Args:
        lengths: Output lengths in tokens, in the order of service.
        num_slots: Slots B.
    """
    slots, whole = count("num_slots", num_slots), _whole_lengths(lengths)
    slot_ends = [0] * min(slots, len(whole))
    for length in whole:
        heapreplace(slot_ends, slot_ends[0] + length)
    return max(slot_ends)


def graham_bounds(lengths: Lengths, num_slots: int) -> tuple[float, float]:
    """Return a lower and an upper bound on `continuous_steps` that hold in any order of the requests.

    max(ΣX/B, X_max) <= steps <= ΣX/B + (1 − 1/B)·X_max: until the request that ends last has begun, no slot
    is free. Source: Graham, SIAM J. Appl. Math. 17, 1969.

    Args:
        lengths: Output lengths in tokens.
        num_slots: Slots B.
    """
    slots, whole = count("num_slots", num_slots), _whole_lengths(lengths)
    share, longest = sum(whole) / slots, max(whole)
    return max(share, longest), share + (1 - 1 / slots) * longest


def static_seconds(lengths: Lengths, num_slots: int, t0: float, t1: float = 0.0, *, padded: bool) -> float:
    """Return the seconds of static batching when a step of n rows takes t(n) = t0 + t1·n.

    Summed over steps: t0·steps + t1·rows. Released, the rows are ΣX; padded, each batch's size times its
    longest request. Source: own derivation, as in `speed_up_with_step_cost`.

    Args:
        lengths: Output lengths in tokens, in the order of service.
        num_slots: Slots B.
        t0: Seconds of a step, whatever is in it.
        t1: Seconds of each row in it.
        padded: Whether finished rows are computed until the longest request of their batch is done.
    """
    _check_step_cost(t0, t1)
    batches = _batches(lengths, num_slots)
    steps = sum(max(batch) for batch in batches)
    rows = sum(len(batch) * max(batch) if padded else sum(batch) for batch in batches)
    return float(t0 * steps + t1 * rows)


def continuous_seconds(lengths: Lengths, num_slots: int, t0: float, t1: float = 0.0) -> float:
    """Return the seconds of continuous batching when a step of n rows takes t(n) = t0 + t1·n.

    The rows of all steps of the list schedule add up to ΣX, so the sum is t0·steps + t1·ΣX.
    Source: own derivation from `continuous_steps`.

    Args:
        lengths: Output lengths in tokens, in the order of service.
        num_slots: Slots B.
        t0: Seconds of a step, whatever is in it.
        t1: Seconds of each row in it.
    """
    _check_step_cost(t0, t1)
    return float(t0 * continuous_steps(lengths, num_slots) + t1 * sum(_whole_lengths(lengths)))


def finite_speed_up(
    lengths: Lengths, num_slots: int, t0: float = 1.0, t1: float = 0.0, *, padded: bool = True
) -> float:
    """Return `static_seconds` over `continuous_seconds` of these very requests; by default, of their steps.

    It differs from `speed_up` mostly since, at the end, the slots of continuous batching empty one by one.

    Args:
        lengths: Output lengths in tokens, in the order of service.
        num_slots: Slots B.
        t0: Seconds of a step, whatever is in it.
        t1: Seconds of each row in it.
        padded: Whether the static batch computes finished rows until its longest request is done.
    """
    static = static_seconds(lengths, num_slots, t0, t1, padded=padded)
    return static / continuous_seconds(lengths, num_slots, t0, t1)


def throughput_decode(num_seqs: float, step_seconds: float) -> float:
    """Return the output tokens per second of n decoding requests, n/t. Source: definition.

    Args:
        num_seqs: Requests n that decode in a step, one token each; a mean is welcome.
        step_seconds: Seconds t of the step.
    """
    positive(num_seqs=num_seqs, step_seconds=step_seconds)
    return float(num_seqs / step_seconds)


def occupancy_by_littles_law(rate: float, mean_residence: float) -> float:
    """Return the time-weighted mean number of running requests, L = λ·W.

    Source: Little, Operations Research 9, 1961.

    Args:
        rate: Requests per second λ that enter.
        mean_residence: Mean seconds W from entering a slot to leaving it.
    """
    positive(rate=rate, mean_residence=mean_residence)
    return float(rate * mean_residence)


def light_load_rate(services: Lengths, wait: float, attainment: float) -> float:
    """Return the arrival rate at which the share 1 − a waits too long for the request in service.

    The server takes one request, or one batch, and admits none until that is done. Requests that come at
    random during a service of S seconds wait longer than w if they come before its last w seconds, so
    λ·E[(S − w)⁺] of all do, and λ = (1 − a)/E[(S − w)⁺]; infinite if no service is longer than w.
    To first order in λ: no other request waits already, and one that waited is served as quickly as alone.
    Source: own derivation (Poisson arrivals see time averages, Wolff, 1982).

    Args:
        services: Seconds S of single services.
        wait: Seconds w that a request may wait.
        attainment: Share a of the requests that may not wait longer.
    """
    seconds = lengths_array("services", services)
    non_negative(wait=wait)
    if not 0 < attainment < 1:
        raise ValueError(f"attainment is {attainment!r}; it must be a share between 0 and 1")
    too_long = float(np.maximum(seconds - wait, 0).mean())
    return (1 - attainment) / too_long if too_long else math.inf


def _harmonic(number: int) -> float:
    return float(np.sum(1 / np.arange(1, number + 1)))


def _batches(lengths: Lengths, num_slots: int) -> list[list[int]]:
    slots, whole = count("num_slots", num_slots), _whole_lengths(lengths)
    return [whole[first : first + slots] for first in range(0, len(whole), slots)]


def _whole_lengths(lengths: Lengths) -> list[int]:
    values = lengths_array("lengths", lengths)
    for value in values[values != np.floor(values)]:
        raise ValueError(f"lengths holds {float(value)!r}; a number of steps is whole")
    return [int(value) for value in values]


def _check_step_cost(t0: float, t1: float) -> None:
    non_negative(t0=t0, t1=t1)
    if not t0 + t1:
        raise ValueError(f"t0 and t1 are both {t0!r}; a step takes time")
