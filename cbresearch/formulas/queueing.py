"""How long requests wait for a slot, where queueing theory says so, and how long a run must be to see it.

Letters: requests come at a rate λ and hold a slot for S seconds, E[S] on average with the squared coefficient
of variation cv² = Var[S]/E[S]²; c slots, load ρ = λ·E[S]/c. A wait is the time from arrival to a slot, first
come, first served, in the steady state: ρ is below 1. Little's law is `occupancy_by_littles_law`.
"""

import math

import numpy as np

from cbresearch.formulas.checks import count, non_negative, positive

__all__ = [
    "clipped_gap_cv2", "clipped_gap_mean", "erlang_c", "kingman_wait", "md1_wait", "mg1_wait",
    "mm1_correlated_waits", "mm1_relaxation", "mmc_idle", "mmc_wait", "slotted_wait", "step_boundary_shift",
]  # fmt: skip


def mg1_wait(rate: float, mean_service: float, service_cv2: float) -> float:
    """Return the mean wait in seconds for one slot and Poisson arrivals, ρ/(1 − ρ)·(1 + cv²)/2·E[S].

    Source: Pollaczek, 1930, and Khinchine, 1932; exact for every distribution of S.

    Args:
        rate: Requests per second λ.
        mean_service: Mean seconds E[S] that a request holds the slot.
        service_cv2: Squared coefficient of variation of S: 0 for equal ones, 1 for exponential ones.
    """
    return kingman_wait(rate, mean_service, 1.0, service_cv2)


def md1_wait(rate: float, service: float) -> float:
    """Return the mean wait in seconds for one slot, Poisson arrivals and equal services, ρ/(1 − ρ)·S/2.

    Source: Erlang, 1909; `mg1_wait` without variance.

    Args:
        rate: Requests per second λ.
        service: Seconds S that each request holds the slot.
    """
    return mg1_wait(rate, service, 0.0)


def kingman_wait(rate: float, mean_service: float, arrival_cv2: float, service_cv2: float) -> float:
    """Return the mean wait in seconds for one slot, ρ/(1 − ρ)·(cv²_gaps + cv²)/2·E[S], about.

    Exact for Poisson arrivals, whose cv² is 1; otherwise an approximation that becomes right as ρ → 1.
    Source: Kingman, Proceedings of the Cambridge Philosophical Society 57, 1961; the factor ρ is usual since.

    Args:
        rate: Requests per second λ.
        mean_service: Mean seconds E[S].
        arrival_cv2: Squared coefficient of variation of the gaps between arrivals.
        service_cv2: Squared coefficient of variation of S.
    """
    load = _load(rate, mean_service, 1)
    non_negative(arrival_cv2=arrival_cv2, service_cv2=service_cv2)
    return load / (1 - load) * (arrival_cv2 + service_cv2) / 2 * mean_service


def erlang_c(rate: float, mean_service: float, num_slots: int) -> float:
    """Return the probability C that a request finds no slot free: Poisson arrivals, exponential services.

    With a = λ·E[S] it comes from Erlang's B, built up slot by slot: B_k = a·B_{k−1}/(k + a·B_{k−1}), B_0 = 1,
    and C = B_c/(1 − ρ·(1 − B_c)). Source: Erlang, 1917.

    Args:
        rate: Requests per second λ.
        mean_service: Mean seconds E[S].
        num_slots: Slots c.
    """
    load = _load(rate, mean_service, num_slots)
    blocked = 1.0
    for slot in range(1, num_slots + 1):
        blocked = load * num_slots * blocked / (slot + load * num_slots * blocked)
    return blocked / (1 - load * (1 - blocked))


def mmc_wait(rate: float, mean_service: float, num_slots: int) -> float:
    """Return the mean wait in seconds for c slots, C/(1 − ρ)·E[S]/c, with Poisson arrivals.

    Services are exponential and C is `erlang_c`. Source: Erlang, 1917.

    Args:
        rate: Requests per second λ.
        mean_service: Mean seconds E[S].
        num_slots: Slots c.
    """
    load = _load(rate, mean_service, num_slots)
    return erlang_c(rate, mean_service, num_slots) / (1 - load) * mean_service / num_slots


def mmc_idle(rate: float, mean_service: float, num_slots: int) -> float:
    """Return the share of the time in which all c slots are empty, P0, with exponential services.

    P0 = C·(1 − ρ)·c!/a^c with a = λ·E[S] and C = `erlang_c`. Source: Erlang, 1917.

    Args:
        rate: Requests per second λ.
        mean_service: Mean seconds E[S].
        num_slots: Slots c.
    """
    load = _load(rate, mean_service, num_slots)
    log_terms = math.lgamma(num_slots + 1) - num_slots * math.log(load * num_slots)
    return erlang_c(rate, mean_service, num_slots) * (1 - load) * math.exp(log_terms)


