"""The figures of a run: latencies, rates, rows, memory and tokens; see the package for what they share."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbresearch.trace import MemoryUse, RequestRecord, Trace, column


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in numbers, in the unit of its values; all but `n` are None for an empty one.

    Attributes:
        n: Number of values.
        mean: Their arithmetic mean.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        min: Smallest value.
        max: Largest value.
    """

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None


class TokenCounts(NamedTuple):
    """Tokens of the served requests, each kind counted apart.

    When all are finished, computed = prompt + output − finished requests + recomputed − cached, for the last
    token of an output is never fed back.

    Attributes:
        prompt: Tokens of the prompts.
        output: Tokens generated.
        prefill: Known tokens computed: prompts and, after a preemption, outputs again.
        decode: Newest tokens computed, one a request and step.
        recomputed: Tokens computed again because a preemption threw their KV away.
        cached: Prompt tokens whose KV was found in the prefix cache instead of being computed.
        padding: Rows of finished requests computed for nothing.
    """

    prompt: int
    output: int
    prefill: int
    decode: int
    recomputed: int
    cached: int
    padding: int

    @property
    def computed(self) -> int:
        """Return the useful tokens that the steps computed, prefill and decode."""
        return self.prefill + self.decode


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the q-th percentile with linear interpolation (`numpy.percentile`); None of no values.

    Args:
        values: The sample.
        q: Percent, 0 to 100.

    Raises:
        ValueError: q is outside 0 to 100, or a value is not finite.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q!r}; a percentile is asked for in percent, 0 to 100")
    sample = sample_of(values)
    return float(np.percentile(sample, q)) if sample.size else None


def summarize(values: Iterable[float]) -> Summary:
    """Return a sample's size, mean, percentiles and extremes.

    Args:
        values: The sample.

    Raises:
        ValueError: A value is not finite.
    """
    sample = sample_of(values)
    if not sample.size:
        return Summary(0)
    p50, p90, p99 = (float(value) for value in np.percentile(sample, (50, 90, 99)))
    return Summary(sample.size, float(sample.mean()), p50, p90, p99, float(sample.min()), float(sample.max()))


def ttft(trace: Trace) -> Summary:
    """Summarize time to first token in seconds: from arrival, queueing included, once a request."""
    return summarize(record.ttft for record in trace.served if record.ttft is not None)


def tpot(trace: Trace) -> Summary:
    """Summarize time per output token after the first in seconds: (last − first)/(n − 1), once a request.

    Where an output has n < 2 tokens it is undefined and left out.
    """
    return summarize(record.tpot for record in trace.served if record.tpot is not None)


def itl(trace: Trace) -> Summary:
    """Summarize inter-token latency in seconds: every gap of every request, pooled.

    Long outputs weigh more than in `tpot`, and a stall shows instead of being averaged away.
    """
    return summarize(gap for record in trace.served for gap in record.itl)


def latency(trace: Trace) -> Summary:
    """Summarize end-to-end latency in seconds: arrival to last token of the finished requests."""
    return summarize(record.latency for record in trace.served if record.latency is not None)


def queue_time(trace: Trace) -> Summary:
    """Summarize the wait for a first seat in seconds, from arrival."""
    return summarize(
        record.first_scheduled - record.arrival
        for record in trace.served
        if record.first_scheduled is not None
    )


def makespan(trace: Trace) -> float | None:
    """Return the seconds from the first arrival of a served request to the last output token.

    In a run that was not cut short that token is the last finish. None if nothing was generated.
    """
    ends = [record.token_times[-1] for record in trace.served if record.token_times]
    return max(ends) - min(record.arrival for record in trace.served) if ends else None


def output_throughput(trace: Trace) -> float | None:
    """Return output tokens per second of `makespan`."""
    return _ratio(_num_output_tokens(trace), makespan(trace))


def total_throughput(trace: Trace) -> float | None:
    """Return prompt and output tokens per second of `makespan`; a prompt counts once its answer begins."""
    return _ratio(_num_answered_prompt_tokens(trace) + _num_output_tokens(trace), makespan(trace))


def request_throughput(trace: Trace) -> float | None:
    """Return finished requests per second of `makespan`."""
    return _ratio(len(_finished(trace)), makespan(trace))


def occupancy(trace: Trace) -> float | None:
    """Return the mean useful rows of a step: those of unfinished requests that it served."""
    return _ratio(sum(column(trace.steps, "num_scheduled")), len(trace.steps))


def time_weighted_occupancy(trace: Trace) -> float | None:
    """Return the mean useful rows over `makespan`, ∫n(t)dt/T; a time without any step counts as 0 rows."""
    rows = sum(map(mul, column(trace.steps, "num_scheduled"), column(trace.steps, "duration")))
    return _ratio(rows, makespan(trace))


def utilization(trace: Trace) -> float | None:
    """Return `occupancy` as a share of the seats."""
    return _ratio(occupancy(trace), trace.scheduler.max_num_seqs)


