"""Random schedules on a small model; `python tests/fuzz_engine.py 10000` serves them at length."""

from collections import Counter

import pytest
from fuzz_engine import EVENTS, groups, run_together

from cbresearch import policies

NUM_SCHEDULES = 300
NUM_SHARDS = 2
SHARD = NUM_SCHEDULES // NUM_SHARDS


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_every_answer_is_that_of_its_prompt_alone_whatever_else_happens(shard):
    counts: Counter[str] = Counter()
    for seeds in groups(range(shard * SHARD, (shard + 1) * SHARD)):
        counts += run_together(seeds)
    missing = [event for event in EVENTS if not counts[event]]
    assert not missing, "schedules in which these never happen prove nothing about them"
    served = {name.partition(":")[0] for name in counts if name.startswith("answers under ")}
    unserved = {f"answers under {policy}" for policy in policies.available()} - served
    assert not unserved, "some policies answered nobody"
