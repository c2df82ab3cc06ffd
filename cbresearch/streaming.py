"""Key figures of a run that is too long to be kept: added up as its records come about."""

from array import array
from bisect import bisect_left

from cbresearch.metrics import Summary, summarize
from cbresearch.step import DecodeRun
from cbresearch.trace import RequestRecord, StepRecord


class StreamingSummary:
    """The sink of `serve.stream` that measures what `metrics` measures from a whole trace.

    It keeps four numbers a request, 32 bytes, for the percentiles, and of the steps only sums. These are
    plain sums, so that they differ from those of `metrics` in their last digits.

    Args:
        max_num_seqs: Seats.
        num_blocks: Blocks in the KV pool.
        block_size: Tokens per block.
    """

    def __init__(self, max_num_seqs: int, num_blocks: int, block_size: int = 16) -> None:
        self.max_num_seqs, self.num_blocks, self.block_size = max_num_seqs, num_blocks, block_size
        self.num_steps = self.num_rows = self.num_padding_rows = self.num_block_steps = 0
        self.peak_num_blocks = 0
        self.row_seconds = 0.0
        self.num_requests = self.num_refused = self.num_finished = self.num_preemptions = 0
        self.num_prompt_tokens = self.num_answered_prompt_tokens = self.num_output_tokens = 0
        self._first_arrival: float | None = None
        self._last_token: float | None = None
        self._ttft, self._tpot = array("d"), array("d")
        self._latency, self._queue_time = array("d"), array("d")

    def step(self, part: StepRecord | DecodeRun) -> None:
        """Add a step, or several that were taken at once."""
        if isinstance(part, StepRecord):
            num_rows = len(part.plan.scheduled)
            self.num_steps += 1
            self.num_rows += num_rows
            self.num_padding_rows += len(part.plan.padding)
            self.row_seconds += num_rows * part.duration
            self.num_block_steps += part.num_held_blocks
            self.peak_num_blocks = max(self.peak_num_blocks, part.num_held_blocks)
            return
        total, taken = len(part), part.taken_in
        self.num_steps += total
        self.num_padding_rows += len(part.padding) * total
        for level, begin, end in part.bounds():
            self.num_rows += level.num_rows * (end - begin)
            self.row_seconds += level.num_rows * sum(part.durations[begin:end])
            since = taken[bisect_left(taken, begin) : bisect_left(taken, end)]
            # Each block is held from the step on before which it is taken.
            self.num_block_steps += level.pool.num_held_blocks * (end - begin) + end * len(since) - sum(since)
            self.peak_num_blocks = max(self.peak_num_blocks, level.pool.num_held_blocks + len(since))

    def request(self, record: RequestRecord) -> None:
        """Add a request that is finished or refused."""
        self.num_requests += 1
        if record.is_refused:
            self.num_refused += 1
            return
        times, arrival = record.token_times, record.arrival
        self.num_preemptions += record.num_preemptions
        self.num_prompt_tokens += record.num_prompt_tokens or 0
        self.num_output_tokens += len(times)
        if self._first_arrival is None or arrival < self._first_arrival:
            self._first_arrival = arrival
        if record.first_scheduled is not None:
            self._queue_time.append(record.first_scheduled - arrival)
        if not times:
            return
        self.num_answered_prompt_tokens += record.num_prompt_tokens or 0
        first, last = times[0], times[-1]
        if self._last_token is None or last > self._last_token:
            self._last_token = last
        self._ttft.append(first - arrival)
        if len(times) > 1:
            self._tpot.append((last - first) / (len(times) - 1))
        if record.is_complete:
            self.num_finished += 1
            self._latency.append(last - arrival)

    @property
    def makespan(self) -> float | None:
        """Return the seconds from the first arrival of a served request to the last output token."""
        if self._last_token is None or self._first_arrival is None:
            return None
        return self._last_token - self._first_arrival

    @property
    def ttft(self) -> Summary:
        """Summarize time to first token in seconds, as `metrics.ttft`."""
        return summarize(self._ttft)

    @property
    def tpot(self) -> Summary:
        """Summarize time per output token after the first in seconds, as `metrics.tpot`."""
        return summarize(self._tpot)

    @property
    def latency(self) -> Summary:
        """Summarize end-to-end latency in seconds, as `metrics.latency`."""
        return summarize(self._latency)

    @property
    def queue_time(self) -> Summary:
        """Summarize the wait for a first seat in seconds, as `metrics.queue_time`."""
        return summarize(self._queue_time)

    def summary(self) -> dict[str, float | int | None]:
        """Return the key figures under the names that `metrics.summary` gives them."""
        span, steps = self.makespan, self.num_steps
        occupancy = self.num_rows / steps if steps else None
        over_time = self.row_seconds / span if span else None
        rows = self.num_rows + self.num_padding_rows
        values: dict[str, float | int | None] = {
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "num_finished": self.num_finished,
            "num_steps": steps,
            "num_preemptions": self.num_preemptions,
            "makespan_s": span,
            "output_throughput_tokens_per_s": self.num_output_tokens / span if span else None,
            "total_throughput_tokens_per_s": (
                (self.num_answered_prompt_tokens + self.num_output_tokens) / span if span else None
            ),
            "request_throughput_requests_per_s": self.num_finished / span if span else None,
            "occupancy_rows": occupancy,
            "time_weighted_occupancy_rows": over_time,
            "utilization": None if occupancy is None else occupancy / self.max_num_seqs,
            "time_weighted_utilization": None if over_time is None else over_time / self.max_num_seqs,
            "wasted_row_share": self.num_padding_rows / rows if rows else None,
            "peak_kv_tokens": self.peak_num_blocks * self.block_size if steps else None,
            "mean_pool_use": self.num_block_steps / (steps * self.num_blocks) if steps else None,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
        }
        for name in ("ttft", "tpot", "latency", "queue_time"):
            measured: Summary = getattr(self, name)
            values[f"{name}_n"] = measured.n
            for statistic in ("mean", "p50", "p90", "p99", "min", "max"):
                values[f"{name}_{statistic}_s"] = getattr(measured, statistic)
        return values
