"""What happened in a run, a record a step and one a request: all that metrics, figures and reports read."""

import csv
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.plan import Plan

if TYPE_CHECKING:
    import pandas as pd


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

    @property
    def end(self) -> float:
        """Return the seconds since the start of the run at which the step ended."""
        return self.start + self.duration

    def row(self) -> dict[str, int | float]:
        """Return the step as one flat row; units are in the names."""
        plan = self.plan
        return {
            "step": plan.step,
            "start_s": self.start,
            "duration_s": self.duration,
            "num_scheduled": len(plan.scheduled),
            "num_tokens": plan.num_tokens,
            "num_prefill_tokens": plan.num_prefill_tokens,
            "num_decode_tokens": plan.num_decode_tokens,
            "num_padding_rows": len(plan.padding),
            "num_context_tokens": plan.num_context_tokens,
            "num_sampled_tokens": sum(entry.samples for entry in plan.scheduled),
            "num_admitted": len(plan.admitted),
            "num_preempted": len(plan.preempted),
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
        finish_reason: "stop", "length", "abort", or None if it was refused or unfinished.
        num_preemptions: How often it lost its seat.
        num_cached_tokens: Prompt tokens whose KV was found in the prefix cache instead of being computed.
        num_recomputed_tokens: Tokens computed again because preemptions threw their KV away.
        error: Why it was refused, or None.
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

    @property
    def first_token(self) -> float | None:
        """Return the seconds at which the first token came out, or None."""
        return self.token_times[0] if self.token_times else None

    @property
    def finish(self) -> float | None:
        """Return the seconds at which the last token came out, or None if it is unfinished."""
        return self.token_times[-1] if self.finish_reason and self.token_times else None

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


class MemoryUse(NamedTuple):
    """Where the KV pool's slots are during a step, in tokens (categories of vLLM, SOSP'23, section 2).

    The first six add up to the pool.

    Attributes:
        token_states: Slots that hold a token of an unfinished request, a shared one counted once.
        reserved: Held slots that a later token of their request will fill.
        internal: Held slots that no token will ever fill.
        external: Slots that nobody held and yet nobody could get (see `StepRecord.num_external_blocks`).
        cached: Slots of cached blocks that nobody refers to; they are given up as soon as room is needed.
        free: Slots that nobody held, while no request was short of memory.
        shared: Token states that sharing saved: references to shared blocks beyond the first.
        host: Slots held in the host's pool.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    cached: int
    free: int
    shared: int
    host: int


class Stay(NamedTuple):
    """A request's uninterrupted stay in a seat.

    Attributes:
        request_id: Who sat there.
        seat: Where.
        first_step: Index of the first step of the stay.
        last_step: Index of the last one.
        num_padding_steps: Steps at the end of the stay in which the row was computed for nothing.
    """

    request_id: str
    seat: int
    first_step: int
    last_step: int
    num_padding_steps: int


class _Span(NamedTuple):
    """A seated request's table: its length, its last block, and the tokens computed."""

    num_blocks: int
    last_block: int
    num_computed: int


_NO_SPAN = _Span(0, -1, 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One run.

    Attributes:
        policy: Name of the policy, options included.
        scheduler: The limits of a step.
        cache: The KV pool.
        steps: Step records in order.
        requests: Request records in the order in which the requests were given.
    """

    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]

    @property
    def duration(self) -> float:
        """Return the seconds from the start of the run to the end of its last step."""
        return self.steps[-1].end if self.steps else 0.0

    @property
    def served(self) -> tuple[RequestRecord, ...]:
        """Return the records of the requests that were not refused."""
        return tuple(request for request in self.requests if request.error is None)

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Return the output token ids by request id, of the requests that were not refused."""
        return {request.id: request.tokens for request in self.served}

    def stays(self) -> Iterator[Stay]:
        """Yield who was served where from which step to which: preempted stays first, in no other order."""
        open_stays: dict[str, Stay] = {}
        for record in self.steps:
            step = record.plan.step
            for entry in record.plan.admitted:
                request_id = entry.request.id
                open_stays[request_id] = Stay(request_id, entry.seat, step, step, 0)
            for request_id in record.plan.preempted:
                yield open_stays.pop(request_id)
            for scheduled in record.plan.scheduled:
                stay = open_stays[scheduled.request_id]
                open_stays[scheduled.request_id] = stay._replace(last_step=step)
            for row in record.plan.padding:
                stay = open_stays[row.request_id]
                open_stays[row.request_id] = stay._replace(
                    last_step=step, num_padding_steps=stay.num_padding_steps + 1
                )
        yield from open_stays.values()

    def memory(self) -> Iterator[MemoryUse]:
        """Yield where the pool's slots are, a record a step; known only now that the outputs' ends are."""
        size = self.cache.block_size
        # The last token is never fed back, so it never gets a slot.
        ends = {
            request.id: request.num_prompt_tokens + len(request.tokens) - 1
            for request in self.served
            if request.num_prompt_tokens is not None
        }
        spans: dict[str, _Span] = {}
        for record in self.steps:
            plan = record.plan
            for request_id in (*plan.preempted, *plan.aborted):
                spans.pop(request_id, None)
            for entry in plan.scheduled:
                known = spans.get(entry.request_id, _NO_SPAN)
                # Whoever was just seated names its whole table.
                num_blocks = known.num_blocks + len(entry.new_block_ids)
                last = entry.new_block_ids[-1] if entry.new_block_ids else known.last_block
                spans[entry.request_id] = _Span(num_blocks, last, entry.context_length)
            # Only a request's last blocks have empty slots, and samples of one prompt may share such a block.
            to_fill: dict[int, int] = {}
            for request_id, span in spans.items():
                later = min(span.num_blocks * size, ends[request_id]) - span.num_computed
                to_fill[span.last_block] = max(later, to_fill.get(span.last_block, 0))
            held = record.num_held_blocks * size
            reserved = min(sum(to_fill.values()), held - record.num_held_tokens)
            outside = record.num_external_blocks + record.num_cached_blocks
            yield MemoryUse(
                token_states=record.num_held_tokens,
                reserved=reserved,
                internal=held - record.num_held_tokens - reserved,
                external=record.num_external_blocks * size,
                cached=record.num_cached_blocks * size,
                free=(self.cache.num_blocks - outside) * size - held,
                shared=record.num_shared_blocks * size,
                host=record.num_held_host_blocks * size,
            )
            for request_id in record.finished:
                del spans[request_id]

    def steps_frame(self) -> "pd.DataFrame":
        """Return one row a step as a pandas frame."""
        import pandas as pd

        return pd.DataFrame([step.row() for step in self.steps])

    def requests_frame(self) -> "pd.DataFrame":
        """Return one row a request as a pandas frame."""
        import pandas as pd

        return pd.DataFrame([request.row() for request in self.requests])

    def to_chrome(self) -> dict[str, Any]:
        """Return the run in the Chrome trace event format: a track per seat, a counter per resource.

        Times are microseconds. Perfetto and chrome://tracing open it.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": seat, "name": "thread_name", "args": {"name": f"seat {seat}"}}
            for seat in range(self.scheduler.max_num_seqs)
        ]
        for stay in self.stays():
            start = self.steps[stay.first_step].start
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": stay.seat,
                    "name": stay.request_id,
                    "ts": start * 1e6,
                    "dur": (self.steps[stay.last_step].end - start) * 1e6,
                    "args": {"padding_steps": stay.num_padding_steps},
                }
            )
        for record in self.steps:
            for name, value in (
                ("running requests", record.num_running),
                ("waiting requests", record.num_waiting),
                ("held KV blocks", record.num_held_blocks),
            ):
                events.append(
                    {"ph": "C", "pid": 0, "name": name, "ts": record.start * 1e6, "args": {"n": value}}
                )
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"policy": self.policy}}

    def to_json(self) -> dict[str, Any]:
        """Return the limits of the run and its requests as plain values for `results.json`."""
        return {
            "policy": self.policy,
            "limits": {**asdict(self.scheduler), **asdict(self.cache)},
            "requests": [
                {
                    "id": request.id,
                    "tokens": list(request.tokens),
                    "arrival": request.arrival,
                    "first_token": request.first_token,
                    "finish": request.finish,
                    "preemptions": request.num_preemptions,
                    "error": request.error,
                }
                for request in self.requests
            ],
        }


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a CSV file with a header, even if there are none; None becomes an empty cell."""
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; a number that JSON cannot hold raises."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
