"""The mechanism: what is accepted, seats and budget, and the proof of its invariants."""

import random
import re
from collections import Counter

import pytest
from helpers.core import POLICIES, STRESS, admitted, answer_of, serve_refereed, served

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies
from cbresearch.request import RequestStatus
from cbresearch.simulator import UNIT_STEP, CostExecutor

BLOCK_SIZES = [1, 3, 16]


def run(requests, policy="fcfs", **options):
    return serve_refereed(requests, policy, **{"budget": 64, "num_blocks": 64, **options})[0]


# --- any situation


NUM_SITUATIONS = 100


def situation(seed):
    """Draw requests, and limits that are mostly tight: a pool for the largest request and little more."""
    generator = random.Random(seed)
    block_size = generator.choice(BLOCK_SIZES)
    requests = [
        Request(
            id=name,
            prompt=generator.randint(1, 20),
            max_tokens=generator.randint(1, 12),
            arrival=generator.choice((0.0, 0.0, 0.5, 3.0, 11.0)),
            predicted_output=generator.choice((None, generator.randint(1, 12))),
            output_length=generator.choice((None, generator.randint(1, 12))),
        )
        for name in "abcdefgh"[: generator.randint(1, 8)]
    ]
    needed = sorted(request.num_prompt_tokens + request.max_tokens - 1 for request in requests)
    # Now and then the largest does not fit.
    capacity = generator.choice(needed[-2:]) + generator.choice((0, 0, generator.randint(0, 30)))
    limits = {
        "seats": generator.randint(1, 5),
        "budget": generator.choice((1, 2, 4, 7, 64)),
        "num_blocks": -(-capacity // block_size),
        "block_size": block_size,
    }
    return requests, limits


@pytest.mark.parametrize("policy", STRESS)
def test_scheduler_finishes_every_accepted_request_within_the_limits_and_gives_back_the_pool(policy):
    seen: Counter[str] = Counter()
    for seed in range(NUM_SITUATIONS):
        requests, limits = situation(seed)
        try:
            trace = run(requests, STRESS[policy](seed), **limits)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        plans = [step.plan for step in trace.steps]
        seen["preempted"] += any(plan.preempted for plan in plans)
        seen["rejected"] += any(record.error for record in trace.requests)
        seen["padded"] += any(plan.padding for plan in plans)
        seen["chunked"] += any(not entry.samples for plan in plans for entry in plan.scheduled)
    assert min(seen["preempted"], seen["rejected"], seen["chunked"]) > NUM_SITUATIONS // 10
    assert (seen["padded"] > NUM_SITUATIONS // 10) == STRESS[policy](0).pads_finished_rows


# --- what fits and what is rejected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_request_that_fills_the_pool_but_for_its_last_token_runs_and_a_longer_one_is_rejected(
    policy, block_size, num_blocks
):
    capacity = num_blocks * block_size
    for needed in (capacity - 1, capacity, capacity + 1):
        for max_tokens in range(1, needed + 1):
            prompt = needed - max_tokens + 1
            trace = run(
                [Request("a", prompt, max_tokens)], policy, num_blocks=num_blocks, block_size=block_size
            )
            (record,) = trace.requests
            if needed <= capacity:
                assert record.error is None
                assert record.num_preemptions == 0
                assert trace.steps[-1].num_held_blocks == len(range(0, needed, block_size))
            else:
                numbers = {int(number) for number in re.findall(r"\d+", record.error)}
                assert {prompt, max_tokens, needed, num_blocks, block_size, capacity} <= numbers
                assert "'a'" in record.error
                assert "num_blocks" in record.error


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_can_never_fit_holds_up_no_other(policy):
    trace = run([Request("a", 20, 1), Request("b", 4, 5)], policy, num_blocks=4, block_size=4)
    assert "'a'" in trace.requests[0].error
    assert trace.requests[1].finish_reason == "length"


@pytest.mark.parametrize("prompt", [1, 6])
def test_a_request_may_be_as_long_as_max_model_len_and_no_longer(prompt):
    longest = 8
    requests = [
        Request(name, prompt, length - prompt)
        for name, length in (
            ("below", longest - 1),
            ("at", longest),
            ("over", longest + 1),
            ("next", longest),
        )
    ]
    trace = run(requests, max_model_len=longest)
    errors = {record.id: record.error for record in trace.requests}
    assert [name for name, error in errors.items() if error] == ["over"]
    numbers = {int(number) for number in re.findall(r"\d+", errors["over"])}
    assert {prompt, longest + 1 - prompt, longest + 1, longest} <= numbers


@pytest.mark.parametrize("policy", POLICIES)
def test_submit_rejects_an_id_that_is_taken_even_by_a_finished_request(policy):
    requests = [
        Request("a", 2, 2),
        Request("a", 3, 3),
        Request("b", 1, 5),
        Request("a", 1, 1, arrival=50.0),
        Request("c", 1, 1, arrival=50.0),
    ]
    trace = run(requests, policy)
    assert [record.error is None for record in trace.requests] == [True, False, True, False, True]
    assert all(
        "'a'" in error and "taken" in error for error in (trace.requests[1].error, trace.requests[3].error)
    )


def test_submit_changes_nothing_where_it_rejects_and_leaves_the_id_free():
    scheduler = Scheduler(Policy(), SchedulerConfig(2, 8, max_model_len=6), CacheConfig(4, 1))
    for prompt, max_tokens in ((5, 2), (4, 2), (10**30, 10**30)):
        with pytest.raises(ValueError, match="request 'a'"):
            scheduler.submit(Request("a", prompt, max_tokens))
        assert not scheduler.has_work
        assert scheduler.num_submitted == 0
        scheduler.check()
    assert scheduler.submit(Request("a", 2, 2)).order == 0


def test_a_rejection_and_the_tokens_of_the_same_step_are_both_reported():
    trace = run([Request("a", 1, 4), Request("b", 99, 1, arrival=2.0)], num_blocks=8)
    assert trace.requests[0].tokens == answer_of(Request("a", 1, 4))
    assert "'b'" in trace.requests[1].error


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_have_exactly_the_length_asked_for_and_a_finish_reason(policy):
    requests = [Request(str(length), 3, length) for length in range(1, 8)]
    requests += [Request(f"stop {length}", 3, 5, output_length=length) for length in range(1, 8)]
    trace = run(requests, policy, seats=3, num_blocks=24)
    assert [len(record.tokens) for record in trace.requests] == [*range(1, 8), 1, 2, 3, 4, 5, 5, 5]
    assert [record.finish_reason for record in trace.requests] == ["length"] * 7 + ["stop"] * 5 + [
        "length"
    ] * 2


# --- budget and seats


@pytest.mark.parametrize("policy", [*POLICIES, "erratic", "erratic, seats kept"])
def test_six_decodes_share_a_budget_of_four_and_all_finish(policy):
    trace = run([Request(name, 1, 5) for name in "abcdef"], STRESS[policy](0), budget=4)
    assert max(step.plan.num_tokens for step in trace.steps) == 4
    assert all(record.finish_reason == "length" for record in trace.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(policy):
    trace = run([Request("a", 12, 2)], policy, budget=8)
    assert served(trace) == ["a8", "a4", "a1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_admitted_while_every_seat_is_held(policy):
    trace = run([Request(name, 1, 3) for name in "abc"], policy, seats=1)
    assert admitted(trace) == ["a", "", "", "b", "", "", "c", "", ""]


def test_a_padding_row_counts_as_a_token_and_yields_to_the_budget():
    trace = run([Request("a", 1, 1), Request("b", 1, 2), Request("c", 1, 3)], "static", budget=2)
    assert served(trace) == ["a1 b1", "c1", "b1 c1", "c1"]
    # Beside two decodes the budget has no room for a's row, and beside one it has room for one of two.
    assert [len(step.plan.padding) for step in trace.steps][2:] == [0, 1]


def test_waiting_requests_that_a_policy_skips_use_up_no_seats():
    class Picky(Policy):
        """Serve capitals as long as there are any."""

        name = "picky"

        def propose(self, view):
            states = [*view.running, *view.waiting]
            capitals = [state for state in states if state.id.isupper()]
            return ((state, state.num_pending_tokens) for state in capitals or states)

    trace = run([Request(name, 1, 2) for name in "abcXYdZ"], Picky(), seats=2)
    assert admitted(trace) == ["XY", "", "Z", "", "ab", "", "cd", ""]


# --- the proof itself


def busy_scheduler():
    scheduler = Scheduler(policies.get("static"), SchedulerConfig(3, 16), CacheConfig(12, 2))
    for request in (Request("a", 2, 1), Request("b", 2, 5), Request("c", 3, 5), Request("d", 3, 5)):
        scheduler.submit(request)
    executor = CostExecutor(UNIT_STEP)
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, executor.execute(plan), 1.0)
    return scheduler


@pytest.mark.parametrize(
    "damage",
    [
        lambda scheduler: scheduler._free_seats.append(0),
        lambda scheduler: scheduler._running.pop(),
        lambda scheduler: scheduler._waiting.update(b=scheduler.running[0]),
        lambda scheduler: setattr(scheduler.running[0], "seat", scheduler.running[1].seat),
        lambda scheduler: setattr(scheduler.running[0], "status", RequestStatus.FINISHED),
        lambda scheduler: setattr(next(iter(scheduler.waiting)), "status", RequestStatus.RUNNING),
        lambda scheduler: scheduler.kv.allocate("d", 1),
        lambda scheduler: setattr(scheduler.running[0], "num_computed_tokens", 1),
        lambda scheduler: scheduler.kv._free.pop(),
    ],
    ids=[
        "a held seat is free",
        "a running request is lost",
        "a request is in two queues",
        "two requests share a seat",
        "a finished request runs",
        "a running request waits",
        "a waiting request holds blocks",
        "tokens are miscounted",
        "a block is lost",
    ],
)
def test_scheduler_check_notices_that(damage):
    scheduler = busy_scheduler()
    scheduler.check()
    damage(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()
