"""The immutable messages between scheduler and executor: what to compute, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cbresearch.request import Request, RequestState, TokenLogprobs


class Admission(NamedTuple):
    """A request that takes a seat in this step.

    Attributes:
        request: The request.
        seat: Its row in the batch until it leaves.
        output_token_ids: Tokens that it generated before a preemption; empty the first time.
    """

    request: Request
    seat: int
    output_token_ids: tuple[int, ...]


class Scheduled(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: Whose tokens.
        seat: Its row in the batch.
        start: Tokens of the request whose KV was computed before this step.
        num_tokens: Tokens to compute in this step, at positions `start` to `start + num_tokens - 1`.
        is_prefill: Whether known tokens are computed; otherwise the newest token, to decode the next.
        samples: Whether the last of these tokens yields a new token.
        new_block_ids: Physical blocks to append to the request's block table before the step.
    """

    request_id: str
    seat: int
    start: int
    num_tokens: int
    is_prefill: bool
    samples: bool
    new_block_ids: tuple[int, ...]

    @property
    def context_length(self) -> int:
        """Return the tokens that the last query of this step attends to, itself included."""
        return self.start + self.num_tokens


class Transfer(NamedTuple):
    """One block that is copied before the step computes.

    Attributes:
        kind: "copy" within the device's pool (copy on write), "swap_out" from there to the host's pool, or
            "swap_in" back.
        source: Physical block id in the pool that is read.
        target: Physical block id in the pool that is written.
    """

    kind: str
    source: int
    target: int


SKIP_REASONS = ("budget", "seats", "blocks", "sibling", "chunk", "policy")
"""Why a request is not served in a step; see `Skipped`."""


class Skipped(NamedTuple):
    """A request that wanted to be served in a step and was not.

    Attributes:
        request_id: Who.
        reason: "budget": the step has no tokens left. "seats": none is free. "blocks": the KV pool has no
            room. "sibling": a parallel sample is computing the prompt. "chunk": the whole prompt does not fit
            what is left of the budget. "policy": it was not proposed.
    """

    request_id: str
    reason: str


class Padding(NamedTuple):
    """The row of a finished request that a static batch goes on computing for nothing.

    Attributes:
        request_id: Who left the row behind.
        seat: The row.
        context_length: Tokens that the row attends to; its last position is computed again.
    """

    request_id: str
    seat: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes.

    Attributes:
        step: Index of the step, from 0.
        scheduled: Whom it serves, in the policy's order.
        admitted: Who takes a seat before it.
        preempted: Ids of requests that lost their seat before it, the first in line to come back first.
        padding: Rows computed for nothing.
        aborted: Ids of requests that were ended from outside since the step before.
        swapped: Ids of those among the preempted whose KV went to the host's pool.
        transfers: Blocks to copy before anything is computed, one after the other in this order: a later
            one may read or overwrite what an earlier one wrote.
        skipped: Who was proposed and refused, and who runs and was not served.
        closed: Why nobody else who waits could join: "budget", "seats", "blocks" or "chunk"; None if the
            policy left out whoever waits. Without this, a long queue would have to be listed in every step.
    """

    step: int
    scheduled: tuple[Scheduled, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    padding: tuple[Padding, ...] = ()
    aborted: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    closed: str | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens computed in the step, padding included."""
        return sum([entry.num_tokens for entry in self.scheduled]) + len(self.padding)

    def num_transfers(self, kind: str) -> int:
        """Return the blocks that the step copies by way of "copy", "swap_out" or "swap_in"."""
        return sum(transfer.kind == kind for transfer in self.transfers)

    @property
    def num_prefill_tokens(self) -> int:
        """Return the prompt tokens (and, after a preemption, output tokens) computed in the step."""
        return sum(entry.num_tokens for entry in self.scheduled if entry.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        """Return the decoding requests in the step, one token each."""
        return sum(not entry.is_prefill for entry in self.scheduled)

    @property
    def num_context_tokens(self) -> int:
        """Return the context lengths summed over all rows: the KV entries that attention reads."""
        useful = sum([entry.start + entry.num_tokens for entry in self.scheduled])
        return useful + sum([row.context_length for row in self.padding])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    Attributes:
        duration: Seconds that the step took, until its tokens were there.
        tokens: New token id by request id, for every entry of the plan that samples and has not failed.
        stopped: Ids of requests whose new token ends their output (end of sequence, or a stop).
        failed: What went wrong by request id; whoever fails ends, and the others go on.
        logprobs: Those of the new token by request id, where they were asked for.
        device_duration: Seconds of `duration` in which the device computed, or None if nobody measured it;
            the rest is the host's time.
    """

    duration: float
    tokens: Mapping[str, int]
    stopped: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    device_duration: float | None = None


class Committed(NamedTuple):
    """The state that a step leaves behind, taken before the finished requests give back their blocks.

    Attributes:
        finished: States of the requests that the step finished.
        num_running: Unfinished requests with a seat while the step ran.
        num_waiting: Requests without a seat while the step ran, swapped ones included.
        num_held_blocks: Blocks held while the step ran.
        num_held_tokens: Tokens of unfinished requests whose KV lies in those blocks, shared ones once.
        num_cached_blocks: Blocks that hold a cached prefix which nobody refers to.
        num_external_blocks: Blocks that nobody held and yet nobody could get: lost to an allocator's
            rounding, or free while memory refused or preempted a request.
        num_shared_blocks: References to held blocks beyond the first of each.
        num_swapped: Requests whose KV lies in the host's pool.
        num_held_host_blocks: Blocks that they hold there.
    """

    finished: tuple[RequestState, ...]
    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int
    num_external_blocks: int
    num_shared_blocks: int
    num_swapped: int
    num_held_host_blocks: int
