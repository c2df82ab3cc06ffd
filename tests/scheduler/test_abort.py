"""An abort ends a request wherever it is, in the middle of a step too, and the others go on."""

import pytest
from helpers.core import (
    POLICIES,
    answer_of,
    assert_whole,
    distinct,
    extended,
    given_limits,
    next_token,
    prompt_ids,
)

from cbresearch import policies
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.step import StepResult
from cbresearch.trace import StepRecord


class Run:
    """A scheduler that is driven step by step, with tokens as a prompt gives them."""

    def __init__(self, requests, policy="fcfs", **options):
        options = {"num_blocks": 30, "block_size": 4, "num_host_blocks": 30, **options}
        self.scheduler = Scheduler(policies.get(policy), *given_limits(**options))
        self.states = {request.id: self.scheduler.submit(request) for request in requests}
        self.now = 0.0

    def step(self, during=None):
        """Take a step; `during` is called while it is computed."""
        plan = self.scheduler.schedule(self.now)
        self.now += 1.0
        tokens = {}
        for entry in plan.scheduled:
            if entry.samples:
                state = self.states[entry.request_id]
                tokens[entry.request_id] = next_token(
                    extended((), (*prompt_ids(state), *state.output_token_ids))
                )
        if during is not None:
            during(plan)
            self.scheduler.check()
        committed = self.scheduler.commit(plan, StepResult(1.0, tokens), self.now)
        self.scheduler.check()
        return plan, committed

    def finish(self):
        while self.scheduler.has_work:
            self.step()
        assert_whole(self.scheduler)
        for state in self.states.values():
            answer = answer_of(state.request)
            output = tuple(state.output_token_ids)
            assert output == (answer[: len(output)] if state.finish_reason == "abort" else answer)


def brought_to(status, run):
    """Bring request "a" to a state, and say what its status is called there."""
    if status == "waiting":
        return
    run.step()
    if status == "decoding":
        run.step()
        run.step()
    elif status in ("preempted", "swapped"):
        run.scheduler.preempt("a", "swap" if status == "swapped" else "recompute")
    elif status == "swapped and planned":
        run.scheduler.preempt("a", "swap")
        run.scheduler.preempt("b", "swap")


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "status", ["waiting", "in its prompt", "decoding", "preempted", "swapped", "swapped and planned"]
)
def test_an_abort_gives_back_the_blocks_of_both_pools_whatever_the_request_was_doing(status, caching):
    budget = 7 if status == "in its prompt" else 2048
    run = Run(
        [Request("a", distinct(10, 9), 12), Request("b", distinct(50, 6), 12)],
        budget=budget,
        prefix_caching=caching,
    )
    brought_to(status, run)
    generated = list(run.states["a"].output_token_ids)
    state = run.scheduler.abort("a")
    run.scheduler.check()
    assert (state.finish_reason, state.status.value, state.output_token_ids) == (
        "abort",
        "finished",
        generated,
    )
    pool = run.scheduler.kv
    assert pool.table("a") == pool.host_table("a") == ()
    assert pool.num_held_blocks == len(pool.table("b"))
    assert pool.num_held_host_blocks == len(pool.host_table("b"))
    with pytest.raises(ValueError, match="'a' is finished"):
        run.scheduler.abort("a")
    with pytest.raises(ValueError, match="'c' is unknown"):
        run.scheduler.abort("c")
    run.finish()
    assert len(run.states["b"].output_token_ids) == 12
    assert run.states["a"].output_token_ids == generated


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", range(4))
def test_an_abort_of_all_requests_leaves_an_empty_pool_that_serves_the_next(policy, step):
    requests = [Request(f"r{n}", distinct(20 * n, 5), 2 + n) for n in range(3)]
    requests += parallel_samples(Request("s", distinct(100, 6), 5), 2)
    run = Run(requests, policy)
    for _ in range(step):
        run.step()
    for state in run.states.values():
        if state.finish_reason is None:
            run.scheduler.abort(state.id)
            run.scheduler.check()
    assert not run.scheduler.has_work
    assert_whole(run.scheduler)
    run.states["next"] = run.scheduler.submit(Request("next", distinct(70, 5), 4))
    run.finish()
    assert run.states["next"].finish_reason == "length"