def slotted_wait(rate: float, mean_length: float, step: float, num_slots: int) -> float:
    """Return the mean wait in seconds for c slots of a batch whose steps take equal time: Poisson, geometric.

    A request has a geometric number of tokens, one a step, and can get a slot only between two steps; when
    no request is there the next step begins with the next arrival. Then the number n in the system at the
    beginnings of steps is a Markov chain: min(n, c) requests each end with probability 1/mean_length, and a
    Poisson number with mean λ·step comes. Its stationary distribution gives the mean number in the system,
    and Little's law the wait. The chain is cut where n is rarer than e⁻⁴⁰. Source: own derivation.

    Args:
        rate: Requests per second λ.
        mean_length: Mean tokens of a request, at least 1.
        step: Seconds of a step.
        num_slots: Slots c.
    """
    from scipy.stats import binom, poisson

    if not mean_length >= 1:
        raise ValueError(f"mean_length is {mean_length!r}; a request has at least 1 token")
    positive(step=step)
    load = _load(rate, mean_length * step, num_slots)
    arriving = rate * step
    size = num_slots + math.ceil((40 + 10 * arriving) / (1 - load))
    come = poisson.pmf(np.arange(size), arriving)
    moves = np.zeros((size, size))
    moves[0, 1] = 1.0
    for number in range(1, size):
        served = min(number, num_slots)
        for ended, probability in enumerate(binom.pmf(np.arange(served + 1), served, 1 / mean_length)):
            left = number - ended
            moves[number, left:] += probability * come[: size - left]
    moves[:, -1] += 1 - moves.sum(axis=1)
    balance = moves.T - np.eye(size)
    balance[-1] = 1.0
    share = np.linalg.solve(balance, np.eye(size)[-1])
    # Seconds spent before each move: a step, or a gap without a request.
    seconds = np.where(np.arange(size) > 0, step, 1 / rate) * share
    in_system = seconds[1:] @ (np.arange(1, size) + arriving / 2) / seconds.sum()
    return float(in_system / rate - mean_length * step)


def step_boundary_shift(rate: float, mean_length: float, step: float, num_slots: int) -> float:
    """Return by how many seconds `slotted_wait` exceeds `mmc_wait`, to first order in the step.

    It is step/2·(1 − P0) for waiting until the running step ends, which a request does unless all slots are
    empty, less step/2·(1 + P0)·W/E[S]: geometric lengths vary less than exponential ones, and when the batch
    runs empty the clock starts afresh. W is `mmc_wait`, P0 is `mmc_idle`. For one slot the shift is exact.
    Source: own derivation: the stationary mean change of a function f of n is 0; it is expanded to second
    order in the step, for the f whose drift in M/M/c is n less its mean.

    Args:
        rate: Requests per second λ.
        mean_length: Mean tokens of a request, at least 1.
        step: Seconds of a step.
        num_slots: Slots c.
    """
    positive(mean_length=mean_length, step=step)
    service = mean_length * step
    idle, wait = mmc_idle(rate, service, num_slots), mmc_wait(rate, service, num_slots)
    return step / 2 * (1 - idle - (1 + idle) * wait / service)


def clipped_gap_mean(rate: float, clip: float) -> float:
    """Return the mean seconds of exponential gaps that are clipped at so many means, (1 − e^(−k))/λ.

    Source: E[min(T, k/λ)] is the integral of P(T > t) up to k/λ.

    Args:
        rate: Requests per second λ before clipping.
        clip: Longest gap k in multiples of 1/λ.
    """
    positive(rate=rate, clip=clip)
    return -math.expm1(-clip) / rate


def clipped_gap_cv2(clip: float) -> float:
    """Return the squared coefficient of variation of clipped exponential gaps; 1 without a clip.

    E[min(T, k)²] = 2·(1 − (1 + k)·e^(−k)) in units of the mean before clipping; the mean is 1 − e^(−k).
    Source: E[min(T, k)²] is the integral of 2t·P(T > t) up to k.

    Args:
        clip: Longest gap k in multiples of the mean before clipping.
    """
    mean = clipped_gap_mean(1.0, clip)
    return 2 * (1 - (1 + clip) * math.exp(-clip)) / mean**2 - 1


def mm1_relaxation(load: float, mean_service: float) -> float:
    """Return the seconds in which a queue's memory of its beginning fades to 1/e, E[S]/(1 − √ρ)².

    Source: the relaxation time of M/M/1, Cohen, The Single Server Queue, 1982; other services: by order.

    Args:
        load: Load ρ of the slot.
        mean_service: Mean seconds E[S].
    """
    _load(load, 1.0, 1)
    positive(mean_service=mean_service)
    return mean_service / (1 - math.sqrt(load)) ** 2


def mm1_correlated_waits(load: float) -> float:
    """Return how many successive waits of a run say as much about their mean as one independent wait.

    It is 1 + 2·Σ of the waits' autocorrelations: (2 + 5ρ − 4ρ² + ρ³)/((2 − ρ)·(1 − ρ)²).
    Source: Daley, Journal of the Australian Mathematical Society 8, 1968; Whitt, Management Science 35, 1989.

    Args:
        load: Load ρ of the slot.
    """
    _load(load, 1.0, 1)
    return (2 + 5 * load - 4 * load**2 + load**3) / ((2 - load) * (1 - load) ** 2)


def _load(rate: float, mean_service: float, num_slots: int) -> float:
    positive(rate=rate, mean_service=mean_service)
    load = rate * mean_service / count("num_slots", num_slots)
    if not load < 1:
        raise ValueError(f"the load is {load!r}; from 1 on the queue grows without end and no mean exists")
    return load
