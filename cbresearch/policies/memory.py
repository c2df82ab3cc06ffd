"""Admission by predicted memory: how many requests may join without running out of blocks later."""

from collections import deque
from collections.abc import Iterator, Sequence

from cbresearch.checks import Number, Share
from cbresearch.policies.base import Policy, Proposal, View, in_turn, queued, whole
from cbresearch.request import RequestState


class MaxUtilization(Policy):
    """Admit what fits now and preempt the latest when memory runs out, which is what `fcfs` does."""

    name = "max_utilization"
    family = "memory"
    source = "TensorRT-LLM, MAX_UTILIZATION"
    fast_forward = True


class Admitting(Policy):
    """First come, first served, with a rule for admission; a request alone in the pool is always admitted."""

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether requests may share the pool: all that run or just joined, and last the new one."""
        raise NotImplementedError

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose the running requests, then the queue until the rule rejects one."""
        yield from whole(in_turn(view))
        for request in queued(view):
            if not view.admitting or (view.running and not self.fits(view, (*view.running, request))):
                return
            yield request, request.num_pending_tokens


class NoEvict(Admitting):
    """Admit a request only if all can finish without a preemption.

    Prompt and `max_tokens` of every running request, in whole blocks, must fit the pool. The last token does
    not count, since its KV is never needed.
    """

    name = "no_evict"
    family = "memory"
    source = "TensorRT-LLM, GUARANTEED_NO_EVICT"
    fast_forward = True

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether all requests could grow to their longest."""
        longest = (request.num_prompt_tokens + request.max_tokens - 1 for request in requests)
        return sum(-(-tokens // view.block_size) for tokens in longest) <= view.num_blocks


class PastFuture(Admitting):
    """Admit while the peak of the predicted memory stays below the pool.

    With (held, left) sorted by tokens left, descending, the memory when the i-th ends is left_i · i +
    Σ_{j≤i} held_j. The paper draws the tokens left from the past outputs that were longer than what is
    generated already; here they are the mean of these, so that a run needs no random numbers, and without any
    past output what `max_tokens` leaves.

    Args:
        reserved: Share of the pool to keep free.
        history: Past outputs to remember.
    """

    name = "past_future"
    family = "memory"
    source = "LightLLM, Past-Future scheduler (ASPLOS'25)"

    def __init__(self, reserved: Share = 0.05, history: Number = 1000) -> None:
        self.reserved, self.history = reserved, history

    def begin(self) -> None:
        """Forget all outputs."""
        self._outputs: deque[int] = deque(maxlen=self.history)

    def left(self, request: RequestState) -> float:
        """Return the tokens that a request is expected still to generate."""
        done = request.num_output_tokens
        longer = [output for output in self._outputs if output > done]
        most = request.max_tokens - done
        return min(most, sum(longer) / len(longer) - done) if longer else most

    def peak(self, requests: Sequence[RequestState]) -> float:
        """Return the most tokens that the requests are expected ever to hold together."""
        held, peak = 0, 0.0
        loads = sorted(((self.left(request), request.num_tokens) for request in requests), reverse=True)
        for place, (left, tokens) in enumerate(loads, start=1):
            held += tokens
            peak = max(peak, left * place + held)
        return peak

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether the predicted peak fits the pool."""
        return self.peak(requests) < (1 - self.reserved) * view.num_blocks * view.block_size

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Remember the length of a finished output."""
        if request.finish_reason in ("stop", "length"):
            self._outputs.append(request.num_output_tokens)


class NewTokenRatio(Admitting):
    """Reserve a share of what each request may still generate, a share that falls while memory suffices.

    The share falls linearly over `decay` steps to 0.14 times its start. At a retraction it becomes
    (tokens generated + 20 a request)/(`max_tokens`), summed over the requests that stay, at most 1;
    when no request runs, it begins anew. A waiting request counts with all that it may generate. Retracted is
    the request that has generated least, of equals the one with the longest prompt.

    Args:
        ratio: The share at the start.
        decay: Steps over which it falls.
    """

    name = "new_token_ratio"
    family = "memory"
    source = "SGLang, new_token_ratio and retract_decode"

    def __init__(self, ratio: Share = 0.7, decay: Number = 600) -> None:
        self.ratio, self.decay = ratio, decay

    def begin(self) -> None:
        """Begin with the whole ratio."""
        self.share = self.ratio

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose as the reservation allows; the share falls by a step."""
        fallen = max(0.14 * self.ratio, self.share - 0.86 * self.ratio / self.decay)
        self.share = fallen if view.running else self.ratio
        yield from super().propose(view)

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether the tokens of all requests fit the pool, and what is reserved for them."""
        *left, new = (min(request.max_tokens - request.num_output_tokens, 4096) for request in requests)
        held = sum(request.num_tokens for request in requests)
        return held + self.share * sum(left) + new <= view.num_blocks * view.block_size

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the request that has generated least, of equals the one with the longest prompt."""
        victim = min(candidates, key=lambda one: (one.num_output_tokens, -one.num_tokens, -one.order))
        stay = [request for request in view.running if request is not victim]
        generated = sum(request.num_output_tokens + 20 for request in stay)
        self.share = min(1.0, generated / (1 + sum(request.max_tokens for request in stay)))
        return victim
