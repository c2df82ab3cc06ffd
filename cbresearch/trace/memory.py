"""Where the slots of the KV pool are, step by step."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbresearch.config import CacheConfig
from cbresearch.trace.columns import Columns, Part, fixed
from cbresearch.trace.records import RequestRecord, StepRecord


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


def memory_columns(
    parts: Sequence[Part], requests: Sequence[RequestRecord], steps: Columns, cache: CacheConfig
) -> Columns:
    """Return the categories of `MemoryUse` as columns of one value a step, in tokens."""
    size = cache.block_size
    held, tokens = steps["num_held_blocks"] * size, steps["num_held_tokens"]
    external, cached = steps["num_external_blocks"] * size, steps["num_cached_blocks"] * size
    reserved = _reserved(parts, _last_slots(requests), steps["num_scheduled"], size)
    return fixed(
        {
            "token_states": tokens,
            "reserved": reserved,
            "internal": held - tokens - reserved,
            "external": external,
            "cached": cached,
            "free": cache.num_tokens - held - external - cached,
            "shared": steps["num_shared_blocks"] * size,
            "host": steps["num_held_host_blocks"] * size,
        }
    )


def _last_slots(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """Return how many slots each request fills in the end, known only now that its output is.

    The last token is never fed back, so it never gets a slot, unless it was and nothing came of it.
    """
    return {
        request.id: request.num_prompt_tokens + len(request.tokens) - (request.finish_reason != "error")
        for request in requests
        if request.num_prompt_tokens is not None and not request.is_refused
    }


def _reserved(
    parts: Sequence[Part], ends: Mapping[str, int], num_rows: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    """Return the held slots that later tokens will fill, step by step.

    A request that has empty slots has their blocks alone, so the requests are counted one by one, by how
    much each step changes the number.

    Args:
        parts: The steps.
        ends: Slots that each request fills in the end.
        num_rows: Rows served by each step.
        size: Slots of a block.
    """
    changes = [0] * (len(num_rows) + 1)
    in_run = np.zeros(len(num_rows), dtype=bool)
    blocks: dict[str, int] = {}
    reserved: dict[str, int] = {}

    def leave(request_id: str, step: int) -> None:
        changes[step] -= reserved.pop(request_id, 0)
        blocks.pop(request_id, None)

    step = 0
    for part in parts:
        if isinstance(part, StepRecord):
            for request_id in (*part.plan.preempted, *part.plan.aborted):
                leave(request_id, step)
            for entry in part.plan.scheduled:
                request_id = entry.request_id
                blocks[request_id] = blocks.get(request_id, 0) + len(entry.new_block_ids)
                left = min(blocks[request_id] * size, ends[request_id]) - entry.context_length
                changes[step] += left - reserved.get(request_id, 0)
                reserved[request_id] = left
            for request_id in part.finished:
                leave(request_id, step + 1)
            step += 1
            continue
        in_run[step : step + len(part)] = True
        for request_id, num_steps in zip(part.request_ids, part.num_steps, strict=True):
            reserved[request_id] -= num_steps
        for offset, place in zip(part.taken_in, part.taken_by, strict=True):
            request_id = part.request_ids[place]
            room = max(0, min(size, ends[request_id] - blocks[request_id] * size))
            blocks[request_id] += 1
            reserved[request_id] += room
            changes[step + offset] += room
        for offset, ended in part.finished:
            for request_id in ended:
                leave(request_id, step + offset + 1)
        step += len(part)
    # Each row of a decode run fills one slot a step.
    return np.cumsum(np.array(changes[:-1], dtype=np.int64) - num_rows * in_run)
