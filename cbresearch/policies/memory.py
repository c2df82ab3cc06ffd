"""Admission by predicted memory: how many may join without running out of blocks later."""

from collections import deque
from collections.abc import Iterator, Sequence

from cbresearch.policies.base import Policy, Proposal, View, in_turn, queued, whole
from cbresearch.request import RequestState


class Admitting(Policy):
    """First come, first served, with a rule for who may join; alone in the pool, everyone may."""

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether these may share the pool: who runs or joined in this step, and last the newcomer."""
        raise NotImplementedError

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose whoever runs, then the queue until the rule refuses one."""
        yield from whole(in_turn(view))
        for request in queued(view):
            if not view.admitting or (view.running and not self.fits(view, (*view.running, request))):
                return
            yield request, request.num_pending_tokens


class NoEvict(Admitting):
    """Admit only who can finish without ever evicting anyone.

    Prompt and `max_tokens` of everyone who runs, in whole blocks, must fit the pool. The last token counts
    for nothing, since its KV is never needed.
    """

    name = "no_evict"
    family = "memory"
    source = "TensorRT-LLM, GUARANTEED_NO_EVICT"
    fast_forward = True

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether all could grow to their longest."""
        longest = (state.num_prompt_tokens + state.max_tokens - 1 for state in requests)
        return sum(-(-tokens // view.block_size) for tokens in longest) <= view.num_blocks


class MaxUtilization(Policy):
    """Admit whoever fits now, and pause the latest when memory runs out.

    That is what `fcfs` does; the name stands beside `no_evict` in comparisons.
    """

    name = "max_utilization"
    family = "memory"
    source = "TensorRT-LLM, MAX_UTILIZATION"
    fast_forward = True


class PastFuture(Admitting):
    """Admit while the peak of the predicted memory stays below the pool.

    With (held, left) sorted by tokens left, descending, the memory when the i-th ends is left_i · i +
    Σ_{j≤i} held_j. The paper draws what is left from the past outputs that were longer than what is generated
    already; here it is their mean, so that a run needs no chance, and without any what `max_tokens` leaves.

    Args:
        reserved: Share of the pool to keep free.
        history: Past outputs to remember.
    """

    name = "past_future"
    family = "memory"
    source = "LightLLM, Past-Future scheduler (ASPLOS'25)"

    def __init__(self, reserved: float = 0.05, history: int = 1000) -> None:
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
        """Return the most tokens that these are expected ever to hold together."""
        held, peak = 0, 0.0
        loads = sorted(((self.left(state), state.num_tokens) for state in requests), reverse=True)
        for place, (left, tokens) in enumerate(loads, start=1):
            held += tokens
            peak = max(peak, left * place + held)
        return peak

    def fits(self, view: View, requests: Sequence[RequestState]) -> bool:
        """Return whether the predicted peak does."""
        return self.peak(requests) < (1 - self.reserved) * view.num_blocks * view.block_size

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Remember the length of a finished output."""
        if request.finish_reason is not None:
            self._outputs.append(request.num_output_tokens)


class NewTokenRatio(Admitting):
    """Reserve a share of what each may still generate, a share that falls while memory suffices.

    The share falls linearly over `decay` steps to 0.14 times its start. When somebody has to be retracted, it
    becomes (tokens generated + 20 a request)/(`max_tokens`), summed over those who stay, at most 1; when
    nobody runs, it begins anew. A newcomer counts with all that it may generate. Whoever has generated least
    is retracted first, of equals the longest prompt.

    Args:
        ratio: The share at the start.
        decay: Steps over which it falls.
    """

    name = "new_token_ratio"
    family = "memory"
    source = "SGLang, new_token_ratio and retract_decode"

    def __init__(self, ratio: float = 0.7, decay: int = 600) -> None:
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
        """Return whether everyone's tokens do, and what is reserved for them."""
        *left, new = (min(state.max_tokens - state.num_output_tokens, 4096) for state in requests)
        held = sum(state.num_tokens for state in requests)
        return held + self.share * sum(left) + new <= view.num_blocks * view.block_size

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose who has generated least, of equals the longest prompt."""
        loser = min(candidates, key=lambda state: (state.num_output_tokens, -state.num_tokens, -state.order))
        stay = [state for state in view.running if state is not loser]
        generated = sum(state.num_output_tokens + 20 for state in stay)
        self.share = min(1.0, generated / (1 + sum(state.max_tokens for state in stay)))
        return loser
