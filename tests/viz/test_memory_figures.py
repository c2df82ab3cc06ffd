"""The figures of KV memory hold what the trace says."""

import numpy as np
import pytest
from helpers.artists import area_steps, by_gid
from helpers.demo_runs import prefixed

from cbresearch import metrics, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.metrics import pool
from cbresearch.request import Request
from cbresearch.simulator import simulate

COST, LIMITS = Linear(step=0.003, token=0.0001), SchedulerConfig(5, 32)


def test_kv_memory_holds_blocks_tokens_pool_and_preemptions(preempting):
    trace = preempting["fcfs"]
    (ax,) = viz.kv_memory(trace, time="step").axes
    held, valid = [16 * r.num_held_blocks for r in trace.steps], [r.num_held_tokens for r in trace.steps]
    assert list(by_gid(ax, "held").get_ydata()[:-1]) == held
    assert [list(side) for side in area_steps(by_gid(ax, "valid"))] == [[0] * len(valid), valid]
    assert [list(side) for side in area_steps(by_gid(ax, "waste"))] == [valid, held]
    assert by_gid(ax, "pool").get_ydata()[0] == trace.cache.num_tokens
    assert len(by_gid(ax, "preempted").get_xdata()) == sum(bool(r.plan.preempted) for r in trace.steps)
    used = 100 * (1 - metrics.fragmentation(trace))
    assert ax.get_title("left") == f"fcfs: {used:.0f} % of held KV is in use, at most 12 of 12 blocks held"


def test_kv_memory_of_several_runs_is_a_panel_each(preempting):
    fig = viz.kv_memory(preempting)
    assert [ax.get_title("left").partition(":")[0] for ax in fig.axes] == list(preempting)
    assert fig.get_suptitle().startswith("Held KV in use: static ")


def test_kv_categories_are_those_of_the_trace_stacked_up_to_the_pool():
    trace = simulate(prefixed(), "fcfs", cost=COST, scheduler=LIMITS, cache=CacheConfig(24, 4, True))
    (ax,) = viz.kv_categories(trace, time="step").axes
    uses = list(pool.memory(trace))
    total = np.zeros(len(uses))
    for name in ("token_states", "reserved", "internal", "external", "cached", "free"):
        expected = [getattr(use, name) for use in uses]
        found = by_gid(ax, name)
        assert (found is None) == (not any(expected))
        if found is not None:
            low, high = area_steps(found)
            assert list(high - low) == expected
            total += high - low
    assert set(total) == {trace.cache.num_tokens} == {by_gid(ax, "pool").get_ydata()[0]}


def test_kv_categories_says_the_shares_that_the_metrics_give():
    trace = simulate(prefixed(), "fcfs", cost=COST, scheduler=LIMITS, cache=CacheConfig(24, 4))
    fig = viz.kv_categories({"mine": trace, "again": trace})
    used = metrics.memory_shares(trace)["token_states"]
    assert all(f"{100 * used:.0f} % in use" in ax.get_title("left") for ax in fig.axes)


@pytest.mark.parametrize("draw", [viz.kv_categories, viz.kv_memory])
def test_a_pool_far_larger_than_needed_is_cut_and_says_so(draw):
    trace = simulate([Request("a", 4, 6)], "fcfs", cache=CacheConfig(1000, 4))
    (ax,) = draw(trace).axes
    needed = max(trace.cache.num_tokens - use.free for use in pool.memory(trace))
    assert needed < ax.get_ylim()[1] < 2 * needed
    assert [text.get_text() for text in ax.texts] == ["pool\n4,000 ↑"]
