"""One request's life in plain words, told from the records of a run alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cbresearch.names import suggestion
from cbresearch.step import Scheduled
from cbresearch.trace import RequestRecord, StepRecord, Trace

_WHY = {
    "budget": "the token budget was used up",
    "seats": "no seat was free",
    "blocks": "the KV pool had no room",
    "sibling": "a parallel sample was computing the prompt",
    "chunk": "the whole prompt did not fit the token budget",
    "policy": "the policy chose others",
    "loss": "others needed its room",
}


def explain(trace: Trace, request_id: str) -> str:
    """Tell one request's life in plain words, a line for each thing that happened to it.

    Args:
        trace: The run, or a window of it: the life is told from its beginning.
        request_id: The request.

    Raises:
        ValueError: There is no such request; near misses are named.
    """
    trace = trace.whole or trace
    named = [record for record in trace.requests if record.id == request_id]
    if not named:
        known = sorted({record.id for record in trace.requests})
        hint = suggestion(request_id, known)
        raise ValueError(f"no request {request_id!r} in this run of {len(known)} requests; {hint}")
    # An id may be there twice, if its second request was rejected.
    record = min(named, key=lambda record: record.is_rejected)
    life = _life(record, trace.steps)
    lines = [_arrival(record), f"was rejected: {record.error}"] if record.is_rejected else life
    return "\n".join([f"request {request_id!r}", *(f"  {line}" for line in lines)])


@dataclass
class _Chapter:
    """A request's wait for a seat, or its stay in one.

    Attributes:
        opening: The line that begins it.
        begin: Seconds since the start of the run at which it begins.
        seat: The seat, or None.
        waits: Steps that did not serve the request, by reason.
        served: Its part of each step that did.
    """

    opening: str
    begin: float
    seat: int | None = None
    waits: Counter[str] = field(default_factory=Counter)
    served: list[tuple[int, Scheduled]] = field(default_factory=list)

    def lines(self, end: float) -> Iterator[str]:
        """Yield its lines: the steps of the prompt, those of the decoding, those without service."""
        yield self.opening
        for is_prefill in (True, False):
            part = [(step, entry) for step, entry in self.served if entry.is_prefill is is_prefill]
            if part:
                tokens = _count(sum(entry.num_tokens for _, entry in part), "token")
                done = f"had {tokens} computed in" if is_prefill else "decoded in"
                new = _count(sum(entry.samples for _, entry in part), "new token")
                yield f"{done} {_steps([step for step, _ in part])}, for {new}"
        why = "; ".join(f"{_WHY[reason]} ({number})" for reason, number in self.waits.most_common())
        through = f", through {_count(self.waits.total(), 'step')}: {why}"
        if self.seat is None and (self.waits or end > self.begin):
            yield f"waited {_seconds(end - self.begin)} s{through if why else ', in which no step began'}"
        elif self.waits:
            yield f"sat unserved{through}"


def _life(record: RequestRecord, steps: Sequence[StepRecord]) -> Iterator[str]:
    chapters = [_Chapter(_arrival(record), record.arrival)]
    padding: list[int] = []
    gone, end, is_done = "", record.arrival, False
    for step in (step for step in steps if step.start >= record.arrival):
        plan, when = step.plan, f"step {step.plan.step}, at {_seconds(step.start)} s"
        if record.id in plan.aborted:
            gone, end = f" before {when}", step.start
            break
        if record.id in plan.preempted:
            kept = "moved to the host (swap)" if record.id in plan.swapped else "was given up"
            lost = f"lost seat {chapters[-1].seat} before {when}: its KV {kept}"
            chapters.append(_Chapter(lost, step.start, waits=Counter(["loss"])))
        entry = next((entry for entry in plan.scheduled if entry.request_id == record.id), None)
        if entry is not None and any(admission.request.id == record.id for admission in plan.admitted):
            verb = "took" if len(chapters) == 1 else "came back to"
            cached = f"{_count(entry.start, 'token')} in the KV cache already"
            took = f"{verb} seat {entry.seat} in {when}, with {cached if entry.start else 'nothing cached'}"
            chapters.append(_Chapter(took, step.start, entry.seat))
        if entry is not None:
            # The step that a request failed in brought it no token.
            has_failed = record.finish_reason == "error" and record.id in step.finished
            chapters[-1].served.append((plan.step, entry._replace(samples=entry.samples and not has_failed)))
        elif any(row.request_id == record.id for row in plan.padding):
            padding.append(plan.step)
        elif not is_done and record.id not in plan.preempted:
            chapters[-1].waits[dict(plan.skipped).get(record.id) or plan.closed or "policy"] += 1
        is_done = is_done or record.id in step.finished
        end = step.end
    ends = [*(chapter.begin for chapter in chapters[1:]), end]
    for chapter, until in zip(chapters, ends, strict=True):
        yield from chapter.lines(until)
    yield _ending(record, gone)
    if padding:
        yield f"its row was computed for nothing in {_steps(padding)}"


def _arrival(record: RequestRecord) -> str:
    asked = "" if record.num_prompt_tokens is None else f" with {_count(record.num_prompt_tokens, 'token')}"
    client = f" from client {record.client!r}" if record.client else ""
    return f"arrived at {_seconds(record.arrival)} s{asked}{client}"


def _ending(record: RequestRecord, gone: str) -> str:
    got = _count(len(record.tokens), "token")
    if record.finish is None:
        ends = {None: "was unfinished when the run ended", "abort": f"was aborted{gone}", "error": "failed"}
        return f"{ends[record.finish_reason]}, with {got}" + f": {record.error}" * bool(record.error)
    why = "max_tokens was reached" if record.finish_reason == "length" else "a token ended the output"
    times = f"TTFT {_seconds(record.ttft or 0)} s, latency {_seconds(record.latency or 0)} s"
    return f"finished at {_seconds(record.finish)} s with {got} ({record.finish_reason}: {why}); {times}"


def _steps(steps: Sequence[int]) -> str:
    which = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    return f"{_count(len(steps), 'step')}, {which}"


def _seconds(seconds: float) -> str:
    """Return seconds to six digits, and to a microsecond at least: a late step has its own time, too."""
    return f"{seconds:.6g}" if seconds < 1 else f"{seconds:.6f}".rstrip("0").rstrip(".")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
