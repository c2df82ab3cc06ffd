"""A run: its limits and its records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.leap import Leap
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.steps import Steps

if TYPE_CHECKING:
    import pandas as pd


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
    """A seated request's blocks, and its tokens computed."""

    num_blocks: int
    num_computed: int


_NO_SPAN = _Span(0, 0)


def _reserved(spans: Mapping[str, _Span], ends: Mapping[str, int], size: int) -> int:
    """Return the held slots that later tokens will fill: whoever has empty ones has their blocks alone."""
    return sum(
        min(span.num_blocks * size, ends[request_id]) - span.num_computed
        for request_id, span in spans.items()
    )


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
    steps: Sequence[StepRecord]
    requests: tuple[RequestRecord, ...]

    @property
    def duration(self) -> float:
        """Return the seconds from the start of the run to the end of its last step."""
        return self.steps[-1].end if self.steps else 0.0

    @property
    def served(self) -> tuple[RequestRecord, ...]:
        """Return the records of the requests that were not refused."""
        return tuple(request for request in self.requests if not request.is_refused)

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
        # The last token is never fed back, so it never gets a slot, unless it was and nothing came of it.
        ends = {
            request.id: request.num_prompt_tokens + len(request.tokens) - (request.finish_reason != "error")
            for request in self.served
            if request.num_prompt_tokens is not None
        }
        spans: dict[str, _Span] = {}
        for part in self.steps.parts if isinstance(self.steps, Steps) else self.steps:
            if isinstance(part, Leap):
                known = [spans[request_id] for request_id in part.request_ids]
                reserved = _reserved(spans, ends, size)
                places, number = part.taken_by, 0
                done = dict(part.finished)
                held = {place: span.num_blocks for place, span in enumerate(known)}
                for offset, state in enumerate(part.states()):
                    # Each row fills a slot, and a block that is taken reserves those up to its request's end.
                    reserved -= state.num_running
                    while number < len(places) and part.taken_in[number] == offset:
                        place, number = places[number], number + 1
                        end = ends[part.request_ids[place]]
                        reserved += min((held[place] + 1) * size, end) - min(held[place] * size, end)
                        held[place] += 1
                    yield self._use(
                        reserved,
                        state.num_held_blocks,
                        state.num_held_tokens,
                        state.num_cached_blocks,
                        state.num_external_blocks,
                        state.num_shared_blocks,
                        part.num_held_host_blocks,
                    )
                    for request_id in done.get(offset, ()):
                        place = part.request_ids.index(request_id)
                        slots = min(held[place] * size, ends[request_id])
                        reserved -= slots - part.starts[place] - part.num_steps[place]
                        del spans[request_id]
                for place, request_id in enumerate(part.request_ids):
                    if request_id in spans:
                        spans[request_id] = _Span(held[place], part.starts[place] + part.num_steps[place])
                continue
            plan = part.plan
            for request_id in (*plan.preempted, *plan.aborted):
                spans.pop(request_id, None)
            for entry in plan.scheduled:
                before = spans.get(entry.request_id, _NO_SPAN)
                # Whoever was just seated names its whole table.
                num_blocks = before.num_blocks + len(entry.new_block_ids)
                spans[entry.request_id] = _Span(num_blocks, entry.context_length)
            yield self._use(
                _reserved(spans, ends, size),
                part.num_held_blocks,
                part.num_held_tokens,
                part.num_cached_blocks,
                part.num_external_blocks,
                part.num_shared_blocks,
                part.num_held_host_blocks,
            )
            for request_id in part.finished:
                del spans[request_id]

    def _use(
        self, reserved: int, held: int, tokens: int, cached: int, external: int, shared: int, host: int
    ) -> MemoryUse:
        """Return where the slots are, from the tokens reserved and held and from numbers of blocks."""
        size = self.cache.block_size
        return MemoryUse(
            token_states=tokens,
            reserved=reserved,
            internal=held * size - tokens - reserved,
            external=external * size,
            cached=cached * size,
            free=(self.cache.num_blocks - external - cached - held) * size,
            shared=shared * size,
            host=host * size,
        )

    def steps_frame(self) -> "pd.DataFrame":
        """Return one row a step as a pandas frame."""
        import pandas as pd

        return pd.DataFrame([step.row() for step in self.steps])

    def requests_frame(self) -> "pd.DataFrame":
        """Return one row a request as a pandas frame."""
        import pandas as pd

        return pd.DataFrame([request.row() for request in self.requests])

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
