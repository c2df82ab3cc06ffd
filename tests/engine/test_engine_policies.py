"""Every policy on a real model, in pools that preempt: the tokens are those of each prompt alone."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.engine_runs import least_pool, run

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request

VARIANTS = (
    "static:release",
    "vllm_v0:swap",
    "vllm_v1:priority",
    "orca:reserve=oracle",
    "least_slack:relative",
)
# These reserve what a request may need, or nearly so.
SELDOM_PREEMPT = {"no_evict", "orca", "new_token_ratio", "past_future", "mc_sf", "orca:reserve=oracle"}


def case(answers, seed, mode):
    """Draw requests of several clients, priorities, deadlines and predictions, and a pool for few of them."""
    rng = np.random.default_rng(seed)
    expected, requests = {}, []
    for place in range(6):
        answer = answers[int(rng.integers(4, len(answers)))]
        max_tokens = int(rng.integers(4, 13))
        requests.append(
            Request(
                f"r{place}",
                answer.prompt,
                max_tokens,
                arrival=float(rng.choice([0.0, rng.random() / 20])),
                client=f"c{place % 2}",
                priority=int(rng.integers(3)),
                deadline=float(rng.random()),
                predicted_output=int(rng.integers(1, 13)),
            )
        )
        expected[f"r{place}"] = answer.continuation[:max_tokens]
    block_size = int(rng.choice([1, 3, 16]))
    limits = SchedulerConfig(int(rng.integers(3, 6)), int(rng.choice([9, 64, 2048])), preemption=mode)
    pool = least_pool(requests, block_size) + int(rng.integers(2))
    if seed % 3 == 0:
        limits = replace(limits, max_num_batched_tokens=2048, chunked_prefill=False)
    host = 2 * pool if mode == "swap" else 0
    return requests, expected, limits, CacheConfig(pool, block_size, bool(seed % 2), num_host_blocks=host)


@pytest.mark.parametrize("policy", (*policies.available(), *VARIANTS))
def test_tokens_equal_those_of_the_prompt_alone_under_any_policy(policy, tiny, alone):
    num_preemptions = 0
    for seed, mode in enumerate(("recompute", "swap", "swap", "recompute")):
        requests, expected, limits, cache = case(alone, seed, mode)
        trace = run(tiny, requests, policy, limits, cache)
        assert trace.outputs == expected, (mode, limits, cache)
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
    assert num_preemptions > 0 or policy in SELDOM_PREEMPT
