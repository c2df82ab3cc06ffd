"""`replan` plans each recorded step anew: equal on our own traces, and a planted difference is found."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fuzz_fast_forward import limits, workload
from fuzz_policies import POLICIES
from helpers.core import Meddler, distinct, random_case

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.costs import Linear
from cbresearch.experiments.simulation_error import predict_run
from cbresearch.request import Rejected
from cbresearch.serve import Loop, record_of, serve
from cbresearch.simulator import UNIT_STEP, CostExecutor, replan
from cbresearch.step import DecodeRun, StepResult
from cbresearch.trace import Origin, Trace, load

COST = Linear(0.3, 0.01, 0.0007)


class Aborting(Meddler):
    """Abort at random between steps; what preempts is the policy."""

    def __init__(self, seed):
        super().__init__(seed, rate=0.0, aborts=0.1)


def assert_equal_plans(trace, *args, **options):
    again = replan(trace, *args, **options)
    assert again.first_difference is None, again.first_difference
    assert again.num_equal == again.num_steps == len(trace.steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_replan_repeats_every_plan_of_every_policy(policy):
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng = np.random.default_rng(2000 + seed)
        requests = workload(rng)
        config, cache = limits(requests, rng)
        trace = simulate(requests, policy, cost=COST, scheduler=config, cache=cache)
        assert_equal_plans(trace, policy, COST.seconds)
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["swapped"] += sum(len(step.plan.swapped) for step in trace.steps)
        seen["decode runs"] += sum(isinstance(part, DecodeRun) for part in trace.parts)
    assert seen["preempted"] or policy in ("no_evict", "orca", "orca:reserve=pow2", "new_token_ratio")


@pytest.mark.parametrize("policy", ["fcfs", "static", "prefill_first", "sjf", "vllm_v1", "vllm_v0:swap"])
def test_replan_repeats_plans_with_aborts_swaps_windows_forks_and_hits(policy):
    seen: Counter[str] = Counter()
    for seed in range(30):
        requests, config, cache = random_case(seed, windows=(None, None, 3, 8))
        cache = replace(cache, cache_on_schedule=bool(seed % 2))
        scheduler, meddler = Scheduler(policies.get(policy), config, cache), Aborting(seed)
        trace = serve(
            requests,
            scheduler,
            CostExecutor(COST),
            on_step=lambda record, served=scheduler, meddler=meddler: meddler(served, record),
        )
        assert_equal_plans(trace, requests=requests)
        seen.update(meddler.num_aborted)
        seen["swapped"] += sum(len(step.plan.swapped) for step in trace.steps)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
    assert min(seen[name] for name in ("running", "waiting", "swapped", "cached")) > 0


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_replan_repeats_plans_of_contiguous_runs_with_aborts(reservation):
    for seed in range(10):
        requests, config, _ = random_case(seed)
        cache = CacheConfig(32, 4, reservation=reservation)
        scheduler = Scheduler(policies.get("fcfs"), replace(config, max_model_len=48), cache)
        meddler = Aborting(seed)
        trace = serve(
            requests,
            scheduler,
            CostExecutor(COST),
            on_step=lambda record, served=scheduler, meddler=meddler: meddler(served, record),
        )
        assert_equal_plans(trace)


def driven(requests, seed, **options):
    """Serve requests by hand and abort some while a step is computed, as a server on the wall clock does."""
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(4, 16), CacheConfig(40, 4, **options))
    loop, now, steps = Loop(scheduler, CostExecutor(COST)), 0.0, []
    states = [loop.submit(request, 0.0) for request in requests]
    while scheduler.has_work:
        plan = scheduler.schedule(now)
        result = loop.execute(plan)
        if rng.random() < 0.15:
            scheduler.abort(scheduler.running[int(rng.integers(len(scheduler.running)))].id)
        record, _ = loop.finish(plan, result, now)
        steps.append(record)
        now = record.end
    records = tuple(record_of(state.request, state) for state in states)
    return Trace("fcfs", scheduler.config, scheduler.kv.config, tuple(steps), records)


@pytest.mark.parametrize("caching", [False, True])
def test_replan_repeats_plans_of_a_run_with_aborts_in_the_middle_of_steps(caching):
    num_aborts = 0
    for seed in range(20):
        requests = [
            Request(str(n), distinct(100 * (n % 3), 5 + n), 20, output_length=7 + n) for n in range(10)
        ]
        trace = driven(requests, seed, prefix_caching=caching)
        num_aborts += sum(record.finish_reason == "abort" for record in trace.requests)
        assert_equal_plans(trace)
    assert num_aborts > 20


def test_replan_repeats_a_run_in_which_requests_fail_are_rejected_and_follow_others():
    class Failing(CostExecutor):
        def execute(self, plan):
            result = super().execute(plan)
            failed = {"b": "lost"} if "b" in result.tokens and plan.step > 5 else {}
            tokens = {name: token for name, token in result.tokens.items() if name not in failed}
            return StepResult(result.duration, tokens, result.stopped - failed.keys(), failed)

    def follow(record):
        return [Request(record.id + "+", 4, 9, arrival=record.finish + 0.2)] if record.id == "a" else []

    requests = [Request("a", 3, 9), Request("b", 5, 20), Rejected("x", "bad"), Request("c", 4, 9, 1.3)]
    requests += [Request("c", 1, 1, 2.0), Request("huge", 10_000, 1)]
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(3), CacheConfig(9, 4))
    trace = serve(requests, scheduler, Failing(COST), on_finish=follow)
    assert [record.finish_reason for record in trace.requests if record.id == "b"] == ["error"]
    assert len(trace.served) == 4
    assert_equal_plans(trace)


def test_replan_of_a_saved_trace_is_that_of_the_trace(tmp_path):
    requests, config, cache = random_case(7)
    trace = simulate(requests, "sjf", cost=COST, scheduler=config, cache=cache)
    assert_equal_plans(load(trace.save(tmp_path / "run.jsonl.gz")))


def test_replan_of_no_steps_has_nothing_to_tell():
    assert replan(simulate([])) == (0, 0, None)


# --- planted differences


def crowded():
    requests = [Request(str(n), 5 + n, 20, arrival=0.7 * n, priority=n % 3) for n in range(12)]
    return simulate(requests, "fcfs", cost=COST, scheduler=SchedulerConfig(4, 16), cache=CacheConfig(20, 4))


def with_plan(trace, place, **changes):
    steps = list(trace.steps)
    steps[place] = replace(steps[place], plan=replace(steps[place].plan, **changes))
    return replace(trace, steps=tuple(steps))


@pytest.mark.parametrize("place", [0, 7, 31])
def test_replan_finds_a_step_whose_plan_was_changed(place):
    trace = crowded()
    entries = list(trace.steps[place].plan.scheduled)
    entries[-1] = entries[-1]._replace(num_tokens=entries[-1].num_tokens + 1)
    changed = with_plan(trace, place, scheduled=tuple(entries))
    again = replan(changed)
    assert (again.num_steps, again.num_equal) == (len(trace.steps), len(trace.steps) - 1)
    difference = again.first_difference
    assert (difference.step, difference.reason) == (place, "scheduled")
    assert difference.recorded == changed.steps[place].plan
    assert difference.replanned == trace.steps[place].plan


@pytest.mark.parametrize(
    ("name", "value"),
    [("preempted", ("nobody",)), ("transfers", (("copy", 0, 1),)), ("closed", "chunk"), ("swapped", ("0",))],
)
def test_replan_names_the_field_of_a_plan_that_differs(name, value):
    difference = replan(with_plan(crowded(), 5, **{name: value})).first_difference
    assert (difference.step, difference.reason) == (5, name)


@pytest.mark.parametrize("policy", ["static", "prefill_first", "priority", "srpt", "vllm_v0:swap"])
def test_replan_by_another_policy_differs_first_where_that_policy_decides_otherwise(policy):
    trace = crowded()
    other = simulate(
        [Request(str(n), 5 + n, 20, arrival=0.7 * n, priority=n % 3) for n in range(12)],
        policy,
        cost=COST,
        scheduler=trace.scheduler,
        cache=trace.cache,
    )
    plans = zip(trace.steps, other.steps, strict=False)
    first = next(place for place, (one, two) in enumerate(plans) if one.plan != two.plan)
    again = replan(trace, policy)
    assert again.first_difference.step == first
    assert again.num_equal < again.num_steps
    assert again.first_difference.replanned == other.steps[first].plan


def test_replan_tells_of_a_policy_that_fails_and_of_steps_without_requests():
    class Silent(Policy):
        name = "silent"

        def propose(self, view):
            return iter(())

    trace = crowded()
    again = replan(trace, Silent())
    assert again.num_equal == 0
    assert again.first_difference.replanned is None
    assert "policy 'silent' left step 0 without work" in again.first_difference.reason
    nothing = replan(replace(trace, requests=()))
    assert nothing.first_difference[2:] == (None, "no request to plan for")


def test_replan_looks_ahead_only_with_the_step_time_of_the_run():
    cost = Linear(1.0, 1.0)
    requests = [
        Request("running", 1, 3),
        Request("short", 2, 2, arrival=1.0, deadline=50.0),
        Request("long", 30, 2, arrival=1.0, deadline=60.0),
    ]
    trace = simulate(requests, "least_slack", cost=cost, scheduler=SchedulerConfig(1))
    assert_equal_plans(trace, None, cost.seconds)
    assert replan(trace).first_difference.step > 0


def test_replan_of_another_engine_compares_decisions_and_not_block_ids():
    trace = replace(crowded(), origin=Origin("vllm", "0.32.0"))
    steps = []
    for step in trace.steps:
        entries = [
            entry._replace(seat=7, new_block_ids=tuple(block + 3 for block in entry.new_block_ids))
            for entry in step.plan.scheduled
        ]
        plan = replace(step.plan, scheduled=tuple(entries), skipped=(), closed=None)
        steps.append(replace(step, plan=plan))
    foreign = replace(trace, steps=tuple(steps))
    assert_equal_plans(foreign)
    place = next(place for place, step in enumerate(trace.steps) if len(step.plan.scheduled) > 1)
    entries = foreign.steps[place].plan.scheduled[::-1]
    difference = replan(with_plan(foreign, place, scheduled=entries)).first_difference
    assert (difference.step, difference.reason) == (place, "scheduled")
    difference = replan(with_plan(foreign, place, preempted=("3",))).first_difference
    assert (difference.step, difference.reason) == (place, "preempted")


@pytest.mark.parametrize("name", ["{}:Mine", "{}"])
def test_no_file_is_run_that_only_the_trace_names(name, tmp_path):
    file = tmp_path / "stranger.py"
    file.write_text("raise SystemExit('it ran')")
    trace = replace(crowded(), policy=name.format(file))
    for again in (replan, lambda trace: predict_run(trace, (), UNIT_STEP)):
        with pytest.raises(ValueError, match=rf"the trace names the policy '{re.escape(trace.policy)}'"):
            again(trace)
    assert replan(trace, "fcfs").first_difference is None
    with pytest.raises(ValueError, match="unknown policy 'nonesuch'"):
        replan(replace(trace, policy="nonesuch"))
