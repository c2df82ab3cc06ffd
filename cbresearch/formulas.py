"""Closed forms for what static and continuous batching should give; `metrics` measures the same quantities.

Letters: B slots, X a request's output length (one step a token), M_B the largest of B independent X, P its
prompt, F the distribution function of X, N a model's parameters; a step of n rows takes t0 + t1·n seconds.
Forms without a paper are derived where they stand. Every function raises ValueError, naming the argument
and its value, if the value is out of range or the sample is empty.
"""

import math
import operator
from heapq import heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from cbresearch.config import ModelShape

Lengths = npt.ArrayLike


def expected_max(lengths: Lengths, num_slots: int) -> float:
    """Return E[M_B] when each length is drawn anew from an observed sample.

    P(M_B <= x) = F(x)^B, so E[M_B] = Σ x (F(x)^B − F(x⁻)^B) over the distinct x: exact, O(n log n).
    Source: David and Nagaraja, Order Statistics, 2003, chapter 2.

    Args:
        lengths: Observed lengths in tokens.
        num_slots: Slots B.
    """
    slots = _count("num_slots", num_slots)
    values, counts = np.unique(_lengths("lengths", lengths), return_counts=True)
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
    low, high, slots = _count("low", low), _count("high", high), _count("num_slots", num_slots)
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
    _positive(mean=mean)
    return float(mean * _harmonic(_count("num_slots", num_slots)))


def expected_max_geometric(p: float, num_slots: int) -> float:
    """Return E[M_B] for lengths on 1, 2, ... of which each token is the last with probability p.

    With q = 1 − p, E[M_B] = Σ_{k>=0} P(M_B > k) = Σ_{k>=0} (1 − (1 − q^k)^B). All terms are positive; the
    textbook Σ_k (−1)^{k+1} C(B,k)/(1 − q^k) cancels away every digit from B of about 50.
    Source: Eisenberg, Statistics & Probability Letters 78, 2008, with the limit H_B/(−ln q) + 1/2 for p → 0.

    Args:
        p: Probability that a token is the last; the mean length is 1/p tokens.
        num_slots: Slots B.
    """
    slots = _count("num_slots", num_slots)
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
    _positive(mean_length=mean_length, expected_maximum=expected_maximum)
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
    return _count("num_slots", num_slots) * static_utilization(mean_length, expected_maximum)


def flop_utilization(lengths: Lengths, flops_per_token: float, peak_flops: float, seconds: float) -> float:
    """Return the share of the peak arithmetic that the output needed, Σ Lᵢ·f/(C·T).

    Source: model FLOPs utilization, PaLM, 2022, appendix B, with the output tokens as the useful work.

    Args:
        lengths: Output lengths Lᵢ of the requests served, in tokens.
        flops_per_token: FLOP f of one token, from `flops_per_token`.
        peak_flops: C in FLOP/s, measured (the best matrix product) or from the data sheet; say which.
        seconds: Time T that the run took.
    """
    _positive(flops_per_token=flops_per_token, peak_flops=peak_flops, seconds=seconds)
    return float(_lengths("lengths", lengths).sum() * flops_per_token / (peak_flops * seconds))


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
    equal_steps, rows = speed_up(mean_length, expected_maximum), t1 * _count("num_slots", num_slots)
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
    slots, whole = _count("num_slots", num_slots), _whole_lengths(lengths)
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
    slots, whole = _count("num_slots", num_slots), _whole_lengths(lengths)
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
    _positive(num_seqs=num_seqs, step_seconds=step_seconds)
    return float(num_seqs / step_seconds)


def occupancy_by_littles_law(rate: float, mean_residence: float) -> float:
    """Return the time-weighted mean number of running requests, L = λ·W.

    Source: Little, Operations Research 9, 1961.

    Args:
        rate: Requests per second λ that enter.
        mean_residence: Mean seconds W from entering a slot to leaving it.
    """
    _positive(rate=rate, mean_residence=mean_residence)
    return float(rate * mean_residence)


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes of one token's keys and values: 2 · layers · KV heads · head size · element bytes.

    Source: vLLM (PagedAttention), SOSP'23, section 3; KV heads in place of heads for grouped queries.
    """
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes


def kv_bytes_per_request(shape: ModelShape, num_tokens: int, block_size: int | None = None) -> int:
    """Return the bytes that a request of `num_tokens` cached tokens takes from the pool.

    Source: vLLM (PagedAttention), SOSP'23, section 4: whole blocks only.

    Args:
        shape: The model.
        num_tokens: Cached tokens; at most prompt + output − 1, since the last token is never fed back.
        block_size: Tokens per block, or None for memory to the exact token.
    """
    tokens = _count("num_tokens", num_tokens)
    if block_size is not None:
        block = _count("block_size", block_size)
        tokens = -(-tokens // block) * block
    return tokens * kv_bytes_per_token(shape)


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of a model's weights, N · element bytes. Source: definition."""
    return shape.num_parameters * shape.dtype_bytes


