"""The figures of a run: latencies, rates, rows, memory and tokens; see the package for what they share."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cbresearch.trace import Trace

__all__ = [
    "Summary", "TokenCounts", "fragmentation", "itl", "latency", "makespan", "mean_pool_use",
    "num_preemptions", "occupancy", "output_throughput", "peak_kv_bytes", "peak_kv_tokens", "percentile",
    "prefix_hit_rate", "queue_time", "request_throughput", "speed_up", "summarize",
    "time_weighted_fragmentation", "time_weighted_occupancy", "time_weighted_utilization", "token_counts",
    "total_throughput", "tpot", "ttft", "utilization", "wasted_row_share",
]  # fmt: skip


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
    token of an output is never fed back. In a window, prompt, recomputed and cached are those of the requests
    that ended in it, and the others are those of its steps, whichever request they were for.

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
    return summarize(defined(trace.request_columns["ttft_s"]))


def tpot(trace: Trace) -> Summary:
    """Summarize time per output token after the first in seconds: (last − first)/(n − 1), once a request.

    Where an output has n < 2 tokens it is undefined and left out.
    """
    return summarize(defined(trace.request_columns["tpot_s"]))


def itl(trace: Trace) -> Summary:
    """Summarize inter-token latency in seconds: every gap of every request, pooled.

    Long outputs weigh more than in `tpot`, and a stall shows instead of being averaged away.
    """
    times, offsets = trace.token_times
    gaps = np.diff(times)
    is_within = np.ones(len(times) + 1, dtype=bool)
    is_within[offsets] = False
    return summarize(gaps[is_within[1 : len(gaps) + 1]])


def latency(trace: Trace) -> Summary:
    """Summarize end-to-end latency in seconds: arrival to last token of the finished requests."""
    return summarize(defined(trace.request_columns["latency_s"]))


def queue_time(trace: Trace) -> Summary:
    """Summarize the wait for a first seat in seconds, from arrival."""
    requests = trace.request_columns
    return summarize(defined(requests["first_scheduled_s"] - requests["arrival_s"]))


def makespan(trace: Trace) -> float | None:
    """Return the seconds from the first arrival of a served request to the last output token.

    In a run that was not cut short that token is the last finish. None if nothing was generated. Of a window
    of a run it is the length.
    """
    if trace.whole is not None:
        return trace.duration
    times, _ = trace.token_times
    return float(times.max() - of_served(trace, "arrival_s").min()) if times.size else None


def output_throughput(trace: Trace) -> float | None:
    """Return output tokens per second of `makespan`: all that came out, whether or not a request ended."""
    return fraction(num_output_tokens(trace), makespan(trace))


def total_throughput(trace: Trace) -> float | None:
    """Return prompt and output tokens per second of `makespan`; a prompt counts once its answer begins."""
    begun = (trace.whole or trace).request_columns
    prompts = sum(filter(None, begun["num_prompt_tokens"][trace.holds(begun["first_token_s"])].tolist()))
    return fraction(num_output_tokens(trace) + prompts, makespan(trace))


def request_throughput(trace: Trace) -> float | None:
    """Return finished requests per second of `makespan`."""
    return fraction(defined(trace.request_columns["finish_s"]).size, makespan(trace))


def occupancy(trace: Trace) -> float | None:
    """Return the mean useful rows of a step: those of unfinished requests that it served."""
    shares = step_shares(trace)
    return fraction(float(trace.step_columns["num_scheduled"] @ shares), float(shares.sum()))


def time_weighted_occupancy(trace: Trace) -> float | None:
    """Return the mean useful rows over `makespan`, ∫n(t)dt/T; a time without any step counts as 0 rows."""
    steps = trace.step_columns
    return fraction(float(steps["num_scheduled"] @ steps["duration_s"]), makespan(trace))


def utilization(trace: Trace) -> float | None:
    """Return `occupancy` as a share of the seats."""
    return fraction(occupancy(trace), trace.scheduler.max_num_seqs)


def time_weighted_utilization(trace: Trace) -> float | None:
    """Return `time_weighted_occupancy` as a share of the seats."""
    return fraction(time_weighted_occupancy(trace), trace.scheduler.max_num_seqs)


def wasted_row_share(trace: Trace) -> float | None:
    """Return padding rows as a share of all rows computed."""
    steps, shares = trace.step_columns, step_shares(trace)
    padding = float(steps["num_padding_rows"] @ shares)
    return fraction(padding, padding + float(steps["num_scheduled"] @ shares))


def fragmentation(trace: Trace) -> float | None:
    """Return the step-weighted empty share of held KV memory, 1 − Σ valid tokens / Σ held slots.

    Valid are the tokens of unfinished requests, so what a static batch keeps of finished ones is waste.
    """
    return _fragmentation(trace, step_shares(trace))


def time_weighted_fragmentation(trace: Trace) -> float | None:
    """Return `fragmentation` with each step weighted by its duration."""
    return _fragmentation(trace, trace.step_columns["duration_s"])


def peak_kv_tokens(trace: Trace) -> int | None:
    """Return the most tokens for which KV blocks were held in any step."""
    held = trace.step_columns["num_held_blocks"][step_shares(trace) > 0]
    return int(held.max()) * trace.cache.block_size if held.size else None


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
    held, shares = trace.step_columns["num_held_blocks"], step_shares(trace)
    return fraction(float(held @ shares), float(shares.sum()) * trace.cache.num_blocks)


def num_preemptions(trace: Trace) -> int:
    """Return how often a request lost its seat before it was finished."""
    if trace.whole is not None:
        return total_of_steps(trace, "num_preempted")
    return _total(trace, "num_preemptions")


def token_counts(trace: Trace) -> TokenCounts:
    """Count the served requests' tokens by kind."""
    return TokenCounts(
        prompt=_total(trace, "num_prompt_tokens"),
        output=num_output_tokens(trace),
        prefill=total_of_steps(trace, "num_prefill_tokens"),
        decode=total_of_steps(trace, "num_decode_tokens"),
        recomputed=_total(trace, "num_recomputed_tokens"),
        cached=_total(trace, "num_cached_tokens"),
        padding=total_of_steps(trace, "num_padding_rows"),
    )


