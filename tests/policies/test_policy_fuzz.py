"""Every policy ends random workloads in tiny pools; `python tests/fuzz_policies.py 100` does it at length."""

import os

import pytest
from fuzz_policies import POLICIES, cells, run

NUM_WORKLOADS = int(os.environ.get("CBRESEARCH_FUZZ", "3"))
NEVER_PREEMPT = {"no_evict", "orca"}
SELDOM_PREEMPT = {"new_token_ratio", "orca:reserve=pow2", "past_future"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_or_rejects_each_request_of_random_workloads(policy):
    num_preemptions = num_swaps = 0
    for cell in cells(policy):
        for seed in range(NUM_WORKLOADS):
            trace = run(cell, seed)
            num_preemptions += sum(record.num_preemptions for record in trace.served)
            num_swaps += sum(len(step.plan.swapped) for step in trace.steps)
    if policy in NEVER_PREEMPT:
        assert num_preemptions == 0
    elif policy not in SELDOM_PREEMPT:
        assert num_preemptions > 0, "pools too large to try preemption"
        assert num_swaps > 0, "host pools too small to try swaps"
