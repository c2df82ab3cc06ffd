"""Admission by predicted memory: how many may join without running out of blocks later."""

from collections import deque
from collections.abc import Iterator, Sequence

from cbresearch.policies.base import Policy, Proposal, View, in_turn, queued, whole
from cbresearch.request import RequestState


class Admitting(Policy):
    """First come, first served, with a rule for who may join."""

    def may_join(self, view: View, request: RequestState, joined: Sequence[RequestState]) -> bool:
        """Return whether a request may join those who run or joined in this step."""
        raise NotImplementedError

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue until the rule refuses one."""
        yield from whole(in_turn(view))
        for request in queued(view):
            if not view.admitting or not self.may_join(view, request, view.running):
                return
            yield request, request.num_pending_tokens


class NoEvict(Admitting):
    """Admit only who can finish without ever evicting anyone (TensorRT-LLM's GUARANTEED_NO_EVICT).

    Prompt and `max_tokens` of everyone who runs, in whole blocks, must fit the pool.
    """

    name = "no_evict"
    family = "memory"

    def may_join(self, view: View, request: RequestState, joined: Sequence[RequestState]) -> bool:
        """Return whether all could grow to their longest."""
        longest = (state.num_prompt_tokens + state.request.max_tokens - 1 for state in (*joined, request))
        return sum(-(-tokens // view.block_size) for tokens in longest) <= view.num_blocks


class MaxUtilization(Policy):
    """Admit whoever fits now, and pause the latest when memory runs out (TensorRT-LLM's MAX_UTILIZATION)."""

    name = "max_utilization"
    family = "memory"


class PastFuture(Admitting):
    """Admit while the peak of the predicted memory stays below the pool (LightLLM, ASPLOS'25).

    With (held, left) sorted by tokens left, descending, the memory when the i-th ends is left_i · i +
    Σ_{j≤i} held_j. What is left is the mean of the past outputs that were longer than what is generated
    already; without any, what `max_tokens` leaves.

    Args:
        reserved: Share of the pool to keep free.
        history: Past outputs to remember.
    """

    name = "past_future"
    family = "memory"

    def __init__(self, reserved: float = 0.05, history: int = 1000) -> None:
        self.reserved = reserved
        self._outputs: deque[int] = deque(maxlen=history)

    def left(self, request: RequestState) -> float:
        """Return the tokens that a request is expected still to generate."""
        done = request.num_output_tokens
        longer = [output for output in self._outputs if output > done]
        most = request.request.max_tokens - done
        return min(most, sum(longer) / len(longer) - done) if longer else most

    def may_join(self, view: View, request: RequestState, joined: Sequence[RequestState]) -> bool:
        """Return whether the predicted peak fits."""
        loads = sorted(((self.left(state), state.num_tokens) for state in (*joined, request)), reverse=True)
        held, peak = 0, 0.0
        for place, (left, tokens) in enumerate(loads, start=1):
            held += tokens
            peak = max(peak, left * place + held)
        return not joined or peak < (1 - self.reserved) * view.num_blocks * view.block_size

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Remember the length of a finished output."""
        if request.finish_reason is not None:
            self._outputs.append(request.num_output_tokens)


class NewTokenRatio(Admitting):
    """Reserve a share of what each may still generate, a share that falls while memory suffices (SGLang).

    The share falls linearly over `decay` steps to 0.14 times its start, and begins anew whenever somebody has
    to be retracted. Of the running, who has generated least is retracted first, of equals the longest prompt.
    SGLang retracts until 20 more steps fit; here, until the step at hand does.

    Args:
        ratio: The share at the start.
        decay: Steps over which it falls.
    """

    name = "new_token_ratio"
    family = "memory"

    def __init__(self, ratio: float = 0.7, decay: int = 600) -> None:
        self.ratio, self.decay = ratio, decay
        self._steps = 0

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose as the reservation allows; the share falls by a step."""
        self._steps = min(self._steps + 1, self.decay) if view.running else 0
        yield from super().propose(view)

    def may_join(self, view: View, request: RequestState, joined: Sequence[RequestState]) -> bool:
        """Return whether the pool takes the newcomer's tokens and everyone's reserved share."""
        share = self.ratio * (1 - 0.86 * self._steps / self.decay)
        left = (min(state.request.max_tokens - state.num_output_tokens, 4096) for state in (*joined, request))
        held = sum(state.num_tokens for state in (*joined, request))
        return not joined or held + share * sum(left) <= view.num_blocks * view.block_size

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose who has generated least, of equals the longest prompt."""
        self._steps = 0
        return min(
            candidates, key=lambda state: (state.num_output_tokens, -state.num_prompt_tokens, -state.order)
        )
