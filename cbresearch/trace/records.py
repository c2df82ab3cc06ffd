"""The records of a run, one for each step and one for each request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from cbresearch.request import TokenLogprobs
from cbresearch.step import NO_EVENTS, SKIP_REASONS, BlockEvents, Plan, PoolState
from cbresearch.version import __version__

__all__ = ["Origin", "RequestRecord", "StepRecord"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What recorded a trace.

    Attributes:
        engine: Name of the engine.
        version: Its version.
        model: The model that it served, or None for a simulation.
        epoch: Seconds since 1970 at which the run began, if its requests told the time of day; else 0.
    """

    engine: str = "cbresearch"
    version: str = field(default_factory=lambda: __version__)
    model: str | None = None
    epoch: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step; the counters of `pool` can be read from it, too, as `num_running` and so on.

    Attributes:
        start: Seconds since the start of the run at which the step began.
        duration: Seconds that it took.
        plan: What it computed.
        finished: Ids of the requests that it finished.
        pool: Queues and blocks while it ran.
        events: What became of blocks since the record of the step before.
        device_duration: Seconds of `duration` in which the device computed, the rest being the host's time;
            None where that was not measured.
    """

    start: float
    duration: float
    plan: Plan
    finished: tuple[str, ...]
    pool: PoolState
    events: BlockEvents = NO_EVENTS
    device_duration: float | None = None

    def __getattr__(self, name: str) -> int:
        if name not in PoolState._fields:
            raise AttributeError(f"a StepRecord has no {name!r}")
        value: int = getattr(self.pool, name)
        return value

    @property
    def end(self) -> float:
        """Return the seconds since the start of the run at which the step ended."""
        return self.start + self.duration

    @property
    def num_staying(self) -> int:
        """Return how many unfinished requests keep their seats behind the step."""
        return self.num_running - len(self.finished)

    def num_skipped(self) -> Counter[str]:
        """Return how many requests the step did not serve, by reason, those that lost their seat aside."""
        return Counter(dict(zip(SKIP_REASONS, self.skip_counts(), strict=True)))

    def skip_counts(self) -> list[int]:
        """Return the values of `num_skipped`, in the order of `SKIP_REASONS`."""
        plan = self.plan
        lost = set(plan.preempted)
        lost -= {request_id for request_id, *_ in plan.rows} if lost else set()
        listed = [reason for request_id, reason in tuple.__iter__(plan.skipped) if request_id not in lost]
        unserved = self.pool.num_running + self.pool.num_waiting - len(plan.scheduled) - len(lost)
        return count_skipped(listed, plan.closed, unserved)


def count_skipped(listed: Sequence[str], closed: str | None, num_unserved: int) -> list[int]:
    """Return how many requests a step did not serve, in the order of `SKIP_REASONS`.

    Args:
        listed: Reasons of the requests that the plan lists.
        closed: Why no other waiting request could join; those are not listed one by one.
        num_unserved: Requests that were not served, listed or not.
    """
    counts = [listed.count(reason) for reason in SKIP_REASONS] if listed else [0] * len(SKIP_REASONS)
    # A request that was aborted while the step ran is in the plan and in no queue.
    counts[SKIP_REASONS.index(closed or "policy")] += max(0, num_unserved - len(listed))
    return counts


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request.

    Attributes:
        id: Its id.
        arrival: Seconds since the start of the run at which it arrived.
        num_prompt_tokens: Prompt length in tokens; None for a rejected request of unknown length.
        max_tokens: Largest number of output tokens; None for a rejected request that named none.
        client: The client that sent it.
        queued: Seconds at which the scheduler got to know it, at `arrival` or later; None if it never did or
            that was not recorded.
        first_scheduled: Seconds at which it first got a seat, or None.
        tokens: Output token ids.
        token_times: Seconds at which each output token came out.
        finish_reason: "stop", "length", "abort", "error", or None if it was rejected or unfinished.
        num_preemptions: How often it lost its seat.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache instead of being computed.
        num_recomputed_tokens: Tokens computed again because preemptions threw their KV away.
        error: Why it was rejected or what it failed of, or None.
        logprobs: Those of each output token, if they were asked for; equality ignores them.
    """

    id: str
    arrival: float
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None
    client: str = ""
    queued: float | None = None
    first_scheduled: float | None = None
    tokens: tuple[int, ...] = ()
    token_times: tuple[float, ...] = ()
    finish_reason: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), compare=False)

    # What reads a file lets a logarithm of 0 pass.
    __pydantic_config__: ClassVar = {"allow_inf_nan": True}

    @property
    def is_rejected(self) -> bool:
        """Return whether the request was turned away before it was ever queued."""
        return self.error is not None and self.finish_reason is None

    @property
    def is_complete(self) -> bool:
        """Return whether the output came to its own end."""
        return self.finish_reason in ("stop", "length")

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far."""
        return len(self.tokens)

    @property
    def first_token(self) -> float | None:
        """Return the seconds at which the first token came out, or None."""
        return self.token_times[0] if self.token_times else None

    @property
    def finish(self) -> float | None:
        """Return the seconds at which the last token came out, or None if the output is not complete."""
        return self.token_times[-1] if self.is_complete else None

    @property
    def ttft(self) -> float | None:
        """Return the time to first token in seconds, from arrival, queueing included."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def latency(self) -> float | None:
        """Return the end-to-end latency in seconds, from arrival to last token."""
        return self.token_times[-1] - self.arrival if self.is_complete else None

    @property
    def tpot(self) -> float | None:
        """Return the mean time per output token after the first in seconds; None for fewer than 2."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl(self) -> tuple[float, ...]:
        """Return the gaps between consecutive output tokens in seconds."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times))
