"""The batching of published servers: Orca, vLLM, Sarathi-Serve."""

from collections.abc import Iterator, Sequence
from typing import Literal

from cbresearch.checks import Share
from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.policies.memory import Admitting
from cbresearch.request import RequestState


class Orca(Admitting):
    """Iteration-level batching that reserves each request's KV slots when it joins.

    The slots are counted in whole blocks, not laid out: `CacheConfig.reservation` lays them out in contiguous
    runs as well. Orca itself reserves `max_tokens`; "pow2" and "oracle" are the baselines of the vLLM paper.
    It computes every prompt in one step, so its token budget is large.

    Args:
        reserve: "max" for prompt + `max_tokens`; "pow2" for the predicted output, rounded up to a power of
            two; "oracle" for the predicted output itself. These two preempt where the prediction falls short.
    """

    name = "orca"
    family = "batching"
    source = "Orca (OSDI'22); reservations of vLLM (SOSP'23)"
    fast_forward = True

    def __init__(self, reserve: Literal["max", "pow2", "oracle"] = "max") -> None:
        self.reserve = reserve
        # A reservation by prediction grows once the output is longer, and another reason may then reject.
        self.fast_forward = reserve == "max"

    def num_slots(self, request: RequestState) -> int:
        """Return the tokens that are reserved for a request."""
        output = request.max_tokens
        if self.reserve != "max":
            output = min(output, request.num_output_tokens + request.predicted_remaining)
        if self.reserve == "pow2":
            output = 1 << (output - 1).bit_length()
        return request.num_prompt_tokens + output

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether the reservations of all requests fit the pool."""
        return sum(-(-self.num_slots(request) // view.block_size) for request in requests) <= view.num_blocks


class VllmV0(Policy):
    """Prompts before decodes, above a watermark of free blocks; decodes starve for as long as prompts come.

    A decode waits for every prompt that is admitted. The latest admitted is preempted. No request joins
    while one is swapped out. A prompt longer than the token budget is cut, which vLLM v0 did
    not do unless asked; without `chunked_prefill` none is.

    Args:
        swap: Swap victims out to the host's pool, where it has room, instead of recomputing them.
        watermark: Share of the pool that an admission leaves free.
    """

    name = "vllm_v0"
    source = "vLLM (SOSP'23)"
    preempts_one_by_one = True
    fast_forward = True

    def __init__(self, swap: bool = False, watermark: Share = 0.01) -> None:
        self.swap, self.watermark = swap, watermark

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose prompts; if none could be scheduled, decodes and then requests to be swapped in."""
        yield from whole([request for request in view.running if request.is_prefill])
        if next(iter(view.swapped), None) is None:
            for request in view.waiting:
                needed = -(-request.num_tokens // view.block_size)
                spare = view.num_free_blocks - needed - int(self.watermark * view.num_blocks)
                if not view.admitting or (spare < 0 and view.running):
                    break
                yield request, request.num_pending_tokens
        if view.token_budget == view.max_num_batched_tokens:
            yield from whole(in_turn(view))
            yield from joining(view, view.swapped)

    def preemption(self, view: View, victim: RequestState) -> str:
        """Choose as the option says."""
        return "swap" if self.swap else view.preemption


class Sarathi(Policy):
    """Decodes first, then prompts under way, then new ones, cut to the token budget.

    No decode waits for a prompt longer than what the budget leaves beside it. Dynamic SplitFuse, published at
    the same time, has this order too: there the budget is the step size at which throughput levels off.
    """

    name = "sarathi"
    source = "Sarathi-Serve (OSDI'24)"
    fast_forward = True

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose in that order."""
        running = in_turn(view)
        yield from whole([request for request in running if not request.is_prefill])
        yield from whole([request for request in running if request.is_prefill])
        yield from joining(view, queued(view))


class VllmV1(Policy):
    """Running requests in their order, then the queue, under one token budget, as in vLLM v1.

    There are no phases: each request is scheduled with all that it has pending, so a prompt is cut where the
    budget ends. No request joins in a step that preempts. Swapped requests, which vLLM v1 does not have, come
    back before others join.

    Args:
        priority: Take the queue by (priority, arrival), and preempt the last in that order.
    """

    name = "vllm_v1"
    source = "vLLM 0.32, v1 scheduler"
    preempts_one_by_one = True
    fast_forward = True

    def __init__(self, priority: bool = False) -> None:
        self._by_priority = priority

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the waiting ones."""
        for request in view.running:
            if request.seat is None:
                continue
            yield request, request.num_pending_tokens
            if request.seat is None:
                # It was preempted for itself: the requests behind it are not scheduled in this step.
                return
        waiting = queued(view)
        yield from joining(view, sorted(waiting, key=_urgency) if self._by_priority else waiting)

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the latest admitted request, or the least urgent."""
        return max(candidates, key=_urgency) if self._by_priority else candidates[-1]


def _urgency(request: RequestState) -> tuple[int, float, int]:
    return request.priority, request.arrival, request.order