def prefix_hit_rate(trace: Trace) -> float | None:
    """Return the share of prompt tokens whose KV was found in the prefix cache; None without prompts."""
    counts = token_counts(trace)
    return fraction(counts.cached, counts.prompt)


def speed_up(baseline: Trace, other: Trace) -> float | None:
    """Return the output throughput of `other` over that of `baseline`.

    It tells of the batching only if both served the same requests and these kept them busy.
    """
    return fraction(output_throughput(other), output_throughput(baseline))


def sample_of(values: Iterable[float]) -> npt.NDArray[np.float64]:
    """Return values as an array; a value that is not finite was not measured, and is rejected."""
    sample = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    for value in sample[~np.isfinite(sample)]:
        raise ValueError(f"the sample holds {float(value)!r}; leave out what was not measured")
    return sample


def defined(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values of a column that are not undefined."""
    return values[~np.isnan(values)]


def of_served(trace: Trace, name: str) -> npt.NDArray[Any]:
    """Return a column of the requests that were not rejected."""
    requests = trace.request_columns
    is_rejected = (requests["error"] != None) & (requests["finish_reason"] == None)  # noqa: E711 - one by one
    values: npt.NDArray[Any] = requests[name][~is_rejected]
    return values


def step_shares(trace: Trace) -> npt.NDArray[np.float64]:
    """Return how much of each step lies in the window; of a run itself, all of it."""
    steps = trace.step_columns
    return steps["share"] if "share" in steps else np.ones(len(steps["step"]))


def total_of_steps(trace: Trace, name: str) -> int:
    """Sum a count over the steps that ended in the window."""
    return int(trace.step_columns[name][: trace.num_ended_steps].sum())


def num_output_tokens(trace: Trace) -> int:
    """Return the tokens that came out in the window, also those of requests that did not end in it."""
    if trace.whole is None:
        return _total(trace, "num_output_tokens")
    return int(trace.holds(trace.whole.token_times[0]).sum())


def fraction(part: float | None, whole: float | None) -> float | None:
    """Return a ratio, or None where a part of it is undefined, the whole is 0, or no float is as large."""
    return None if part is None or not whole or not math.isfinite(ratio := part / whole) else ratio


def _total(trace: Trace, name: str) -> int:
    return sum(filter(None, of_served(trace, name).tolist()))


def _fragmentation(trace: Trace, weights: npt.NDArray[Any]) -> float | None:
    steps = trace.step_columns
    valid, held = float(steps["num_held_tokens"] @ weights), float(steps["num_held_blocks"] @ weights)
    filled = fraction(valid, held * trace.cache.block_size)
    return None if filled is None else 1 - filled
