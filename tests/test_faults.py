"""Kinds of faults that other servers had in their KV memory; each test's name is the claim."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from cbresearch.blocks import BlockManager
from cbresearch.plan import StepResult
from test_two_tiers import (
    POLICIES,
    Meddler,
    assert_whole,
    distinct,
    entries_of,
    next_token,
    random_case,
    random_model_case,
    serve_on_model,
    serve_watched,
    states,
)

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.metrics import token_counts
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import simulate

MODES = ("recompute", "swap")


def preempting(request_id, steps, mode):
    """Return what preempts a request after each of some steps, if it runs then."""

    def between(scheduler, record):
        if record.plan.step in steps and any(state.id == request_id for state in scheduler.running):
            scheduler.preempt(request_id, mode)

    return between


# --- prefix cache


@pytest.mark.parametrize("block_size", [1, 3, 4, 5])
@pytest.mark.parametrize("step", range(5))
def test_what_a_resumed_request_has_to_compute_is_counted_after_its_own_blocks_were_found(block_size, step):
    # Counting before it finds its old blocks in the cache would plan tokens behind its end.
    trace, _ = serve_watched(
        [Request("a", distinct(10, 10), 6)],
        cache=CacheConfig(30, block_size, prefix_caching=True),
        between=preempting("a", {step}, "recompute"),
    )
    known = 10 + step + 1
    _, entry = entries_of(trace, "a")[step + 1]
    found = (known - 1) // block_size * block_size
    assert (entry.start, entry.num_tokens, entry.samples) == (found, known - found, True)
    assert trace.requests[0].num_cached_tokens == 0
    assert trace.requests[0].num_recomputed_tokens == known - 1 - found


def test_blocks_behind_a_fully_cached_prompt_are_cached_too():
    prompt = distinct(10, 8)
    first = Request("first", prompt, 2)
    again = Request("again", prompt, 6, 10.0)
    trace, _ = serve_watched([first, again], cache=CacheConfig(30, 4, prefix_caching=True))
    longer = Request("longer", prompt + trace.outputs["again"], 2, 20.0)
    trace, _ = serve_watched([first, again, longer], cache=CacheConfig(30, 4, prefix_caching=True))
    # 8 + 6 - 1 tokens of "again" have KV, 12 of them in full blocks.
    assert [record.num_cached_tokens for record in trace.requests] == [0, 4, 12]


def test_an_admission_counts_the_hits_of_the_step_in_which_it_succeeds():
    # While "b" is rejected with two hits, "a" takes the room of one of them.
    head = distinct(10, 8)
    requests = [
        Request("x", head, 1),
        Request("a", distinct(50, 8), 9, 1.0),
        Request("b", head + distinct(90, 9), 1, 2.0),
    ]
    hits = []

    def between(scheduler, record):
        if any(state.id == "b" for state in scheduler.waiting):
            hits.append(len(scheduler.blocks.match(requests[2].prompt)))

    cache = CacheConfig(5, 4, prefix_caching=True)
    trace, _ = serve_watched(requests, cache=cache, between=between)
    assert hits[0] == 2
    assert hits[-1] == 1
    assert trace.requests[2].num_cached_tokens == 4


def test_a_cached_prompt_gives_the_first_token_that_a_computed_one_gives(tiny, alone):
    answers = [answer for answer in alone if len(answer.prompt) in (3, 16, 32, 33, 48)]
    requests = [
        Request(f"{n} {time}", answer.prompt, 5, time)
        for n, answer in enumerate(answers)
        for time in (0.0, 1000.0)
    ]
    limits = SchedulerConfig(8, 2048)
    cache = CacheConfig(400, 3, prefix_caching=True)
    trace, _ = serve_on_model(tiny, requests, "fcfs", limits, cache)
    cached = {record.id: record.num_cached_tokens for record in trace.requests}
    for n, answer in enumerate(answers):
        assert trace.outputs[f"{n} 0.0"] == trace.outputs[f"{n} 1000.0"] == answer.continuation[:5]
        assert cached[f"{n} 1000.0"] >= (len(answer.prompt) - 1) // 3 * 3
        assert cached[f"{n} 1000.0"] < len(answer.prompt)


def test_a_row_computed_for_nothing_may_share_its_last_block_with_who_joins_its_batch():
    # "a" is done while the batch is still being filled, and "b" begins like it.
    requests = [
        Request("a", distinct(10, 8), 1),
        Request("c", distinct(50, 12), 3),
        Request("b", (*distinct(10, 8), 1, 2), 3),
    ]
    cache = CacheConfig(30, 4, prefix_caching=True)
    trace, _ = serve_watched(requests, "static", SchedulerConfig(3, 12), cache)
    assert trace.requests[2].num_cached_tokens == 8
    assert trace.steps[1].plan.padding[0].request_id == "a"
    assert trace.steps[1].num_shared_blocks == 2


# --- references


def test_a_windows_table_that_is_forked_written_and_freed_gives_back_each_block_once():
    # A block that fell out of the window stands in neither table; what both still see is counted twice.
    blocks = BlockManager(CacheConfig(6, 2, sliding_window=3))
    blocks.allocate("a", 7)
    blocks.forget("a", 6)
    blocks.share("b", blocks.table("a"))
    assert blocks.num_shared_blocks == 2
    assert len(blocks.make_writable("b", 3)) == 1
    assert blocks.allocate("a", 9) is not None
    blocks.forget("a", 8)
    blocks.forget("b", 7)
    blocks.check()
    for name in ("a", "b"):
        blocks.free(name)
        blocks.check()
    assert blocks.num_free_blocks == 6
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=f"{name!r} holds no blocks"):
            blocks.free(name)
    assert blocks.num_free_blocks == 6


def snapshot(blocks, names):
    return (
        {name: (blocks.table(name), blocks.host_table(name)) for name in names},
        blocks.num_free_blocks,
        blocks.num_cached_blocks,
        blocks.num_held_host_blocks,
        blocks.num_shared_blocks,
    )


def test_a_swap_that_lacks_its_last_block_changes_neither_pool():
    blocks = BlockManager(CacheConfig(4, 2, num_host_blocks=3))
    blocks.allocate("a", 8)
    before = snapshot(blocks, "ab")
    assert blocks.swap_out("a", 8) is None
    assert snapshot(blocks, "ab") == before
    blocks.check()
    pairs = blocks.swap_out("a", 6)
    assert len(pairs) == 3
    assert blocks.num_free_blocks == 4
    blocks.allocate("b", 4)
    before = snapshot(blocks, "ab")
    assert not blocks.can_swap_in("a", 6)
    assert blocks.swap_in("a") is None
    assert snapshot(blocks, "ab") == before
    blocks.check()
    blocks.free("b")
    assert blocks.can_swap_in("a", 6)
    assert len(blocks.swap_in("a")) == 3
    assert (blocks.num_held_blocks, blocks.num_held_host_blocks) == (3, 0)


def test_a_rejected_admission_holds_nothing_and_what_it_would_have_shared_can_be_evicted():
    prompt = distinct(10, 8)
    requests = [
        Request("x", prompt, 1),
        Request("a", distinct(50, 8), 9),
        Request("b", (*prompt, 1), 12, 1.0),
    ]
    rejected = []

    def between(scheduler, record):
        if any(state.id == "b" for state in scheduler.waiting):
            rejected.append(record.plan.step)
            assert scheduler.blocks.table("b") == ()
            assert scheduler.blocks.num_held_blocks == len(scheduler.blocks.table("a"))

    serve_watched(requests, cache=CacheConfig(5, 4, prefix_caching=True), between=between)
    assert len(rejected) > 3


# --- abort


class Run:
    """A scheduler that is driven step by step, with tokens as a prompt gives them."""

    def __init__(self, requests, policy="fcfs", budget=2048, **options):
        cache = CacheConfig(**{"num_blocks": 30, "block_size": 4, "num_host_blocks": 30, **options})
        self.scheduler = Scheduler(policies.get(policy), SchedulerConfig(8, budget), cache)
        self.states = {request.id: self.scheduler.submit(request) for request in requests}
        self.now = 0.0

    def step(self):
        plan = self.scheduler.schedule(self.now)
        self.now += 1.0
        tokens = {
            entry.request_id: next_token(states(self.states[entry.request_id].token_ids)[-1])
            for entry in plan.scheduled
            if entry.samples
        }
        committed = self.scheduler.commit(plan, StepResult(1.0, tokens), self.now)
        self.scheduler.check()
        return committed

    def finish(self):
        while self.scheduler.has_work:
            self.step()
        assert_whole(self.scheduler)


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
    blocks = run.scheduler.blocks
    assert blocks.table("a") == blocks.host_table("a") == ()
    assert blocks.num_held_blocks == len(blocks.table("b"))
    assert blocks.num_held_host_blocks == len(blocks.host_table("b"))
    with pytest.raises(ValueError, match="'a' is finished"):
        run.scheduler.abort("a")
    with pytest.raises(ValueError, match="'c' is unknown"):
        run.scheduler.abort("c")
    run.finish()
    assert len(run.states["b"].output_token_ids) == 12
    assert run.states["a"].output_token_ids == generated


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", range(4))
def test_an_abort_of_everyone_leaves_an_empty_pool_that_serves_the_next(policy, step):
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


# --- preemption, forced in every step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_preemption_at_any_length_changes_no_token_and_drops_none(mode, block_size):
    # Beside a block's edge, at it, and behind it; in the prompt and while decoding.
    for length in (block_size, block_size + 1, 2 * block_size - 1 or 1, 2 * block_size):
        for budget in (2, 2048):
            for step in range(12):
                requests = [Request("a", distinct(10, length), 6), Request("b", distinct(50, 3), 9)]
                trace, _ = serve_watched(
                    requests,
                    limits=SchedulerConfig(4, budget),
                    cache=CacheConfig(40, block_size, num_host_blocks=40),
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
    cache = CacheConfig(40, 4, prefix_caching=caching, num_host_blocks=40)
    trace, _ = serve_watched(requests, cache=cache, between=preempting("a", range(100), mode))
    assert trace.requests[0].num_preemptions == 5
    assert len(trace.steps) == 6


@pytest.mark.parametrize("mode", MODES)
def test_prompt_and_answer_stay_apart_when_a_request_is_resumed(mode):
    trace, _ = serve_watched(
        [Request("a", distinct(10, 5), 8)],
        cache=CacheConfig(20, 4, num_host_blocks=20),
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
    trace, _ = serve_watched(
        requests,
        cache=CacheConfig(20, 4, num_host_blocks=20),
        between=preempting("stops", {step}, mode),
    )
    assert [(record.finish_reason, len(record.tokens)) for record in trace.requests] == [
        ("stop", 4),
        ("length", 5),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_stream_is_the_answer_and_each_token_has_one_time(policy):
    num_preemptions = 0
    for seed in range(15):
        requests, limits, cache = random_case(500 + seed)
        trace, witness = serve_watched(requests, policy, limits, cache, Meddler(seed, 0.3, 0.02, 20))
        ends = {step.end for step in trace.steps}
        for record in trace.requests:
            assert tuple(witness.stream.get(record.id, ())) == record.tokens
            assert len(record.token_times) == len(record.tokens)
            assert all(earlier < later for earlier, later in pairwise(record.token_times))
            assert set(record.token_times) <= ends
            num_preemptions += record.num_preemptions
        sampled = sum(entry.samples for step in trace.steps for entry in step.plan.scheduled)
        assert sampled == sum(len(record.tokens) for record in trace.requests)
    assert num_preemptions > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_cached_tokens_are_at_most_the_prompt_and_recomputed_ones_are_counted_apart(policy):
    seen: Counter[str] = Counter()
    for seed in range(25):
        requests, limits, cache = random_case(700 + seed)
        trace, _ = serve_watched(requests, policy, limits, cache, Meddler(seed, 0.3, 0.0, 20))
        computed: Counter[str] = Counter()
        furthest: Counter[str] = Counter()
        again: Counter[str] = Counter()
        for step in trace.steps:
            for entry in step.plan.scheduled:
                name = entry.request_id
                computed[name] += entry.num_tokens
                again[name] += max(0, min(furthest[name], entry.context_length) - entry.start)
                furthest[name] = max(furthest[name], entry.context_length)
        for record in trace.requests:
            assert record.num_recomputed_tokens == again[record.id]
            assert 0 <= record.num_cached_tokens < record.num_prompt_tokens
            length = record.num_prompt_tokens + len(record.tokens) - 1
            assert computed[record.id] == length - record.num_cached_tokens + again[record.id]
        counts = token_counts(trace)
        assert counts.computed == computed.total()
        assert counts.recomputed == again.total()
        seen.update(cached=counts.cached, recomputed=counts.recomputed)
    assert seen["cached"] > 0
    assert seen["recomputed"] > 0


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
    limits = SchedulerConfig(8, 2048, preemption=mode)
    cache = CacheConfig(8, 4, num_host_blocks=8)
    trace, _ = serve_watched(requests, AllAtOnce(4 * num_blocks), limits, cache)
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

    limits, cache = SchedulerConfig(8, 2048), CacheConfig(60, 4, num_host_blocks=60)
    calm, _ = serve_watched(requests, policy, limits, cache)
    stormy, witness = serve_watched(requests, policy, limits, cache, storm)
    assert [record.num_preemptions for record in stormy.requests] == [3] * 6
    assert [step.num_running for step in stormy.steps] == [step.num_running for step in calm.steps]
    after = [step.plan.num_tokens for step in stormy.steps[11:]]
    assert after == [step.plan.num_tokens for step in calm.steps[11:]] == [6] * 9
    assert (witness.num_transfers["swap_in"] > 0) == (mode == "swap")


@pytest.mark.parametrize("host", [0, 1, 3, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_pool_of_any_size_never_stops_the_run(host, policy):
    requests = [Request(str(n), 9, 12, float(n)) for n in range(6)]
    limits, cache = SchedulerConfig(4, 64, preemption="swap"), CacheConfig(6, 4, num_host_blocks=host)
    trace = simulate(requests, policy, scheduler=limits, cache=cache)
    assert [len(record.tokens) for record in trace.requests] == [12] * 6
    swapped = sum(len(step.plan.swapped) for step in trace.steps)
    assert (swapped > 0) == (host >= 3)
    assert max(step.num_held_host_blocks for step in trace.steps) <= host


def test_random_runs_leave_only_cached_blocks_that_nobody_refers_to():
    rng = np.random.default_rng(0)
    num_cached = 0
    for seed in rng.integers(10_000, size=30):
        requests, limits, cache = random_case(int(seed))
        run = Run(
            requests,
            budget=limits.max_num_batched_tokens,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            prefix_caching=cache.prefix_caching,
        )
        run.finish()
        blocks = run.scheduler.blocks
        num_cached += blocks.num_cached_blocks
        # Each of them can be handed out again.
        assert len(set(blocks.allocate("all", blocks.num_blocks * cache.block_size))) == blocks.num_blocks
        assert blocks.num_cached_blocks == 0
        blocks.check()
    assert num_cached > 0


# --- on a real model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_a_model_says_the_same_whichever_step_a_request_is_preempted_after(mode, caching, tiny, alone):
    chosen = [alone[3], alone[6]]
    requests = [Request(str(n), answer.prompt, 6) for n, answer in enumerate(chosen)]
    expected = {str(n): answer.continuation[:6] for n, answer in enumerate(chosen)}
    limits = SchedulerConfig(4, 20, preemption=mode)
    cache = CacheConfig(60, 3, prefix_caching=caching, num_host_blocks=60)
    for name in ("0", "1"):
        for step in range(7):
            between = preempting(name, {step}, mode)
            trace, executor = serve_on_model(tiny, requests, "fcfs", limits, cache, between)
            assert trace.outputs == expected, f"{name} preempted after step {step}"
            assert (executor.num_transfers["swap_out"] > 0) == (
                mode == "swap" and sum(record.num_preemptions for record in trace.requests) > 0
            )


def test_a_model_says_the_same_among_random_aborts_and_preemptions_in_tiny_pools(tiny, alone):
    seen: Counter[str] = Counter()
    for seed in range(14):
        requests, expected, policy, limits, cache = random_model_case(100 + seed, alone)
        meddler = Meddler(seed, rate=0.2, aborts=0.1, patience=20)
        trace, executor = serve_on_model(tiny, requests, policy, limits, cache, meddler)
        for record in trace.requests:
            want = expected[record.id]
            assert record.tokens == (want[: len(record.tokens)] if record.finish_reason == "abort" else want)
        seen.update(executor.num_transfers)
        seen["abort"] += meddler.num_aborted.total()
    assert all(seen[kind] > 0 for kind in ("swap_out", "swap_in", "copy", "abort")), seen


def test_a_row_that_is_computed_for_nothing_writes_nothing(tiny, alone):
    # What it would write lies in a block that others may share by now, or that it gave back.
    requests = [Request("a", alone[3].prompt, 2), Request("b", alone[6].prompt, 6)]
    limits, cache = SchedulerConfig(4, 2048), CacheConfig(60, 3)
    scheduler = Scheduler(policies.get("static"), limits, cache)
    executor = ModelExecutor(tiny, limits, cache, fill=math.nan)
    num_padded = 0

    class Marking:
        check = executor.check

        def execute(self, plan):
            nonlocal num_padded
            slots = []
            for row in plan.padding:
                place, offset = divmod(row.context_length - 1, cache.block_size)
                slots.append(scheduler.blocks.table(row.request_id)[place] * cache.block_size + offset)
            for layer in executor.cache.kv:
                layer[slots] = 7.0
            result = executor.execute(plan)
            num_padded += len(slots)
            assert all(bool((layer[slots] == 7.0).all()) for layer in executor.cache.kv)
            return result

    trace = serve(requests, scheduler, Marking())
    assert num_padded == 4
    assert trace.outputs["b"] == alone[6].continuation[:6]
