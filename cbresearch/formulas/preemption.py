"""What a preemption costs by recompute and by swap, and when memory runs out so often that work is lost.

Letters: n tokens whose KV a victim has, b tokens per block, κ KV bytes of a token, W bytes per second of the
link, P a request's prompt, X its output. A step of n tokens takes t0 + τ·n seconds, or max(t0, τ·n) where
reading the weights and computing overlap, and γ more for each (query, key) pair.
"""

import math

import numpy as np

from cbresearch.formulas.checks import Lengths, count, non_negative, paired_lengths, positive

__all__ = [
    "overshoot_tokens", "recompute_seconds", "spread_held_tokens", "swap_crossover_block_size",
    "swap_crossover_tokens", "swap_seconds",
]  # fmt: skip


def swap_seconds(
    num_tokens: int, block_size: int, bytes_per_token: float, bandwidth: float, copy_seconds: float = 0.0
) -> float:
    """Return the seconds that moving a victim's KV out and back takes, 2·⌈n/b⌉·(b·κ/W + o).

    Whole blocks move, the last one's empty slots included, and each costs o on top of its bytes.
    Source: vLLM (PagedAttention), SOSP'23, sections 4.5 and 7.3; the form is our own.

    Args:
        num_tokens: Tokens n of the victim.
        block_size: Tokens per block b.
        bytes_per_token: KV bytes of a token κ.
        bandwidth: Bytes per second W of the link, in each direction.
        copy_seconds: Seconds o that a block takes however small it is, for all of its copies together.
    """
    size = count("block_size", block_size)
    positive(bytes_per_token=bytes_per_token, bandwidth=bandwidth)
    non_negative(copy_seconds=copy_seconds)
    num_blocks = -(-count("num_tokens", num_tokens) // size)
    return 2 * num_blocks * (size * bytes_per_token / bandwidth + copy_seconds)


def recompute_seconds(
    num_tokens: int,
    token_seconds: float,
    *,
    pair_seconds: float = 0.0,
    step_seconds: float = 0.0,
    token_budget: int | None = None,
    num_others: int = 0,
    overlaps: bool = False,
) -> float:
    """Return the seconds that computing a victim's KV again adds to a run.

    The n tokens are computed along with the newest one, which would have been computed anyway, in chunks of
    what the others' decodes leave of the token budget. With T(m) = t0 + τ·m, or max(t0, τ·m) where reading
    overlaps computing, and T(0) = 0 since a step of no request is no step, it is
    Σ_k (T(c_k + others) − T(others)) − (T(1 + others) − T(others)) + γ·n(n + 1)/2.
    Source: own derivation; attention as in `flops_per_token`, summed over the positions.

    Args:
        num_tokens: Tokens n of the victim.
        token_seconds: Seconds τ per token computed.
        pair_seconds: Seconds γ per token that a token attends to.
        step_seconds: Seconds t0 of a step whatever is in it.
        token_budget: Tokens of a step, or None for no limit.
        num_others: Requests that decode meanwhile.
        overlaps: Whether a step takes the longer of t0 and τ·m instead of their sum.
    """
    non_negative(token_seconds=token_seconds, pair_seconds=pair_seconds, step_seconds=step_seconds)
    left = count("num_tokens", num_tokens) + 1
    others = count("num_others", num_others) if num_others else 0
    room = left if token_budget is None else count("token_budget", token_budget) - others
    if room < 1:
        raise ValueError(f"token_budget is {token_budget!r}; {others} others leave nothing of it")

    def added(num_new: int) -> float:
        computing = [token_seconds * (num_new + others), token_seconds * others]
        whole = [max(step_seconds, part) if overlaps else step_seconds + part for part in computing]
        return whole[0] - (whole[1] if others else 0.0)

    seconds = left // room * added(room) + (added(left % room) if left % room else 0.0)
    return seconds - added(1) + pair_seconds * num_tokens * (num_tokens + 1) / 2


def swap_crossover_tokens(
    token_seconds: float,
    swap_token_seconds: float,
    *,
    pair_seconds: float = 0.0,
    step_seconds: float = 0.0,
    overlaps: bool = False,
) -> float:
    """Return the context n beyond which swapping a lone request is cheaper than computing it again.

    With s seconds per token for moving it out and back, in one chunk and without rounding to blocks, they
    cost the same where γ/2·n² + (τ + γ/2 − s)·n = r. Here r = t0 − τ if reading the weights overlaps
    computing, for then the step has room for that much work at no cost, else 0. While it has, only γ counts,
    and γ·(n + 1)/2 may exceed s already. It is 0 where swap is always cheaper, infinite where it never is.
    Source: own derivation.

    Args:
        token_seconds: Seconds τ per token computed.
        swap_token_seconds: Seconds s per token moved, both ways together.
        pair_seconds: Seconds γ per token that a token attends to.
        step_seconds: Seconds t0 of a step whatever is in it.
        overlaps: Whether a step takes the longer of t0 and τ·m instead of their sum.
    """
    positive(token_seconds=token_seconds, swap_token_seconds=swap_token_seconds)
    non_negative(pair_seconds=pair_seconds, step_seconds=step_seconds)
    free = max(0.0, step_seconds - token_seconds) if overlaps else 0.0
    slope = token_seconds + pair_seconds / 2 - swap_token_seconds
    if not pair_seconds:
        return free / slope if slope > 0 else math.inf
    by_pairs = 2 * swap_token_seconds / pair_seconds - 1
    if by_pairs * token_seconds <= free and free:
        return max(0.0, by_pairs)
    return max(0.0, (math.sqrt(slope**2 + 2 * pair_seconds * free) - slope) / pair_seconds)


def swap_crossover_block_size(
    recompute_token_seconds: float, bytes_per_token: float, bandwidth: float, copy_seconds: float
) -> float:
    """Return the block size beyond which swap is cheaper in a long context, 2·o/(r − 2·κ/W).

    Of the r seconds that a token takes to compute again, 2·κ/W would move its bytes; what is left pays for
    2·o/b, its part of what a block costs however small. Infinite where the bytes alone take longer than r.
    Source: vLLM (PagedAttention), SOSP'23, section 7.3, found it between 16 and 64; the form is our own.

    Args:
        recompute_token_seconds: Seconds r per token computed again, attention included.
        bytes_per_token: KV bytes of a token κ.
        bandwidth: Bytes per second W of the link, in each direction.
        copy_seconds: Seconds o that a block takes however small it is, for all of its copies together.
    """
    positive(
        recompute_token_seconds=recompute_token_seconds, bytes_per_token=bytes_per_token, bandwidth=bandwidth
    )
    non_negative(copy_seconds=copy_seconds)
    left = recompute_token_seconds - 2 * bytes_per_token / bandwidth
    return 2 * copy_seconds / left if left > 0 else math.inf


def spread_held_tokens(prompts: Lengths, outputs: Lengths) -> float:
    """Return the standard deviation, over time, of the tokens that one running request holds.

    Its second moment is E[((P + X)³ − P³)/3]/E[X]; the mean is `time_mean_held_tokens`. That of B requests
    which run independently of one another is √B times this. Source: own derivation (length-biased sampling).

    Args:
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
    """
    prompt, output = paired_lengths(prompts=prompts, outputs=outputs)
    mean = (output @ prompt + output @ output / 2) / output.sum()
    second = ((prompt + output) ** 3 - prompt**3).sum() / 3 / output.sum()
    return float(math.sqrt(max(0.0, second - mean**2)))


def overshoot_tokens(prompts: Lengths, outputs: Lengths) -> float:
    """Return the spare tokens that make running out of memory e times rarer, 1/θ.

    After the last admission n requests grow by a token each per step, until one ends, at a rate of n/E[X],
    and gives back P + X. How far they grow beyond where admission stopped is exponential with the rate θ > 0
    that solves 1 − E[exp(−θ·(P + X))] = θ·E[X], whatever n is.
    Source: the supremum of a process without upward jumps (Asmussen and Albrecher, Ruin Probabilities, 2010);
    that requests end at random with that rate is an approximation.

    Args:
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
    """
    prompt, output = paired_lengths(prompts=prompts, outputs=outputs)
    mean = output.mean()
    # 1 − E[exp(−θ·D)] is concave in θ and begins with the slope E[D] > E[X], so there is just one root.
    low, high = 0.0, 1 / mean
    for _ in range(200):
        rate = (low + high) / 2
        is_below = -np.expm1(-rate * (prompt + output)).mean() > rate * mean
        low, high = (rate, high) if is_below else (low, rate)
    return float(1 / low)