def num_requests_that_fit(capacity: float, per_request: float, reserved: float = 0.0) -> int:
    """Return how many requests fit, ⌊(capacity − reserved)/per request⌋. Source: definition.

    Args:
        capacity: Memory in bytes, or a pool in tokens.
        per_request: What each holds, in the same unit: at its longest, or `time_mean_held_tokens` on average.
        reserved: What is not for the cache, in the same unit, such as `weight_bytes`.
    """
    _positive(capacity=capacity, per_request=per_request)
    _non_negative(reserved=reserved)
    return max(0, int((capacity - reserved) // per_request))


def flops_per_token(shape: ModelShape, context_length: float) -> float:
    """Return the FLOP of one token's forward pass, 2N + 4 · layers · query heads · head size · context.

    Source: PaLM, 2022, appendix B, the forward third. N should leave out an embedding table that is only
    looked up (one that also serves as output layer counts).

    Args:
        shape: The model.
        context_length: Tokens that the token attends to, itself included; a mean is welcome.
    """
    _non_negative(context_length=context_length)
    attention_width = shape.num_layers * shape.num_heads * shape.head_dim
    return float(2 * shape.num_parameters + 4 * attention_width * context_length)


def paged_fragmentation(mean_held: float, block_size: int) -> float:
    """Return the expected empty share of held blocks, ((b − 1)/2)/(E[held] + (b − 1)/2).

    Only a request's last block is part empty, by (b − 1)/2 tokens if its length mod b is uniform.
    Source: vLLM (PagedAttention), SOSP'23, sections 3.1 and 4; the mean is ours.

    Args:
        mean_held: Mean cached tokens of a running request, over time.
        block_size: Tokens per block b.
    """
    _positive(mean_held=mean_held)
    empty = (_count("block_size", block_size) - 1) / 2
    return float(empty / (mean_held + empty))


def fragmentation(valid: float, capacity: float) -> float | None:
    """Return the empty share of held memory, 1 − valid/capacity; None if none is held.

    Source: vLLM (PagedAttention), SOSP'23, section 3.1 (reserved and internal waste together).

    Args:
        valid: Tokens whose keys and values are needed.
        capacity: Tokens for which memory is held.
    """
    _non_negative(valid=valid, capacity=capacity)
    if valid > capacity:
        raise ValueError(f"valid is {valid!r}, above capacity {capacity!r}")
    return float(1 - valid / capacity) if capacity else None


def time_mean_held_tokens(prompts: Lengths, outputs: Lengths) -> float:
    """Return the cached tokens of a running request, averaged over time: E[XP]/E[X] + E[X²]/(2E[X]).

    A request holds P + x after x of its X equal steps: PX + X²/2 in sum. A time average sees it X times, so
    the sum over requests is divided by ΣX. Counted at the end of each step, the first of which computes the
    prompt, it is 1/2 token less: P + x − 1 after x steps. Source: own derivation (length-biased sampling).

    Args:
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
    """
    prompt, output = _lengths("prompts", prompts), _lengths("outputs", outputs)
    if len(prompt) != len(output):
        raise ValueError(f"prompts has {len(prompt)} values, but outputs has {len(output)}")
    return float((output @ prompt + output @ output / 2) / output.sum())


def _harmonic(number: int) -> float:
    return float(np.sum(1 / np.arange(1, number + 1)))


def _batches(lengths: Lengths, num_slots: int) -> list[list[int]]:
    slots, whole = _count("num_slots", num_slots), _whole_lengths(lengths)
    return [whole[first : first + slots] for first in range(0, len(whole), slots)]


def _whole_lengths(lengths: Lengths) -> list[int]:
    values = _lengths("lengths", lengths)
    for value in values[values != np.floor(values)]:
        raise ValueError(f"lengths holds {float(value)!r}; a number of steps is whole")
    return [int(value) for value in values]


def _lengths(name: str, values: Lengths) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; give a list of at least one length")
    for value in array[~(np.isfinite(array) & (array > 0))]:
        raise ValueError(f"{name} holds {float(value)!r}; lengths are finite and above 0")
    return array


def _check_step_cost(t0: float, t1: float) -> None:
    _non_negative(t0=t0, t1=t1)
    if not t0 + t1:
        raise ValueError(f"t0 and t1 are both {t0!r}; a step takes time")


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return number


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite and above 0")


def _non_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite, 0 or more")
