"""Two tiers: a request may leave the device with its KV and come back to go on, in plans and on a model."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from cbresearch.blocks import NULL_BLOCK
from cbresearch.plan import StepResult

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import replay

POLICIES = ("fcfs", "prefill_first", "sjf", "static", "static:release")
NUM_COMBINATIONS = 48
NUM_SHARDS = 3


# --- a second opinion: an executor whose KV says what it depends on


def states(token_ids):
    """Return what stands for the KV at each position: it depends on all tokens up to there."""
    known, state = [], 0
    for token in token_ids:
        state = hash((state, token))
        known.append(state)
    return known


def next_token(state):
    return state % 5


def alone(prompt, num_tokens):
    """Return the answer to a prompt, which depends on nothing but the prompt."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(states(token_ids)[-1]))
    return tuple(token_ids[len(prompt) :])


@dataclass
class Row:
    """A seated request as an executor sees it."""

    request: Request
    token_ids: list[int]
    computed: int = -1
    table: list[int] = field(default_factory=list)
    is_done: bool = False


class Witness:
    """Carry out plans, transfers included, on pools whose slots remember the prefix that they were given.

    Each position that a step attends to has to be found in the pool as the request's own prefix gives it.
    Nothing is written to a block that a second request refers to.
    """

    def __init__(self, scheduler):
        cache = scheduler.blocks.config
        self.scheduler, self.size, self.window = scheduler, cache.block_size, cache.sliding_window
        self.pools = {
            "device": [[None] * self.size for _ in range(cache.num_blocks)],
            "host": [[None] * self.size for _ in range(cache.num_host_blocks)],
        }
        self.rows: dict[str, Row] = {}
        self.stream: dict[str, list[int]] = {}
        self.num_transfers: Counter[str] = Counter()
        self.most_held: dict[str, int] = {}

    def check(self, request):
        """Accept every request."""

    def execute(self, plan):
        self.scheduler.check()
        self.move_rows(plan)
        self.transfer(plan.transfers)
        for entry in plan.scheduled:
            self.grow(entry)
        self.forget()
        self.compute(plan)
        return self.sample(plan)

    def move_rows(self, plan):
        for name in plan.preempted:
            self.rows.pop(name)
        # Who is done keeps its row for as long as it keeps its blocks.
        gone = [name for name in self.rows if not self.scheduler.blocks.table(name)]
        for name in gone:
            row = self.rows.pop(name)
            assert row.is_done or name not in self.living(), f"{name} lost its blocks without a word"
        for admission in plan.admitted:
            request = admission.request
            assert request.id not in self.rows
            assert list(admission.output_token_ids) == self.stream.setdefault(request.id, [])
            self.rows[request.id] = Row(request, [*request.prompt, *admission.output_token_ids])

    def living(self):
        scheduler = self.scheduler
        return {state.id for state in (*scheduler.running, *scheduler.waiting, *scheduler.swapped)}

    def transfer(self, transfers):
        for kind, source, target in transfers:
            self.num_transfers[kind] += 1
            origin = self.pools["host" if kind == "swap_in" else "device"]
            goal = self.pools["host" if kind == "swap_out" else "device"]
            assert kind in ("copy", "swap_out", "swap_in")
            assert 0 <= source < len(origin)
            assert 0 <= target < len(goal)
            goal[target] = list(origin[source])

    def grow(self, entry):
        row, is_new = self.rows[entry.request_id], self.rows[entry.request_id].computed < 0
        row.table += entry.new_block_ids
        assert is_new or entry.start == row.computed
        row.computed = entry.start + entry.num_tokens
        assert entry.num_tokens > 0
        assert row.computed <= len(row.token_ids)
        assert entry.samples == (row.computed == len(row.token_ids))

    def forget(self):
        """Drop what was given back: whoever still needs it finds nothing."""
        for name, row in self.rows.items():
            table = self.scheduler.blocks.table(name)
            for place, block in enumerate(table):
                if block == NULL_BLOCK:
                    row.table[place] = NULL_BLOCK
            assert tuple(row.table) == table
            num_held = sum(block != NULL_BLOCK for block in table)
            self.most_held[name] = max(num_held, self.most_held.get(name, 0))

    def compute(self, plan):
        references = Counter(
            block for row in self.rows.values() for block in row.table if block != NULL_BLOCK
        )
        spans = [(entry.request_id, entry.start, entry.num_tokens) for entry in plan.scheduled]
        for name, start, num_tokens in spans:
            row = self.rows[name]
            for position, state in enumerate(states(row.token_ids)):
                if start <= position < start + num_tokens:
                    block = row.table[position // self.size]
                    assert block != NULL_BLOCK, f"{name} writes position {position} to a block it gave back"
                    assert references[block] == 1, f"{name} writes block {block}, which others refer to"
                    self.pools["device"][block][position % self.size] = state
        # A row that is computed over again reads what it has, and writes nothing.
        spans += [(row.request_id, row.context_length - 1, 1) for row in plan.padding]
        for name, start, num_tokens in spans:
            row = self.rows[name]
            first = 0 if self.window is None else max(0, start - self.window + 1)
            for position, state in enumerate(states(row.token_ids)[: start + num_tokens]):
                if position >= first:
                    block = row.table[position // self.size]
                    assert block != NULL_BLOCK, f"{name} reads position {position} of a block it gave back"
                    found = self.pools["device"][block][position % self.size]
                    assert found == state, f"{name} reads another's KV, or none, at position {position}"

    def sample(self, plan):
        tokens, stopped = {}, []
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            name, row = entry.request_id, self.rows[entry.request_id]
            tokens[name] = next_token(states(row.token_ids)[-1])
            row.token_ids.append(tokens[name])
            self.stream[name].append(tokens[name])
            if len(self.stream[name]) == row.request.output_length:
                stopped.append(name)
            row.is_done = name in stopped or len(self.stream[name]) == row.request.max_tokens
        return StepResult(1.0, tokens, frozenset(stopped))


def serve_watched(requests, policy="fcfs", limits=None, cache=None, between=None):
    """Serve on a `Witness`, check every invariant after every step, and each answer against the prompt alone.

    Args:
        requests: Who comes.
        policy: A policy or its name.
        limits: By default 8 seats and plenty of tokens, preemption by swap.
        cache: The pools.
        between: Called with the scheduler and each step's record, to preempt or abort somebody.
    """
    limits = limits or SchedulerConfig(8, 2048, preemption="swap")
    scheduler = Scheduler(policies.get(policy) if isinstance(policy, str) else policy, limits, cache)
    witness = Witness(scheduler)

    def on_step(record):
        scheduler.check()
        if between is not None:
            between(scheduler, record)
            scheduler.check()

    trace = serve(requests, scheduler, witness, on_step=on_step)
    assert_whole(scheduler)
    for request, record in zip(requests, trace.requests, strict=True):
        assert record.error is None
        assert tuple(witness.stream.get(request.id, ())) == record.tokens
        answer = alone(request.prompt, min(request.max_tokens, request.output_length or request.max_tokens))
        if record.finish_reason == "abort":
            assert record.tokens == answer[: len(record.tokens)]
        else:
            assert record.tokens == answer
        assert record.num_cached_tokens < request.num_prompt_tokens
    return trace, witness


def assert_whole(scheduler):
    """Both pools are as they were before anyone came."""
    blocks = scheduler.blocks
    scheduler.check()
    assert blocks.num_free_blocks == blocks.num_blocks
    assert blocks.num_held_blocks == blocks.num_held_host_blocks == blocks.num_shared_blocks == 0


def least_pool(requests, limits, block_size, window=None):
    """Return the fewest blocks with which every request can finish alone; its last token needs none."""
    longest = max(request.num_prompt_tokens + request.max_tokens - 1 for request in requests)
    blocks = -(-longest // block_size)
    if window is not None:
        blocks = min(blocks, -(-(window - 1 + limits.max_num_batched_tokens) // block_size) + 1)
    return blocks


def entries_of(trace, request_id):
    """Return (step, entry) for each part of a request."""
    return [
        (step.plan.step, entry)
        for step in trace.steps
        for entry in step.plan.scheduled
        if entry.request_id == request_id
    ]


def kinds(plan):
    return [transfer.kind for transfer in plan.transfers]


def distinct(first, length):
    return tuple(range(first, first + length))


# --- out and back


def crowded(num_host_blocks, preemption="swap", policy="fcfs"):
    """Serve two requests that fit together at first and not at last: "b" has to leave with 3 blocks."""
    requests = [Request("a", distinct(10, 10), 12), Request("b", distinct(40, 10), 12)]
    cache = CacheConfig(7, 4, num_host_blocks=num_host_blocks)
    return serve_watched(requests, policy, SchedulerConfig(8, 2048, preemption=preemption), cache)


def test_a_swapped_request_goes_on_where_it_stopped():
    trace, _ = crowded(num_host_blocks=20)
    b = trace.requests[1]
    assert b.num_preemptions == 1
    assert b.num_recomputed_tokens == 0
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert left.swapped == left.preempted == ("b",)
    entries = [entry for _, entry in entries_of(trace, "b")]
    ends = [0, *(entry.context_length for entry in entries)]
    assert [entry.start for entry in entries] == ends[:-1], "each part begins where the one before it ended"
    back = next(step.plan for step in trace.steps[left.step :] if step.plan.admitted)
    (entry,) = [entry for entry in back.scheduled if entry.request_id == "b"]
    assert entry.start > 10
    assert kinds(left) == ["swap_out"] * -(-entry.start // 4)
    assert kinds(back) == ["swap_in"] * -(-entry.start // 4)


def test_a_request_that_recomputes_in_the_place_of_a_swap_begins_anew():
    trace, witness = crowded(num_host_blocks=20, preemption="recompute")
    assert trace.requests[1].num_recomputed_tokens > 10
    assert [entry.start for _, entry in entries_of(trace, "b")].count(0) == 2
    assert not witness.num_transfers


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_host_pool_a_swap_is_a_recompute_in_every_step(policy):
    swapped, recomputed = crowded(0, "swap", policy)[0], crowded(0, "recompute", policy)[0]
    assert [step.plan for step in swapped.steps] == [step.plan for step in recomputed.steps]
    assert sum(record.num_preemptions for record in swapped.requests) > 0


@pytest.mark.parametrize("short", [0, 1])
def test_a_host_pool_that_lacks_one_block_makes_a_swap_a_recompute(short):
    enough = next(len(step.plan.transfers) for step in crowded(20)[0].steps if step.plan.swapped)
    trace, witness = crowded(enough - short)
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert left.swapped == (() if short else ("b",))
    assert (trace.requests[1].num_recomputed_tokens > 0) == bool(short)
    assert witness.num_transfers["swap_in"] == (0 if short else enough)


def test_a_host_pool_with_room_for_one_of_two_victims_takes_one_and_the_other_recomputes():
    requests = [Request(name, distinct(20 * n, 8), 12) for n, name in enumerate("abc")]
    cache = CacheConfig(30, 4, num_host_blocks=4)

    def between(scheduler, record):
        if record.plan.step == 2:
            scheduler.preempt("b", "swap")
            assert scheduler.blocks.num_held_host_blocks == 3
            scheduler.preempt("c", "swap")
            assert scheduler.blocks.num_held_host_blocks == 3

    trace, _ = serve_watched(requests, cache=cache, between=between)
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert (set(left.preempted), left.swapped) == ({"b", "c"}, ("b",))
    assert [record.num_recomputed_tokens for record in trace.requests] == [0, 0, 8 + 2]


def test_host_blocks_are_counted_in_the_record_of_each_step_until_their_request_is_back():
    trace, _ = crowded(num_host_blocks=20)
    out = next(step.plan.step for step in trace.steps if step.plan.swapped)
    back = next(step.plan.step for step in trace.steps if "swap_in" in kinds(step.plan))
    num_moved = len(trace.steps[out].plan.transfers)
    assert [step.num_held_host_blocks for step in trace.steps] == [
        num_moved if out <= step < back else 0 for step in range(len(trace.steps))
    ]
    assert [step.num_swapped for step in trace.steps] == [
        int(out <= step < back) for step in range(len(trace.steps))
    ]


def test_a_swap_brings_back_only_what_left_the_device():
    # Both prompts begin with the same two blocks, which "a" goes on holding.
    prompt = distinct(10, 8)
    requests = [Request("a", (*prompt, 30), 12), Request("b", (*prompt, 40), 12, arrival=1.0)]

    def between(scheduler, record):
        if record.plan.step == 3:
            scheduler.preempt("b", "swap")

    cache = CacheConfig(30, 4, prefix_caching=True, num_host_blocks=30)
    trace, witness = serve_watched(requests, cache=cache, between=between)
    assert trace.requests[1].num_cached_tokens == 8
    assert witness.num_transfers == {"swap_out": 3, "swap_in": 1}
    assert trace.requests[1].num_recomputed_tokens == 0


def test_what_is_still_cached_on_the_device_is_not_swapped_in():
    # Nobody else holds the blocks of "b", but nobody needs their room either.
    requests = [Request("a", distinct(10, 4), 12), Request("b", distinct(40, 9), 4)]

    def between(scheduler, record):
        if record.plan.step == 0:
            scheduler.preempt("b", "swap")

    cache = CacheConfig(30, 4, prefix_caching=True, num_host_blocks=30)
    _, witness = serve_watched(requests, cache=cache, between=between)
    assert witness.num_transfers == {"swap_out": 3, "swap_in": 1}


def test_a_second_swap_of_the_same_blocks_copies_only_what_was_written_since():
    # The first two blocks of "c" have copies on the host, which "b" keeps there.
    prompt = distinct(10, 8)
    requests = [
        Request("a", distinct(60, 4), 20),
        Request("b", (*prompt, 40), 9),
        Request("c", (*prompt, 50), 9, arrival=1.0),
    ]

    def between(scheduler, record):
        if record.plan.step == 3:
            scheduler.preempt("b", "swap")
            scheduler.preempt("c", "swap")

    cache = CacheConfig(30, 4, prefix_caching=True, num_host_blocks=30)
    trace, witness = serve_watched(requests, cache=cache, between=between)
    assert trace.requests[2].num_cached_tokens == 8
    assert witness.num_transfers["swap_out"] == 3 + 1


def test_the_blocks_that_swapped_samples_share_are_copied_once_each_way():
    samples = parallel_samples(Request("s", distinct(10, 9), 8), 3)
    requests = [Request("other", distinct(60, 4), 20), *samples]

    def between(scheduler, record):
        if record.plan.step == 3:
            for sample in samples:
                scheduler.preempt(sample.id, "swap")
            assert scheduler.blocks.num_held_host_blocks == 2 + 3

    cache = CacheConfig(40, 4, num_host_blocks=40)
    trace, witness = serve_watched(requests, cache=cache, between=between)
    assert [record.num_preemptions for record in trace.requests] == [0, 1, 1, 1]
    # The prompt's two full blocks once, and one block that is each sample's own.
    assert witness.num_transfers == {"swap_out": 2 + 3, "swap_in": 2 + 3}
    back = next(step for step in trace.steps if "swap_in" in kinds(step.plan))
    assert back.num_shared_blocks == 2 * 2


# --- who is swapped, and who goes first


class PerVictim(policies.Policy):
    """Swap some, let others compute again."""

    name = "per_victim"

    def __init__(self, answers):
        self.answers = answers

    def preemption(self, view, victim):
        return self.answers[victim.id]


@pytest.mark.parametrize("default", ["recompute", "swap"])
def test_a_policy_decides_for_each_victim_what_becomes_of_its_kv(default):
    requests = [Request(name, distinct(20 * n, 10), 14) for n, name in enumerate("abc")]
    answers = {"b": "swap", "c": "recompute"}
    limits, cache = SchedulerConfig(8, 2048, preemption=default), CacheConfig(10, 4, num_host_blocks=50)
    trace, _ = serve_watched(requests, PerVictim(answers), limits, cache)
    swapped = {name for step in trace.steps for name in step.plan.swapped}
    preempted = {name for step in trace.steps for name in step.plan.preempted}
    assert (swapped, preempted) == ({"b"}, {"b", "c"})
    assert trace.requests[1].num_recomputed_tokens == 0
    assert trace.requests[2].num_recomputed_tokens > 0


def test_the_limits_say_what_a_policy_does_that_does_not_decide():
    class Looking(policies.Policy):
        name = "looking"
        seen = frozenset()

        def preemption(self, view, victim):
            self.seen |= {view.preemption}
            return super().preemption(view, victim)

    for mode in ("recompute", "swap"):
        policy = Looking()
        crowded(20, mode, policy)
        assert policy.seen == {mode}


@pytest.mark.parametrize("answer", ["swop", None, "", True])
def test_an_answer_that_is_no_preemption_is_an_error_that_names_the_policy(answer):
    class Wrong(PerVictim):
        def preemption(self, view, victim):
            return answer

    with pytest.raises(ValueError, match=r"'per_victim' wants .*'b'.* preempted by .*recompute.*swap"):
        crowded(20, policy=Wrong({}))


@pytest.mark.parametrize("mode", ["swop", ""])
def test_a_forced_preemption_of_an_unknown_kind_is_rejected(mode):
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(10, 4))
    scheduler.submit(Request("a", 3, 4))
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, StepResult(1.0, {"a": 1}), 1.0)
    if mode:
        with pytest.raises(ValueError, match="preempted by 'swop'"):
            scheduler.preempt("a", mode)
    for name in ("b", "A"):
        with pytest.raises(ValueError, match=f"{name!r} is not running"):
            scheduler.preempt(name)
    scheduler.check()
    assert [state.id for state in scheduler.running] == ["a"]


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first"])
def test_swapped_requests_come_back_before_anyone_new_joins(policy):
    num_swaps = num_joined_after = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        requests = [
            Request(str(n), distinct(50 * n, int(rng.integers(2, 20))), int(rng.integers(2, 20)), float(n))
            for n in range(8)
        ]
        limits = SchedulerConfig(4, 64, preemption="swap")
        cache = CacheConfig(least_pool(requests, limits, 4) + 2, 4, num_host_blocks=100)
        trace, _ = serve_watched(requests, policy, limits, cache)
        outside: set[str] = set()
        for step in trace.steps:
            back = [entry.request.id for entry in step.plan.admitted if entry.request.id in outside]
            new = [entry.request.id for entry in step.plan.admitted if entry.request.id not in outside]
            outside -= set(back)
            if new:
                assert not outside, f"{new} joined while {outside} were swapped out"
                num_joined_after += num_swaps > 0
            outside |= set(step.plan.swapped)
            num_swaps += len(step.plan.swapped)
    assert num_swaps > 0
    assert num_joined_after > 0


def test_requests_that_were_swapped_out_together_come_back_in_the_order_in_which_they_sat():
    requests = [Request(name, distinct(20 * n, 6), 10) for n, name in enumerate("abcd")]

    def between(scheduler, record):
        if record.plan.step == 2:
            for name in "dcb":
                scheduler.preempt(name, "swap")
            assert [state.id for state in scheduler.swapped] == ["b", "c", "d"]

    limits = SchedulerConfig(4, 2048, preemption="swap")
    serve_watched(requests, limits=limits, cache=CacheConfig(30, 4, num_host_blocks=30), between=between)


@pytest.mark.parametrize("policy", ["static", "static:release"])
def test_the_victim_of_a_static_batch_goes_on_from_the_host_in_a_later_one(policy):
    requests = [Request(name, distinct(20 * n, 6), 16) for n, name in enumerate("abc")]
    cache = CacheConfig(11, 4, num_host_blocks=30)
    trace, witness = serve_watched(requests, policy, SchedulerConfig(3, 2048, preemption="swap"), cache)
    victims = {name for step in trace.steps for name in step.plan.swapped}
    assert victims
    assert witness.num_transfers["swap_in"] > 0
    assert [record.num_recomputed_tokens for record in trace.requests] == [0, 0, 0]
    for name in victims:
        left = max(step.plan.step for step in trace.steps if name in step.plan.swapped)
        step, entry = next((step, entry) for step, entry in entries_of(trace, name) if step > left)
        assert entry.start > 6
        # It came back with an empty batch, not into a batch under way.
        seated = {admission.request.id for admission in trace.steps[step].plan.admitted}
        assert {entry.request_id for entry in trace.steps[step].plan.scheduled} == seated


class NewcomersFirst(policies.Policy):
    """Admit before serving whoever runs, so that an admission can be undone within its step."""

    name = "newcomers_first"

    def propose(self, view):
        yield from policies.joining(view, policies.queued(view))
        yield from policies.whole(view.running)


def test_a_request_may_be_swapped_out_again_in_the_step_in_which_it_was_swapped_in():
    # "b" comes back to the last free blocks in the very step in which "a" needs one of them.
    requests = [Request("a", distinct(10, 7), 9), Request("b", distinct(40, 5), 4)]

    def between(scheduler, record):
        if record.plan.step == 1:
            scheduler.preempt("b", "swap")

    cache = CacheConfig(4, 4, num_host_blocks=10)
    trace, _ = serve_watched(requests, NewcomersFirst(), cache=cache, between=between)
    plan = trace.steps[2].plan
    assert kinds(plan) == ["swap_out"] * 2 + ["swap_in"] * 2 + ["swap_out"] * 2
    assert not plan.admitted
    assert [entry.request_id for entry in plan.scheduled] == ["a"]
    assert trace.steps[2].num_held_host_blocks == 2
    b = trace.requests[1]
    assert (b.num_preemptions, b.num_recomputed_tokens) == (1, 0)


def test_what_only_the_prefix_cache_gave_an_admission_that_is_undone_is_not_moved():
    # "old" needs its next block in the step in which "new" was admitted on a hit, so "new" is put back.
    requests = [
        Request("seed", (1,) * 8, 1),
        Request("old", (2,) * 4, 8, 1.0),
        Request("new", (1,) * 9, 1, 2.0),
    ]
    undone = []

    class Watching(NewcomersFirst):
        def victim(self, view, candidates):
            undone.append(candidates[-1].id)
            return candidates[-1]

    cache = CacheConfig(4, 4, prefix_caching=True, num_host_blocks=10)
    trace, witness = serve_watched(requests, Watching(), cache=cache)
    assert "new" in undone
    assert trace.requests[2].num_preemptions == 0
    assert not witness.num_transfers


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_repeats_a_run_with_swaps_and_forks_step_for_step(policy):
    rng = np.random.default_rng(5)
    requests = [
        Request(f"r{n}", distinct(50 * n, int(rng.integers(2, 20))), int(rng.integers(2, 20)), float(n))
        for n in range(6)
    ]
    requests += parallel_samples(Request("s", distinct(300, 9), 12, 2.0), 3)
    limits = SchedulerConfig(5, 64, preemption="swap")
    cache = CacheConfig(least_pool(requests, limits, 4) + 1, 4, num_host_blocks=20)
    trace, witness = serve_watched(requests, policy, limits, cache)
    assert witness.num_transfers["swap_in"] > 0
    again = replay(trace, requests, policy)
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    assert again.requests == trace.requests
    assert again.steps_frame().equals(trace.steps_frame())


# --- any combination


def random_case(seed, windows=(None,)):
    """Draw requests (some alike, some parallel samples), limits and pools down to the least."""
    rng = np.random.default_rng(seed)
    heads = [tuple(rng.integers(0, 5, size=rng.integers(1, 20)).tolist()) for _ in range(2)]
    requests = []
    for place in range(int(rng.integers(2, 8))):
        head = heads[int(rng.integers(2))]
        tail = tuple(rng.integers(0, 5, size=rng.integers(0, 8)).tolist())
        prompt = head[: int(rng.integers(1, len(head) + 1))] + tail
        max_tokens = int(rng.integers(1, 16))
        length = int(rng.integers(1, max_tokens + 1)) if rng.integers(2) else None
        request = Request(f"r{place}", prompt, max_tokens, float(rng.integers(10)), output_length=length)
        requests += parallel_samples(request, int(rng.integers(2, 4))) if rng.random() < 0.4 else [request]
    block_size = int(rng.choice([1, 2, 3, 4, 16]))
    limits = SchedulerConfig(int(rng.integers(1, 8)), int(rng.choice([1, 3, 7, 64])), preemption="swap")
    window = windows[int(rng.integers(len(windows)))]
    least = least_pool(requests, limits, block_size, window)
    cache = CacheConfig(
        least + int(rng.choice([0, 0, 1, 4])),
        block_size,
        prefix_caching=bool(rng.integers(2)),
        num_host_blocks=int(rng.choice([0, 1, 5, 100])),
        sliding_window=window,
    )
    return requests, limits, cache


class Meddler:
    """Preempt and abort at random between steps, for some time."""

    def __init__(self, seed, rate=0.3, aborts=0.0, patience=60):
        self.rng = np.random.default_rng(seed)
        self.rate, self.aborts, self.patience = rate, aborts, patience
        self.num_aborted: Counter[str] = Counter()

    def __call__(self, scheduler, record):
        if record.plan.step >= self.patience:
            return
        if self.rng.random() < self.rate and scheduler.running:
            victim = scheduler.running[int(self.rng.integers(len(scheduler.running)))]
            scheduler.preempt(victim.id, str(self.rng.choice(["swap", "recompute"])))
        if self.rng.random() < self.aborts:
            everyone = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
            if everyone:
                state = everyone[int(self.rng.integers(len(everyone)))]
                self.num_aborted[state.status.value] += 1
                scheduler.abort(state.id)


@pytest.mark.parametrize("policy", [*POLICIES, NewcomersFirst])
def test_every_answer_is_that_of_the_prompt_alone_and_both_pools_come_back_whole(policy):
    policy = policy if isinstance(policy, str) else policy()
    seen: Counter[str] = Counter()
    for seed in range(30):
        requests, limits, cache = random_case(seed)
        trace, witness = serve_watched(requests, policy, limits, cache)
        seen.update(witness.num_transfers)
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
        seen["recomputed"] += sum(record.num_recomputed_tokens for record in trace.requests)
    assert min(seen[kind] for kind in ("swap_out", "swap_in", "preempted", "cached", "recomputed")) > 0
    assert (seen["copy"] > 0) == (not str(policy).startswith("static"))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_answer_is_that_of_the_prompt_alone_whoever_is_preempted_between_steps(policy):
    seen: Counter[str] = Counter()
    for seed in range(25):
        requests, limits, cache = random_case(1000 + seed)
        _, witness = serve_watched(requests, policy, limits, cache, between=Meddler(seed))
        seen.update(witness.num_transfers)
    assert min(seen[kind] for kind in ("swap_out", "swap_in")) > 0


# --- a real model


class OnlyOwnBlocks:
    """Stand before an executor, and let no plan pass that writes a block which two requests refer to."""

    def __init__(self, executor, scheduler):
        self.executor, self.scheduler = executor, scheduler
        self.num_transfers: Counter[str] = Counter()

    def check(self, request):
        self.executor.check(request)

    def execute(self, plan):
        size, blocks = self.scheduler.blocks.config.block_size, self.scheduler.blocks
        seated = {state.id for state in self.scheduler.running} | {row.request_id for row in plan.padding}
        references = Counter(block for name in seated for block in blocks.table(name) if block != NULL_BLOCK)
        for entry in plan.scheduled:
            table = blocks.table(entry.request_id)
            for place in range(entry.start // size, -(-entry.context_length // size)):
                assert references[table[place]] == 1, f"{entry} writes a block that others refer to"
        self.num_transfers.update(kinds(plan))
        return self.executor.execute(plan)


def serve_on_model(loaded, requests, policy, limits, cache, between=None):
    """Serve on pools full of NaN, with every invariant checked after every step."""
    from cbresearch.engine import ModelExecutor

    scheduler = Scheduler(policies.get(policy), limits, cache)
    executor = OnlyOwnBlocks(ModelExecutor(loaded, limits, cache, fill=math.nan), scheduler)

    def on_step(record):
        scheduler.check()
        if between is not None:
            between(scheduler, record)
            scheduler.check()

    trace = serve(requests, scheduler, executor, on_step=on_step)
    assert_whole(scheduler)
    return trace, executor


def random_model_case(seed, answers):
    """Draw requests with known continuations, policy, limits and pools down to the least."""
    rng = np.random.default_rng(seed)
    expected, requests = {}, []
    for place in range(int(rng.integers(2, 6))):
        answer = answers[int(rng.integers(len(answers)))]
        max_tokens = int(rng.integers(1, 13))
        request = Request(f"r{place}", answer.prompt, max_tokens, float(rng.choice([0.0, rng.random() / 10])))
        samples = parallel_samples(request, int(rng.integers(2, 4))) if rng.random() < 0.4 else (request,)
        requests += samples
        expected |= {sample.id: answer.continuation[:max_tokens] for sample in samples}
    block_size = int(rng.choice([1, 3, 16]))
    limits = SchedulerConfig(int(rng.integers(2, 9)), int(rng.choice([7, 64, 2048])), preemption="swap")
    cache = CacheConfig(
        least_pool(requests, limits, block_size) + int(rng.choice([0, 0, 1, 4])),
        block_size,
        prefix_caching=bool(rng.integers(2)),
        num_host_blocks=int(rng.choice([0, 1, 6, 200, 200])),
    )
    return requests, expected, POLICIES[seed % len(POLICIES)], limits, cache


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_tokens_equal_generate_alone_whatever_is_swapped_and_forked(shard, tiny, alone):
    seen: Counter[str] = Counter()
    for seed in range(shard, NUM_COMBINATIONS, NUM_SHARDS):
        requests, expected, policy, limits, cache = random_model_case(seed, alone)
        trace, executor = serve_on_model(tiny, requests, policy, limits, cache)
        assert trace.outputs == expected, f"seed {seed}: {policy}, {limits}, {cache}"
        seen.update(executor.num_transfers)
    assert min(seen[kind] for kind in ("swap_out", "swap_in", "copy")) > 0
