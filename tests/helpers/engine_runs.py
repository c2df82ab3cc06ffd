"""Serving on a real model with every rule checked, and the greedy answers that it has to give."""

import math

from cbresearch import policies
from cbresearch.engine import ModelExecutor
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

POLICIES = ("static", "static:release", "fcfs", "prefill_first", "sjf", "vllm_v1", "vllm_v1:priority")


def run(loaded, requests, policy, limits, cache, executor=None, **options):
    """Serve on a pool full of NaN, with every invariant checked after every step.

    Args:
        loaded: The model.
        requests: The requests.
        policy: The policy's name.
        limits: The limits of a step.
        cache: The pool.
        executor: One that is there already, on such a pool.
        **options: For a new one.
    """
    scheduler = Scheduler(policies.get(policy), limits, cache)
    executor = executor or ModelExecutor(loaded, limits, cache, fill=math.nan, **options)
    trace = serve(requests, scheduler, executor, on_step=lambda record: scheduler.check())
    assert scheduler.kv.num_free_blocks == cache.num_blocks
    return trace


def least_pool(requests, block_size):
    """Return the fewest blocks with which every request can finish alone."""
    return max(-(-(request.num_prompt_tokens + request.max_tokens - 1) // block_size) for request in requests)


def assert_served_as_alone(loaded, trace, expected, gap):
    for record in trace.requests:
        assert record.error is None
        want, prompt = expected[record.id]
        if record.tokens != want:
            place = next(
                (n for n, pair in enumerate(zip(record.tokens, want, strict=False)) if pair[0] != pair[1]),
                min(len(record.tokens), len(want)),
            )
            before = (*prompt, *want[:place])
            raise AssertionError(
                f"{record.id} under {trace.policy}, {trace.scheduler}, {trace.cache} differs from generate "
                f"at token {place}; the two best logits there are {gap(loaded.model, before):.3g} apart"
            )
