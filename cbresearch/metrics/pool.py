"""Where the slots of the KV pool are, step by step and on average."""

from collections.abc import Iterator
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbresearch.metrics.basic import fraction
from cbresearch.trace import Columns, StepRecord, Trace

__all__ = ["MemoryUse", "memory", "memory_columns", "memory_shares"]


class MemoryUse(NamedTuple):
    """Where the KV pool's slots are during a step, in tokens (categories of vLLM, SOSP'23, section 2).

    The first six add up to the pool.

    Attributes:
        token_states: Slots that hold a token of an unfinished request, a shared one counted once.
        reserved: Held slots that a later token of their request will fill.
        internal: Held slots that no token will ever fill.
        external: Slots that are not held and yet could not be had (see `PoolState.num_external_blocks`).
        cached: Slots of cached blocks without a reference; they are given up as soon as room is needed.
        free: Slots that are not held, while no request was short of memory.
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


def memory(trace: Trace) -> Iterator[MemoryUse]:
    """Return where the pool's slots are, one `MemoryUse` a step."""
    return map(MemoryUse, *(values.tolist() for values in memory_columns(trace).values()))


def memory_columns(trace: Trace) -> Columns:
    """Return the categories of `MemoryUse` as columns, one value a step in tokens."""
    return trace.once(_memory_columns)


def _memory_columns(trace: Trace) -> Columns:
    # What is held is known from the start of the run alone.
    if trace.whole is not None:
        return trace.of_window(memory_columns(trace.whole))
    steps, size = trace.step_columns, trace.cache.block_size
    held, tokens, reserved = steps["num_held_blocks"] * size, steps["num_held_tokens"], _reserved(trace)
    external, cached = steps["num_external_blocks"] * size, steps["num_cached_blocks"] * size
    return {
        "token_states": tokens,
        "reserved": reserved,
        "internal": held - tokens - reserved,
        "external": external,
        "cached": cached,
        "free": trace.cache.num_tokens - held - external - cached,
        "shared": steps["num_shared_blocks"] * size,
        "host": steps["num_held_host_blocks"] * size,
    }


def memory_shares(trace: Trace) -> dict[str, float | None]:
    """Return the time-weighted mean share of the KV pool in each category of `MemoryUse`.

    The first six add up to 1. "shared" and "host" are not slots of the pool: they are given in its size.
    """
    seconds = trace.step_columns["duration_s"]
    whole = float(seconds.sum()) * trace.cache.num_tokens
    return {name: fraction(float(seconds @ slots), whole) for name, slots in memory_columns(trace).items()}


def _reserved(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the held slots that later tokens will fill, step by step.

    A request with empty slots shares their blocks with no other. So it is the slots of all seated requests,
    up to the end of each, less their tokens computed; both are counted by what each step changes.
    """
    size, steps = trace.cache.block_size, trace.step_columns
    # The last token is never fed back, so it never gets a slot, unless it was and nothing came of it.
    ends = {
        record.id: record.num_prompt_tokens + len(record.tokens) - (record.finish_reason != "error")
        for record in trace.served
        if record.num_prompt_tokens is not None
    }
    changes = [0] * (len(trace.steps) + 1)
    slots: dict[str, int] = {}
    computed: dict[str, int] = {}

    def grow(request_id: str, num_blocks: int, step: int) -> None:
        before = slots.get(request_id, 0)
        slots[request_id] = min(before + num_blocks * size, ends[request_id])
        changes[step] += slots[request_id] - before

    def leave(request_id: str, step: int) -> None:
        changes[step] += computed.pop(request_id, 0) - slots.pop(request_id, 0)

    step = 0
    for part in trace.parts:
        if isinstance(part, StepRecord):
            for request_id in (*part.plan.preempted, *part.plan.aborted):
                leave(request_id, step)
            for request_id, _, start, num_tokens, _, _, new_block_ids in part.plan.rows:
                # What a request finds computed when it is admitted is not among the tokens of the steps.
                changes[step] -= 0 if request_id in computed else start
                computed[request_id] = start + num_tokens
                grow(request_id, len(new_block_ids), step)
            step += 1
            for request_id in part.finished:
                leave(request_id, step)
        else:
            computed.update(zip(part.request_ids, map(add, part.starts, part.num_steps), strict=True))
            for offset, place in zip(part.taken_in, part.taken_by, strict=True):
                grow(part.request_ids[place], 1, step + offset)
            for offset, finished in part.finished:
                for request_id in finished:
                    leave(request_id, step + offset + 1)
            step += len(part)
    num_computed = steps["num_prefill_tokens"] + steps["num_decode_tokens"]
    return np.cumsum(np.array(changes[:-1], dtype=np.int64) - num_computed)
