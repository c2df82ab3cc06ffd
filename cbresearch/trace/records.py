"""The records of a run, a row a step and one a request."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cbresearch.plan import SKIP_REASONS, Plan
from cbresearch.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        start: Seconds since the start of the run at which it began.
        duration: Seconds that it took.
        plan: What it computed.
        finished: Ids of the requests that it finished.
        num_running: Unfinished requests with a seat during the step.
        num_waiting: Requests without one, swapped ones included.
        num_held_blocks: KV blocks held during the step.
        num_held_tokens: Tokens of unfinished requests whose KV lies in them at the end of the step, shared
            ones counted once.
        num_cached_blocks: KV blocks that hold a cached prefix which nobody refers to.
        num_external_blocks: KV blocks that nobody held and yet nobody could get: lost to an allocator's
            rounding, or free while memory refused or preempted a request.
        num_shared_blocks: References to held blocks beyond the first of each.
        num_swapped: Requests whose KV lies in the host's pool.
        num_held_host_blocks: Blocks that they hold there.
        device_duration: Seconds of `duration` in which the device computed, the rest being the host's time;
            None where nobody measured it.
    """

    start: float
    duration: float
    plan: Plan
    finished: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int = 0
    num_external_blocks: int = 0
    num_shared_blocks: int = 0
    num_swapped: int = 0
    num_held_host_blocks: int = 0
    device_duration: float | None = None

    @property
    def end(self) -> float:
        """Return the seconds since the start of the run at which the step ended."""
        return self.start + self.duration

    @property
    def num_staying(self) -> int:
        """Return how many unfinished requests keep their seats behind the step."""
        return self.num_running - len(self.finished)

    def num_skipped(self) -> Counter[str]:
        """Return how many requests the step did not serve, by reason, those who lost their seat aside."""
        plan = self.plan
        served = {entry.request_id for entry in plan.scheduled}
        lost = set(plan.preempted) - served
        reasons = Counter(reason for name, reason in plan.skipped if name not in lost)
        # Not listed one by one are those who waited behind the point at which the step was closed.
        unserved = self.num_running + self.num_waiting - len(served) - len(lost)
        reasons[plan.closed or "policy"] += unserved - reasons.total()
        return reasons

    def row(self) -> dict[str, int | float | None]:
        """Return the step as one flat row; units are in the names."""
        plan, skipped = self.plan, self.num_skipped()
        return {
            "step": plan.step,
            "start_s": self.start,
            "duration_s": self.duration,
            "device_duration_s": self.device_duration,
            "num_scheduled": len(plan.scheduled),
            "num_tokens": plan.num_tokens,
            "num_prefill_tokens": plan.num_prefill_tokens,
            "num_decode_tokens": plan.num_decode_tokens,
            "num_padding_rows": len(plan.padding),
            "num_context_tokens": plan.num_context_tokens,
            "num_sampled_tokens": sum(entry.samples for entry in plan.scheduled),
            "num_admitted": len(plan.admitted),
            "num_preempted": len(plan.preempted),
            **{f"num_skipped_for_{reason}": skipped[reason] for reason in SKIP_REASONS},
            "num_finished": len(self.finished),
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "num_held_blocks": self.num_held_blocks,
            "num_held_tokens": self.num_held_tokens,
            "num_cached_blocks": self.num_cached_blocks,
            "num_external_blocks": self.num_external_blocks,
            "num_shared_blocks": self.num_shared_blocks,
            "num_swapped": self.num_swapped,
            "num_held_host_blocks": self.num_held_host_blocks,
            "num_copied_blocks": plan.num_transfers("copy"),
            "num_swapped_out_blocks": plan.num_transfers("swap_out"),
            "num_swapped_in_blocks": plan.num_transfers("swap_in"),
        }


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request.

    Attributes:
        id: Its id.
        arrival: Seconds since the start of the run at which it arrived.
        num_prompt_tokens: Prompt length in tokens; None for a refused request of unknown length.
        max_tokens: Largest number of output tokens; None for a refused request that named none.
        client: Who asked.
        first_scheduled: Seconds at which it first got a seat, or None.
        tokens: Output token ids.
        token_times: Seconds at which each output token came out.
        finish_reason: "stop", "length", "abort", "error", or None if it was refused or unfinished.
        num_preemptions: How often it lost its seat.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache instead of being computed.
        num_recomputed_tokens: Tokens computed again because preemptions threw their KV away.
        error: Why it was refused or what it failed of, or None.
        logprobs: Those of each output token, if they were asked for; equality ignores them.
    """

    id: str
    arrival: float
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None
    client: str = ""
    first_scheduled: float | None = None
    tokens: tuple[int, ...] = ()
    token_times: tuple[float, ...] = ()
    finish_reason: str | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), compare=False)

    @property
    def is_refused(self) -> bool:
        """Return whether the request was turned away before it was ever queued."""
        return self.error is not None and self.finish_reason is None

    @property
    def is_complete(self) -> bool:
        """Return whether the output came to its own end."""
        return self.finish_reason in ("stop", "length")

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
        return None if self.finish is None else self.finish - self.arrival

    @property
    def tpot(self) -> float | None:
        """Return the mean time per output token after the first in seconds; None for fewer than 2."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Return the gaps between consecutive output tokens in seconds."""
        times = self.token_times
        return tuple(later - earlier for earlier, later in pairwise(times))

    def row(self) -> dict[str, Any]:
        """Return the request as one flat row; units are in the names."""
        return {
            "id": self.id,
            "client": self.client,
            "arrival_s": self.arrival,
            "first_scheduled_s": self.first_scheduled,
            "first_token_s": self.first_token,
            "finish_s": self.finish,
            "ttft_s": self.ttft,
            "tpot_s": self.tpot,
            "latency_s": self.latency,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": len(self.tokens),
            "max_tokens": self.max_tokens,
            "num_preemptions": self.num_preemptions,
            "num_cached_tokens": self.num_cached_tokens,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }
