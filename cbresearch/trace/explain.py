"""One request's life in plain words, told from the records of a run alone."""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from cbresearch.step import Scheduled
from cbresearch.trace.records import RequestRecord, StepRecord

_WHY = {
    "budget": "the token budget was used up",
    "seats": "no seat was free",
    "blocks": "the KV pool had no room",
    "sibling": "a parallel sample was computing the prompt",
    "chunk": "the whole prompt did not fit the token budget",
    "policy": "the policy chose others",
    "loss": "others needed its room",
}


def explain(steps: Sequence[StepRecord], requests: Sequence[RequestRecord], request_id: str) -> str:
    """Tell what befell a request, a line for each thing.

    Raises:
        ValueError: There is no such request; near misses are named.
    """
    named = [record for record in requests if record.id == request_id]
    if not named:
        known = sorted({record.id for record in requests})
        near = difflib.get_close_matches(request_id, known, n=3, cutoff=0.5) or known[:3]
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "the run had none"
        raise ValueError(f"no request {request_id!r} in this run of {len(known)} requests; {hint}")
    # An id may be there twice, if the second bearer was refused.
    record = min(named, key=lambda record: record.is_refused)
    return "\n".join([f"request {request_id!r}", *(f"  {line}" for line in _life(steps, record))])


def _life(steps: Sequence[StepRecord], record: RequestRecord) -> Iterator[str]:
    asked = "" if record.num_prompt_tokens is None else f" with {_count(record.num_prompt_tokens, 'token')}"
    client = f" from client {record.client!r}" if record.client else ""
    yield f"arrived at {record.arrival:.6g} s{asked}{client}"
    if record.is_refused:
        yield f"was refused: {record.error}"
        return
    since, seat, verb = record.arrival, None, "took"
    waits: Counter[str] = Counter()
    served: list[tuple[int, Scheduled]] = []
    padding: list[int] = []
    gone, is_done = "", False
    for step in steps:
        plan = step.plan
        if step.start < record.arrival:
            continue
        if record.id in plan.aborted:
            gone = f" before step {plan.step}, at {step.start:.6g} s"
            break
        if record.id in plan.preempted:
            yield from _service(served, waits)
            kept = "its KV moved to the host (swap)" if record.id in plan.swapped else "its KV was given up"
            yield f"lost seat {seat} before step {plan.step}, at {step.start:.6g} s: {kept}"
            since, seat, verb = step.start, None, "came back to"
            waits, served = Counter(["loss"]), []
        for admission in plan.admitted:
            if admission.request.id == record.id:
                if step.start > since:
                    yield from _waiting(waits, step.start - since)
                seat, waits = admission.seat, Counter()
                start = next(entry.start for entry in plan.scheduled if entry.request_id == record.id)
                yield f"{verb} seat {seat} in step {plan.step}, at {step.start:.6g} s, {_held(start)}"
        entry = next((entry for entry in plan.scheduled if entry.request_id == record.id), None)
        if entry is not None:
            # The step that a request failed in brought it no token.
            fails = record.finish_reason == "error" and record.id in step.finished
            served.append((plan.step, entry._replace(samples=False) if fails else entry))
        elif record.id in (row.request_id for row in plan.padding):
            padding.append(plan.step)
        elif not is_done and record.id not in plan.preempted:
            waits[dict(plan.skipped).get(record.id) or plan.closed or "policy"] += 1
        is_done = is_done or record.id in step.finished
    if seat is not None:
        yield from _service(served, waits)
    elif waits:
        yield from _waiting(waits, (step.start if gone else step.end) - since)
    yield _end(record, gone)
    if padding:
        yield f"its row was computed for nothing in {_count(len(padding), 'step')}, {_range(padding)}"


def _waiting(waits: Counter[str], seconds: float) -> Iterator[str]:
    yield f"waited {seconds:.6g} s{_reasons(waits)}"


def _reasons(waits: Counter[str]) -> str:
    if not waits:
        return ", in which no step began"
    why = "; ".join(f"{_WHY[reason]} ({number})" for reason, number in waits.most_common())
    return f", through {_count(waits.total(), 'step')}: {why}"


def _service(served: Sequence[tuple[int, Scheduled]], waits: Counter[str]) -> Iterator[str]:
    """Tell of a stay in a seat: the steps of the prompt, those of the decoding, those without service."""
    for is_prefill in (True, False):
        part = [(step, entry) for step, entry in served if entry.is_prefill is is_prefill]
        if not part:
            continue
        where = f"in {_count(len(part), 'step')}, {_range([step for step, _ in part])}"
        num_tokens = sum(entry.num_tokens for _, entry in part)
        done = f"had {_count(num_tokens, 'token')} computed" if is_prefill else "decoded"
        yield f"{done} {where}, for {_count(sum(entry.samples for _, entry in part), 'new token')}"
    if waits:
        yield f"sat unserved{_reasons(waits)}"


def _held(num_tokens: int) -> str:
    return (
        f"with {_count(num_tokens, 'token')} in the KV cache already" if num_tokens else "with nothing cached"
    )


def _end(record: RequestRecord, gone: str) -> str:
    got = _count(len(record.tokens), "token")
    if record.finish_reason is None:
        return f"was unfinished when the run ended, with {got}"
    if record.finish_reason == "abort":
        return f"was aborted{gone}, with {got}"
    if record.finish_reason == "error":
        return f"failed, with {got}: {record.error}"
    why = "max_tokens was reached" if record.finish_reason == "length" else "a token ended the output"
    return (
        f"finished at {record.finish:.6g} s with {got} ({record.finish_reason}: {why}); "
        f"TTFT {record.ttft:.6g} s, latency {record.latency:.6g} s"
    )


def _range(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
