"""Whether a request can be served at all."""

from cbresearch.config import SchedulerConfig
from cbresearch.kv import KVManager
from cbresearch.request import Request


def check_request(request: Request, limits: SchedulerConfig, kv: KVManager) -> None:
    """Reject a request that can never be served within the limits: what is accepted can finish alone.

    Raises:
        ValueError: What it needs, what there is, and the remedy.
    """
    if request.sampling.n != 1:
        raise ValueError(
            f"request {request.id!r} wants {request.sampling.n} answers; a scheduler serves one for each "
            "request: submit those that parallel_samples(request) returns"
        )
    asked = f"request {request.id!r}: prompt {request.num_prompt_tokens} + max_tokens {request.max_tokens}"
    num_tokens = request.num_prompt_tokens + request.max_tokens
    if limits.max_model_len is not None and num_tokens > limits.max_model_len:
        raise ValueError(
            f"{asked} = {num_tokens} tokens, over the model's length of {limits.max_model_len}; "
            "shorten the prompt or lower max_tokens"
        )
    budget = limits.max_num_batched_tokens
    if not limits.chunked_prefill and num_tokens - 1 > budget:
        raise ValueError(
            f"{asked} could need {num_tokens - 1} tokens computed in one step, over the token "
            f"budget of {budget}; raise max_num_batched_tokens, lower max_tokens, or turn on chunked_prefill"
        )
    needed = kv.max_blocks_needed(request)
    if needed > kv.num_blocks:
        cache = kv.config
        raise ValueError(
            f"{asked} needs KV for {num_tokens - 1} tokens = {needed} blocks of "
            f"{cache.block_size}, but the pool has {cache.num_blocks} ({cache.num_tokens} tokens); raise "
            "num_blocks or lower max_tokens"
        )