def test_an_aborted_request_gives_its_room_to_one_that_waits():
    run = Run([Request("a", distinct(10, 12), 5), Request("b", distinct(50, 12), 5)], num_blocks=4)
    run.step()
    assert [state.id for state in run.scheduler.running] == ["a"]
    run.scheduler.abort("a")
    run.step()
    assert [state.id for state in run.scheduler.running] == ["b"]
    run.finish()


# --- in the middle of a step


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, "vllm_v1"])
@pytest.mark.parametrize("step", range(5))
def test_commit_passes_over_a_request_that_was_aborted_during_its_step(policy, step, caching):
    requests = [Request(name, distinct(20 * n, 6), 3 + 2 * n) for n, name in enumerate("abc")]
    run = Run(requests, policy, budget=12, prefix_caching=caching, cache_on_schedule=caching)
    for _ in range(step):
        run.step()
    target = run.scheduler.running[0].id if run.scheduler.running else "a"
    generated = []

    def during(plan):
        state = run.scheduler.abort(target)
        assert (state.finish_reason, state.status.value) == ("abort", "finished")
        generated.extend(state.output_token_ids)

    plan, (pool, events, finished) = run.step(during)
    state = run.states[target]
    # The token that the step computed for it is dropped, and the record tells of the others alone.
    assert state.output_token_ids == generated
    assert state.num_computed_tokens == 0 or state.num_computed_tokens < state.num_tokens
    assert state not in finished
    assert target not in {other.id for other in run.scheduler.running}
    others = [entry.request_id for entry in plan.scheduled if entry.request_id != target]
    assert all(run.states[name].num_computed_tokens > 0 for name in others)
    assert pool.num_running == len(run.scheduler.running) + len(finished)
    if not run.scheduler.policy.pads_finished_rows:
        # Its blocks are whole: free or cached, none held.
        assert run.scheduler.kv.table(target) == ()
        assert set(events.freed) or not generated
    later, _ = run.step() if run.scheduler.has_work else (None, None)
    assert later is None or later.aborted == (target,)
    run.finish()


def test_an_abort_during_the_last_requests_step_leaves_an_empty_pool():
    run = Run([Request("a", distinct(10, 9), 5)], prefix_caching=True)
    run.step()
    _, (pool, events, finished) = run.step(lambda plan: run.scheduler.abort("a"))
    assert (pool.num_running, pool.num_held_blocks, finished) == (0, 0, ())
    assert len(events.freed) == 3
    assert_whole(run.scheduler)


def test_an_abort_of_every_request_during_a_step_in_every_step_never_stops_the_scheduler():
    run = Run([Request(f"r{n}", distinct(20 * n, 5), 9) for n in range(12)], budget=7, seats=3, num_blocks=9)
    while run.scheduler.has_work:
        run.step(lambda plan: [run.scheduler.abort(entry.request_id) for entry in plan.scheduled[:1]])
    run.finish()
    assert {state.finish_reason for state in run.states.values()} <= {"abort", "length"}


def test_a_request_that_was_aborted_can_be_forgotten_and_its_id_given_anew():
    run = Run([Request("a", distinct(10, 5), 5), Request("b", distinct(40, 5), 5)])
    run.step(lambda plan: run.scheduler.abort("a"))
    with pytest.raises(ValueError, match="'b' is not finished"):
        run.scheduler.forget("b")
    run.scheduler.forget("a")
    run.states["a"] = run.scheduler.submit(Request("a", distinct(70, 5), 2))
    run.finish()
    assert run.states["a"].finish_reason == "length"


def test_an_abort_in_its_first_step_leaves_no_padding_row():
    run = Run([Request("a", distinct(10, 9), 12), Request("b", distinct(50, 6), 12)], "static")
    run.step(during=lambda plan: run.scheduler.abort("a"))
    plan, _ = run.step(during=lambda plan: run.scheduler.abort("b"))
    assert plan.padding == () and [entry.request_id for entry in plan.scheduled] == ["b"]
    assert_whole(run.scheduler)


def test_an_abort_while_a_step_runs_is_no_request_that_it_skipped():
    run = Run([Request("a", distinct(10, 9), 12), Request("b", distinct(50, 6), 12)])
    plan, (pool, events, _) = run.step(during=lambda plan: run.scheduler.abort("a"))
    assert not any(StepRecord(0.0, 1.0, plan, (), pool, events).num_skipped().values())
