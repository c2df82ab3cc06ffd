"""Who can be served at all, and who makes room for whom."""

from collections.abc import Sequence

from cbresearch.blocks import BlockManager
from cbresearch.config import SchedulerConfig
from cbresearch.policies import Policy, View
from cbresearch.request import Request, RequestState
from cbresearch.reservation import ReservationManager


def check_request(
    request: Request, limits: SchedulerConfig, blocks: BlockManager | ReservationManager
) -> None:
    """Refuse a request that can never be served within the limits: what is accepted can finish alone.

    Raises:
        ValueError: What it needs, what there is, and the remedy.
    """
    if request.sampling.n != 1:
        raise ValueError(
            f"request {request.id!r} wants {request.sampling.n} answers; a scheduler serves one for each "
            "request: submit those that parallel_samples(request) returns"
        )
    num_tokens = request.num_prompt_tokens + request.max_tokens
    if limits.max_model_len is not None and num_tokens > limits.max_model_len:
        raise ValueError(
            f"{_asked(request)} = {num_tokens} tokens, over the model's length of {limits.max_model_len}; "
            "shorten the prompt or lower max_tokens"
        )
    budget = limits.max_num_batched_tokens
    if not limits.chunked_prefill and num_tokens - 1 > budget:
        raise ValueError(
            f"{_asked(request)} could need {num_tokens - 1} tokens computed in one step, over the token "
            f"budget of {budget}; raise max_num_batched_tokens, lower max_tokens, or turn on chunked_prefill"
        )
    needed = blocks.expect(request)
    if needed > blocks.num_blocks:
        cache = blocks.config
        raise ValueError(
            f"{_asked(request)} needs KV for {num_tokens - 1} tokens = {needed} blocks of "
            f"{cache.block_size}, but the pool has {cache.num_blocks} ({cache.num_tokens} tokens); raise "
            "num_blocks or lower max_tokens"
        )


def _asked(request: Request) -> str:
    return f"request {request.id!r}: prompt {request.num_prompt_tokens} + max_tokens {request.max_tokens}"


def choose_losers(
    policy: Policy,
    view: View,
    newcomer: RequestState,
    candidates: list[RequestState],
    blocks: BlockManager | ReservationManager,
    num_free_seats: int,
) -> Sequence[RequestState]:
    """Return the running requests that make room for a newcomer, nobody if all of them were not enough.

    Raises:
        ValueError: The policy chose somebody else than a candidate.
    """
    num_free_blocks, num_wanted = blocks.num_free_blocks, blocks.blocks_for(newcomer.num_tokens)
    losers: list[RequestState] = []
    while not num_free_seats or num_wanted > num_free_blocks:
        loser = policy.displace(view, newcomer, candidates)
        if loser is None:
            return ()
        if loser not in candidates:
            raise ValueError(
                f"policy {policy.name!r} displaces {loser}; choose one of the candidates, or None"
            )
        candidates.remove(loser)
        losers.append(loser)
        num_free_seats += 1
        num_free_blocks += blocks.num_private_blocks(loser.id)
    return losers


def farthest_sibling(state: RequestState, running: Sequence[RequestState]) -> RequestState | None:
    """Return the parallel sample of the same prompt that has come farthest, if one runs."""
    request = state.request
    siblings = [
        other
        for other in running
        if other.request.group == request.group
        and other.request.prompt == request.prompt
        and other.request.cache_salt == request.cache_salt
    ]
    return max(siblings, key=lambda other: other.num_computed_tokens, default=None)
