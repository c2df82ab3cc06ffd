"""Preemption: which request loses its seat, what it keeps, when it comes back, and that it ends."""

import itertools

import pytest
from helpers.core import (
    POLICIES,
    STRESS,
    Chunked,
    Meddler,
    Scripted,
    Selfless,
    admission_order,
    admitted,
    answer_of,
    distinct,
    preempted,
    preempting,
    random_case,
    serve_refereed,
    served,
)

from cbresearch import Policy, Request, policies

BLOCK_SIZES = [1, 3, 16]
MODES = ("recompute", "swap")


def run(requests, policy="fcfs", **options):
    return serve_refereed(requests, policy, **{"budget": 64, "num_blocks": 64, **options})[0]


# --- blocks run out


@pytest.mark.parametrize("policy", [*POLICIES, "chunked", "oldest leaves", "selfless"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_chunk_blocks", [1, 2, 99])
def test_two_prompts_that_do_not_fit_together_both_finish_after_few_preemptions(
    policy, block_size, num_chunk_blocks
):
    requests = [Request(name, 6 * block_size, 2) for name in "ab"]
    trace = run(
        requests,
        STRESS[policy](1),
        budget=num_chunk_blocks * block_size,
        num_blocks=8,
        block_size=block_size,
    )
    assert sum(record.num_preemptions for record in trace.requests) <= 2
    # Each prompt is computed in full once, and thrown away at most once.
    assert len(trace.steps) <= 2 * (2 * 6 + 2)


def test_prompts_begun_together_leave_the_earlier_one_to_finish_first():
    trace = run([Request(name, 6, 1) for name in "ab"], Chunked(), num_blocks=8)
    assert [record.num_preemptions for record in trace.requests] == [0, 1]
    assert trace.requests[1].num_recomputed_tokens == 4
    assert served(trace) == ["a1 b1"] * 4 + ["a1"] * 2 + ["b1"] * 6


def test_a_victim_that_was_scheduled_already_leaves_the_plan_and_gives_back_its_budget():
    policy = Scripted("a b", "c", "c a b")
    trace = run([Request(name, 1, 3) for name in "abc"], policy, budget=2, num_blocks=4)
    assert served(trace)[:3] == ["a1 b1", "c1", "a1 b1"]
    assert preempted(trace)[:3] == ["", "", "c"]


def test_a_victim_that_was_admitted_in_the_same_step_counts_as_never_admitted():
    policy = Scripted("a b", "c a b")
    trace = run([Request(name, 1, 3) for name in "abc"], policy, budget=3, num_blocks=4)
    assert served(trace)[:2] == ["a1 b1", "a1 b1"]
    assert (admitted(trace)[1], preempted(trace)[1]) == ("", "")
    last = trace.requests[2]
    assert (last.num_preemptions, last.num_recomputed_tokens) == (0, 0)
    assert last.first_scheduled == min(
        step.start for step in trace.steps if "c" in [entry.request_id for entry in step.plan.scheduled]
    )


def test_a_victim_does_not_come_back_in_the_step_that_took_its_seat():
    policy = Scripted("a2 b2", "a b b a")
    trace = run([Request("a", 2, 3), Request("b", 2, 3)], policy, num_blocks=5)
    assert served(trace)[1] == "a1"
    assert preempted(trace)[1] == "b"


def test_a_preempted_request_returns_to_the_front_and_keeps_its_tokens():
    requests = [Request("a", 2, 4), Request("b", 2, 4), Request("c", 1, 1)]
    trace = run(requests, seats=2, num_blocks=6)
    step = next(step.plan.step for step in trace.steps if step.plan.preempted)
    assert preempted(trace)[step] == "b"
    assert "".join(admitted(trace)) == "abbc"
    (again,) = [
        entry for record in trace.steps[step:] for entry in record.plan.admitted if entry.request.id == "b"
    ]
    before = sum(time <= trace.steps[step].start for time in trace.requests[1].token_times)
    assert before > 0
    assert again.output_token_ids == answer_of(requests[1])[:before]
    assert trace.requests[1].num_recomputed_tokens == 2 + before - 1


def test_requests_preempted_together_return_in_the_order_of_their_admission():
    policy = Scripted("a1 b1 c1 d1", "a9")
    requests = [
        Request("a", 6, 1),
        Request("b", 2, 1),
        Request("c", 2, 1),
        Request("d", 2, 1),
        Request("e", 1, 1),
    ]
    trace = run(requests, policy, num_blocks=7)
    assert preempted(trace)[1] == "cd"
    assert "".join(admitted(trace)) == "abcdcde"


def test_no_request_is_admitted_in_a_step_that_preempts():
    # In the second step b's blocks become free for a, and would do for c as well.
    policy = Scripted("a2 b4", "a b c")
    trace = run([Request("a", 2, 3), Request("b", 4, 3), Request("c", 1, 1)], policy, num_blocks=6)
    assert preempted(trace)[1] == "b"
    assert served(trace)[1] == "a1"


def test_a_request_preempted_beside_and_at_a_block_edge_gets_the_same_tokens():
    block_size, lengths = 3, set()
    for prompt, num_blocks in itertools.product(range(1, 8), range(5, 9)):
        requests = [Request("a", 3, 12), Request("b", prompt, 8)]
        trace = run(requests, num_blocks=num_blocks, block_size=block_size)
        for step in trace.steps:
            for name in step.plan.preempted:
                (record,) = [record for record in trace.requests if record.id == name]
                generated = sum(time <= step.start for time in record.token_times)
                lengths.add((record.num_prompt_tokens + generated) % block_size)
    assert lengths == set(range(block_size))


def test_the_request_that_needs_blocks_may_be_the_victim_and_the_others_go_on():
    trace = run([Request(name, 3, 6) for name in "abc"], Selfless(), num_blocks=12)
    assert any(preempted(trace))
    for step in trace.steps:
        names = {entry.request_id for entry in step.plan.scheduled}
        assert not names & set(step.plan.preempted)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_finishing_at_a_block_edge_in_a_full_pool_needs_no_block(block_size):
    requests = [Request(name, block_size, block_size + 1) for name in "ab"]
    trace = run(requests, num_blocks=4, block_size=block_size)
    assert not any(preempted(trace))
    assert max(step.num_held_blocks for step in trace.steps) == 4
    assert len(trace.steps) == block_size + 1


def test_padding_rows_give_way_before_a_request_loses_work():
    requests = [Request("a", 4, 1), Request("b", 2, 6)]
    trace = run(requests, "static", num_blocks=7)
    assert not any(preempted(trace))
    padding = [len(step.plan.padding) for step in trace.steps]
    # Six blocks serve both prompts, the seventh the first decode; then a's four blocks are needed.
    assert padding == [0, 1, 0, 0, 0, 0]


def test_a_static_batch_that_preempted_takes_the_victim_into_its_next_batch():
    trace = run([Request(name, 3, 5) for name in "ab"], "static", num_blocks=10)
    assert [record.num_preemptions for record in trace.requests] == [0, 1]
    assert "".join(admitted(trace)) == "abb"
    first_done = next(step.plan.step for step in trace.steps if "a" in step.finished)
    assert admitted(trace)[first_done + 1] == "b"


def test_a_victim_of_low_priority_that_was_scheduled_already_leaves_the_plan_with_its_budget():
    # "low" came first and is first in the step; "high" then needs the block that low has just taken.
    requests = [Request("low", 3, 6, priority=5), Request("high", 3, 6, priority=0)]
    trace = run(requests, "vllm_v1:priority", num_blocks=9)
    step = next(step for step in trace.steps if step.plan.preempted)
    assert step.plan.preempted == ("low",)
    assert [entry.request_id for entry in step.plan.scheduled] == ["high"]
    assert step.plan.num_tokens == 1
    assert step.num_running + step.num_waiting == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority", "vllm_v1", "vllm_v1:priority", "vllm_v0", "sarathi"])
def test_a_preempted_request_comes_back_before_one_of_its_rank_that_never_ran(policy):
    requests = [Request("a", 4, 8), Request("b", 4, 8), Request("new", 1, 2, arrival=1.5)]
    trace = run(requests, policy, num_blocks=14, seats=2)
    assert [name for step in trace.steps for name in step.plan.preempted] == ["b"]
    assert admission_order(trace) == ["a", "b", "b", "new"]


def test_several_victims_of_one_step_all_leave_and_all_come_back():
    requests = [Request("large", 12, 5), *(Request(name, 2, 12) for name in "bcd")]

    class Hungry(Policy):
        """Compute the large prompt bit by bit, and the others' first."""

        name = "hungry"

        def propose(self, view):
            for state in [*view.running, *view.swapped, *view.waiting]:
                few = (
                    1
                    if state.is_prefill and state.id == "large" and view.now < 2
                    else state.num_pending_tokens
                )
                yield state, few

    for mode, host in (("recompute", 0), ("swap", 2), ("swap", 50)):
        trace = run(requests, Hungry(), num_blocks=16, preemption=mode, num_host_blocks=host)
        assert max(len(step.plan.preempted) for step in trace.steps) >= 2
        assert all(record.finish_reason == "length" for record in trace.requests)


# --- a preemption that is forced


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_preemption_at_any_length_changes_no_token_and_drops_none(mode, block_size):
    # Beside a block's edge, at it, and behind it; in the prompt and while decoding.
    for length in (block_size, block_size + 1, 2 * block_size - 1 or 1, 2 * block_size):
        for budget in (2, 2048):
            for step in range(12):
                requests = [Request("a", distinct(10, length), 6), Request("b", distinct(50, 3), 9)]
                trace = run(
                    requests,
                    seats=4,
                    budget=budget,
                    num_blocks=40,
                    num_host_blocks=40,
                    block_size=block_size,
                    between=preempting("a", {step}, mode),
                )
                record = trace.requests[0]
                assert len(record.tokens) == 6
                assert record.finish_reason == "length"
                if mode == "swap":
                    assert record.num_recomputed_tokens == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_a_preemption_after_every_step_still_comes_to_an_end_with_the_same_tokens(mode, caching):
    requests = [Request("a", distinct(10, 9), 6), Request("b", distinct(50, 3), 4)]
    options = {"block_size": 4, "prefix_caching": caching, "num_host_blocks": 40}
    trace = run(requests, between=preempting("a", range(100), mode), **options)
    assert trace.requests[0].num_preemptions == 5
    assert len(trace.steps) == 6


@pytest.mark.parametrize("mode", MODES)
def test_prompt_and_answer_stay_apart_when_a_request_is_resumed(mode):
    trace = run(
        [Request("a", distinct(10, 5), 8)],
        block_size=4,
        num_host_blocks=20,
        between=preempting("a", {1, 4}, mode),
    )
    record = trace.requests[0]
    admissions = [admission for step in trace.steps for admission in step.plan.admitted]
    assert [admission.request.prompt for admission in admissions] == [distinct(10, 5)] * 3
    assert [admission.output_token_ids for admission in admissions] == [
        (),
        record.tokens[:2],
        record.tokens[:5],
    ]
    assert record.num_prompt_tokens == 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", range(6))
def test_an_answer_ends_where_it_ends_without_a_preemption_for_the_same_reason(mode, step):
    requests = [Request("stops", distinct(10, 5), 20, output_length=4), Request("full", distinct(50, 5), 5)]
    trace = run(requests, block_size=4, num_host_blocks=20, between=preempting("stops", {step}, mode))
    assert [(record.finish_reason, len(record.tokens)) for record in trace.requests] == [
        ("stop", 4),
        ("length", 5),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_token_of_a_preempted_request_has_the_end_of_one_step_as_its_time(policy):
    num_preemptions = 0
    for seed in range(15):
        requests, limits, cache = random_case(500 + seed)
        trace, _ = serve_refereed(requests, policy, limits, cache, Meddler(seed, 0.3, 0.02, 20))
        ends = {step.end for step in trace.steps}
        for record in trace.requests:
            assert set(record.token_times) <= ends
            num_preemptions += record.num_preemptions
        sampled = sum(entry.samples for step in trace.steps for entry in step.plan.scheduled)
        assert sampled == sum(len(record.tokens) for record in trace.requests)
    assert num_preemptions > 0


# --- a storm of preemptions


class AllAtOnce(policies.Policy):
    """Compute one block of the first prompt, let the others join, and then want the rest at once."""

    name = "all_at_once"

    def __init__(self, wanted):
        self.wanted = wanted

    def propose(self, view):
        for request in view.running:
            yield request, self.wanted
        if view.running:
            return
        for request in policies.queued(view):
            yield request, 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_no_more_victims_are_taken_than_the_blocks_that_are_missing(num_blocks, mode):
    # The first holds one block of 8, four others one each: three are free.
    requests = [Request("first", distinct(0, 32), 1)]
    requests += [Request(f"r{n}", distinct(100 + 10 * n, 3), 2) for n in range(4)]
    policy = AllAtOnce(4 * num_blocks)
    trace = run(requests, policy, num_blocks=8, block_size=4, num_host_blocks=8, preemption=mode)
    taken = trace.steps[1].plan
    assert len(taken.preempted) == max(0, num_blocks - 3)
    assert taken.num_transfers("swap_out") == (len(taken.preempted) if mode == "swap" else 0)
    # The latest comers.
    assert set(taken.preempted) == {f"r{n}" for n in range(4 - len(taken.preempted), 4)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_a_batch_that_was_preempted_whole_decodes_as_fast_as_before_once_it_is_back(mode, policy):
    requests = [Request(str(n), distinct(20 * n, 5 + n), 20) for n in range(6)]

    def storm(scheduler, record):
        if record.plan.step in (7, 8, 9):
            for state in scheduler.running:
                scheduler.preempt(state.id, mode)
            assert not scheduler.running

    options = {"block_size": 4, "num_host_blocks": 60}
    calm = run(requests, policy, **options)
    stormy, referee = serve_refereed(requests, policy, between=storm, **options)
    assert [record.num_preemptions for record in stormy.requests] == [3] * 6
    assert [step.num_running for step in stormy.steps] == [step.num_running for step in calm.steps]
    after = [step.plan.num_tokens for step in stormy.steps[11:]]
    assert after == [step.plan.num_tokens for step in calm.steps[11:]] == [6] * 9
    assert (referee.num_transfers["swap_in"] > 0) == (mode == "swap")


# --- victims that free nothing


RANKS = {
    "priority": [{"priority": 2}, {"priority": 1}, {"priority": 0}],
    "edf": [{"deadline": 90.0}, {"deadline": 50.0}, {"deadline": 9.0}],
    "srpt": [{"predicted_output": 12}, {"predicted_output": 6}, {"predicted_output": 2}],
    "trail": [{"predicted_output": 12}, {"predicted_output": 6}, {"predicted_output": 2}],
}
CACHING = {"seats": 8, "block_size": 2, "prefix_caching": True, "cache_on_schedule": True}


def sharing(last, middle):
    """Three requests, and one that begins like them and whose prompt then takes the budget."""
    text = distinct(10, 16)
    sharers = [Request(f"s{n}", text[: 2 * n], 4, **last) for n in (1, 2, 3)]
    return [*sharers, Request("owner", text, 4, 0.5, **middle)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", RANKS)
def test_a_waiting_request_displaces_none_that_holds_only_what_others_hold(policy, mode):
    last, middle, first = RANKS[policy]
    requests = [*sharing(last, middle), Request("urgent", distinct(50, 8), 2, 1.5, **first)]
    options = {"num_blocks": 10, "num_host_blocks": 20, "preemption": mode, "budget": 8, **CACHING}
    trace = run(requests, policy, **options)
    assert served(trace)[:2] == ["s12 s22 s32", "owner8"]
    assert preempted(trace)[2] == "owner"
    assert "urgent" in admitted(trace)[2]


@pytest.mark.parametrize("policy", RANKS)
def test_a_running_request_preempts_none_that_holds_only_what_others_hold(policy):
    last, middle, first = RANKS[policy]
    requests = [Request("first", distinct(50, 3), 4, **first), *sharing(last, middle)]
    trace = run(requests, policy, num_blocks=10, budget=10, **CACHING)
    assert served(trace)[1] == "first1 owner9"
    assert trace.steps[1].num_held_blocks == 10
    assert preempted(trace)[2] == "owner"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_policy_that_preempts_one_by_one_as_vllm_does_takes_victims_in_vain(one_by_one):
    class SharersFirst(type(policies.get("priority"))):
        preempts_one_by_one = one_by_one

    last, middle, first = RANKS["priority"]
    requests = [Request("first", distinct(50, 3), 4, **first), *sharing(last, middle)]
    trace = run(requests, SharersFirst(), num_blocks=10, budget=10, **CACHING)
    assert len(trace.steps[2].plan.preempted) == (4 if one_by_one else 1)
    for name in ("vllm_v0", "vllm_v1", "vllm_v1:priority"):
        assert policies.get(name).preempts_one_by_one


def test_what_two_victims_share_is_free_once_both_are_gone():
    # Each of two requests holds the first block, and one of them another: together two blocks.
    text = distinct(10, 4)
    requests = [Request(name, text[:length], 5, priority=1) for name, length in (("s", 2), ("t", 4))]
    requests.append(Request("urgent", distinct(50, 12), 1, 0.5))
    trace = run(requests, "priority", num_blocks=6, **CACHING)
    assert set(trace.steps[1].plan.preempted) == {"s", "t"}
    assert [entry.request_id for entry in trace.steps[1].plan.scheduled] == ["urgent"]


def test_a_waiting_request_displaces_no_more_than_it_lacks_beside_what_it_shares():
    # It shares the first two blocks of "low", and lacks one.
    text = distinct(10, 4)
    requests = [Request("low", (*text, 2), 2, priority=2), Request("middle", distinct(30, 3), 2, priority=3)]
    requests += [Request("more", (40,), 2, priority=4), Request("urgent", (*text, 1), 1, 0.5)]
    trace = run(requests, "priority", num_blocks=6, **CACHING)
    assert trace.steps[1].plan.preempted == ("more",)
    assert trace.requests[3].num_cached_tokens == 4


def test_none_is_displaced_for_a_run_that_would_be_in_two_pieces():
    # Of four runs of two blocks each the first and the third may go, and four blocks in one piece are wanted.
    priorities = {"a": 9, "b": 0, "c": 9, "d": 0}
    requests = [Request(name, 8, 8, float(n), priority=priorities[name]) for n, name in enumerate(priorities)]
    requests.append(Request("e", 25, 8, 4.0, priority=5))
    trace = run(requests, "priority", num_blocks=8, block_size=8, reservation="oracle", seats=8)
    assert trace.steps[4].num_waiting == 1
    assert not any(preempted(trace))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "vllm_v0"])
def test_a_running_request_that_even_all_victims_do_not_help_leaves_alone(policy):
    # The second wants four blocks more where one is free and the two behind it hold one each.
    class Wants(AllAtOnce):
        preempts_one_by_one = policies.get(policy).preempts_one_by_one

    requests = [
        Request(name, distinct(10 * n, size), 3)
        for n, (name, size) in enumerate(zip("abcd", (4, 20, 3, 3), strict=True))
    ]
    trace = run(requests, Wants(16), num_blocks=6, block_size=4, seats=8)
    assert preempted(trace)[1] == ("bcd" if policy == "vllm_v0" else "b")


def test_a_seat_is_freed_by_one_preemption_whatever_it_frees_beside():
    last, middle, first = RANKS["priority"]
    requests = [*sharing(last, middle), Request("urgent", distinct(50, 2), 1, 1.5, **first)]
    trace = run(requests, "priority", num_blocks=20, budget=8, **{**CACHING, "seats": 4})
    assert preempted(trace)[2] == "s3"


# --- preemption without end


class Quarrelsome(Policy):
    """Let a waiting request displace a running one, always."""

    name = "quarrelsome"

    def propose(self, view):
        for state in [*view.waiting, *view.swapped, *view.running]:
            yield state, state.num_pending_tokens

    def displace(self, view, waiting, candidates):
        return candidates[0] if candidates else None


@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_no_request_is_displaced_more_often_than_max_preemptions(bound, mode):
    trace = run(
        [Request(name, 2, 9) for name in "abcd"],
        Quarrelsome(),
        seats=1,
        preemption=mode,
        num_host_blocks=100,
        max_preemptions=bound,
    )
    # The last to run finds no other left that could displace it.
    counts = sorted(record.num_preemptions for record in trace.requests)
    assert counts[-1] == bound
    assert all(record.finish_reason == "length" for record in trace.requests)


class Spiteful(Policy):
    """Preempt the request that has come farthest, so that none would ever get to its end."""

    name = "spiteful"

    def victim(self, view, candidates):
        return max(candidates, key=lambda state: state.num_computed_tokens)


@pytest.mark.parametrize("bound", [1, 2])
def test_max_preemptions_ends_the_run_of_a_policy_that_preempts_the_farthest_request(bound):
    requests = [Request(name, 9, 6) for name in "abc"]
    trace = run(requests, Spiteful(), num_blocks=20, max_preemptions=bound)
    assert all(record.finish_reason == "length" for record in trace.requests)
    assert max(record.num_preemptions for record in trace.requests) >= bound