def time_weighted_utilization(trace: Trace) -> float | None:
    """Return `time_weighted_occupancy` as a share of the seats."""
    return _ratio(time_weighted_occupancy(trace), trace.scheduler.max_num_seqs)


def wasted_row_share(trace: Trace) -> float | None:
    """Return padding rows as a share of all rows computed."""
    padding = sum(column(trace.steps, "num_padding"))
    return _ratio(padding, padding + sum(column(trace.steps, "num_scheduled")))


def fragmentation(trace: Trace) -> float | None:
    """Return the step-weighted empty share of held KV memory, 1 − Σ valid tokens / Σ held slots.

    Valid are the tokens of unfinished requests, so what a static batch keeps of finished ones is waste.
    """
    return _fragmentation(trace, [1.0] * len(trace.steps))


def time_weighted_fragmentation(trace: Trace) -> float | None:
    """Return `fragmentation` with each step weighted by its duration."""
    return _fragmentation(trace, column(trace.steps, "duration"))


def peak_kv_tokens(trace: Trace) -> int | None:
    """Return the most tokens for which KV blocks were held in any step."""
    if not trace.steps:
        return None
    return int(max(column(trace.steps, "num_held_blocks"))) * trace.cache.block_size


def peak_kv_bytes(trace: Trace, bytes_per_token: int) -> int | None:
    """Return the most bytes of KV blocks held in any step.

    Args:
        trace: The run.
        bytes_per_token: KV bytes of one token, from `formulas.kv_bytes_per_token`.

    Raises:
        ValueError: `bytes_per_token` is below 1.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes_per_token is {bytes_per_token!r}; it must be at least 1")
    tokens = peak_kv_tokens(trace)
    return None if tokens is None else tokens * bytes_per_token


def mean_pool_use(trace: Trace) -> float | None:
    """Return the step-weighted mean share of the pool's blocks that were held."""
    held = sum(column(trace.steps, "num_held_blocks"))
    return _ratio(held, len(trace.steps) * trace.cache.num_blocks)


def memory_shares(trace: Trace) -> dict[str, float | None]:
    """Return the time-weighted mean share of the KV pool in each category of `trace.MemoryUse`.

    The first six add up to 1. "shared" and "host" are not slots of the pool: they are given in its size.
    """
    weights = column(trace.steps, "duration")
    whole = math.fsum(weights) * trace.cache.num_tokens
    uses = list(trace.memory())
    return {
        category: _ratio(
            math.fsum(weight * use[place] for weight, use in zip(weights, uses, strict=True)), whole
        )
        for place, category in enumerate(MemoryUse._fields)
    }


def num_preemptions(trace: Trace) -> int:
    """Return how often a request lost its seat before it was finished."""
    return sum(record.num_preemptions for record in trace.served)


def token_counts(trace: Trace) -> TokenCounts:
    """Count the served requests' tokens by kind."""
    return TokenCounts(
        prompt=sum(record.num_prompt_tokens or 0 for record in trace.served),
        output=_num_output_tokens(trace),
        prefill=int(sum(column(trace.steps, "num_prefill_tokens"))),
        decode=int(sum(column(trace.steps, "num_decode_tokens"))),
        recomputed=sum(record.num_recomputed_tokens for record in trace.served),
        cached=sum(record.num_cached_tokens for record in trace.served),
        padding=int(sum(column(trace.steps, "num_padding"))),
    )


def prefix_hit_rate(trace: Trace) -> float | None:
    """Return the share of prompt tokens whose KV was found in the prefix cache; None without prompts."""
    counts = token_counts(trace)
    return _ratio(counts.cached, counts.prompt)


def speed_up(baseline: Trace, other: Trace) -> float | None:
    """Return the output throughput of `other` over that of `baseline`.

    It tells of the batching only if both served the same requests and these kept them busy.
    """
    return _ratio(output_throughput(other), output_throughput(baseline))


def sample_of(values: Iterable[float]) -> npt.NDArray[np.float64]:
    """Return values as an array; a value that is not finite was not measured, and is refused."""
    sample = np.fromiter(values, dtype=np.float64)
    for value in sample[~np.isfinite(sample)]:
        raise ValueError(f"the sample holds {float(value)!r}; leave out what was not measured")
    return sample


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _fragmentation(trace: Trace, weights: Sequence[float]) -> float | None:
    valid = math.fsum(map(mul, column(trace.steps, "num_held_tokens"), weights))
    held = math.fsum(map(mul, column(trace.steps, "num_held_blocks"), weights))
    filled = _ratio(valid, held * trace.cache.block_size)
    return None if filled is None else 1 - filled


def _finished(trace: Trace) -> list[RequestRecord]:
    return [record for record in trace.served if record.is_complete]


def _num_output_tokens(trace: Trace) -> int:
    return sum(len(record.tokens) for record in trace.served)


def _num_answered_prompt_tokens(trace: Trace) -> int:
    return sum(record.num_prompt_tokens or 0 for record in trace.served if record.tokens)
