"""The mechanism, watched by an executor that believes only the plans and keeps books of its own."""

import itertools
import random
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field

import pytest

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies
from cbresearch.request import RequestStatus
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, CostExecutor

BUILT_IN = ["fcfs", "prefill_first", "sjf", "static", "static:release"]
BLOCK_SIZES = [1, 3, 16]


# --- a second opinion


def output_of(request):
    """Return the tokens that a request has to come out with, however it is scheduled."""
    length = min(request.max_tokens, request.output_length or request.max_tokens)
    return tuple(zlib.crc32(f"{request.id} {place}".encode()) for place in range(length))


@dataclass
class Row:
    """A seat as an executor sees it."""

    request: Request
    seat: int
    table: list[int] = field(default_factory=list)
    computed: int = 0


class Shadow:
    """Carry out plans on a pool in which each slot remembers whose token it was given.

    Whatever a plan says about seats, positions and blocks is compared with books kept from the earlier
    plans alone, and every row has to find all of its own tokens in the pool.
    """

    def __init__(self, scheduler, requests):
        self.scheduler = scheduler
        self.seats = scheduler.config.max_num_seqs
        self.budget = scheduler.config.max_num_batched_tokens
        self.num_blocks = scheduler.blocks.config.num_blocks
        self.block_size = scheduler.blocks.config.block_size
        self.longest = scheduler.config.max_model_len
        self.outputs: dict[str, list[int]] = {}
        known: dict[str, tuple[int, ...]] = {}
        for request in filter(self.can_be_served, requests):
            known.setdefault(request.id, output_of(request))
        self.inner = CostExecutor(UNIT_STEP, known)
        total = sum(request.num_prompt_tokens + request.max_tokens for request in requests)
        self.patience = 50 * total + 100
        self.accepted: dict[str, Request] = {}
        self.rows: dict[str, Row] = {}
        self.finished_rows: dict[str, Row] = {}
        self.pool: dict[int, tuple[str, int]] = {}
        self.num_steps = 0

    def can_be_served(self, request):
        """Say whether a request can finish alone; its last token is never fed back."""
        num_tokens = request.num_prompt_tokens + request.max_tokens
        fits = num_tokens - 1 <= self.num_blocks * self.block_size
        return fits and (self.longest is None or num_tokens <= self.longest)

    def check(self, request):
        if request.id not in self.accepted and self.can_be_served(request):
            self.accepted[request.id] = request
            self.outputs[request.id] = []

    def execute(self, plan):
        self.scheduler.check()
        assert plan.step == self.num_steps
        self.num_steps += 1
        assert self.num_steps < self.patience, "the run does not come to an end"
        self.move_rows(plan)
        self.judge_limits(plan)
        for entry in plan.scheduled:
            self.judge_entry(entry)
        for row in plan.padding:
            self.judge_padding(row)
        self.judge_blocks(plan)
        self.compute(plan)
        self.seated = len(self.rows)
        self.waited = len(self.accepted) - len(self.finished()) - len(self.rows)
        self.held = sum(len(row.table) for row in self.rows.values())
        self.padded = sum(len(self.finished_rows[row.request_id].table) for row in plan.padding)
        result = self.inner.execute(plan)
        self.sample(plan, result)
        return result

    def finished(self):
        return {
            name
            for name, request in self.accepted.items()
            if len(self.outputs[name]) == len(output_of(request))
        }

    def move_rows(self, plan):
        for name in plan.preempted:
            del self.rows[name]
        for admission in plan.admitted:
            name = admission.request.id
            assert admission.request is self.accepted[name]
            assert name not in self.rows
            assert name not in self.finished()
            assert name not in plan.preempted
            assert list(admission.output_token_ids) == self.outputs[name]
            self.rows[name] = Row(admission.request, admission.seat)

    def judge_limits(self, plan):
        names = [part.request_id for part in (*plan.scheduled, *plan.padding)]
        assert plan.scheduled, "a step without progress"
        assert len(names) == len(set(names)) <= self.seats
        assert sum(entry.num_tokens for entry in plan.scheduled) + len(plan.padding) <= self.budget
        seats = [row.seat for row in self.rows.values()] + [row.seat for row in plan.padding]
        assert len(seats) == len(set(seats)), "two in one seat"
        assert set(seats) <= set(range(self.seats))

    def judge_entry(self, entry):
        row = self.rows[entry.request_id]
        known = row.request.num_prompt_tokens + len(self.outputs[entry.request_id])
        assert entry.seat == row.seat
        assert entry.start == row.computed
        assert 1 <= entry.num_tokens <= known - entry.start
        assert entry.context_length == entry.start + entry.num_tokens
        assert entry.samples == (entry.context_length == known)
        is_decode = bool(self.outputs[entry.request_id]) and entry.start == known - 1
        assert entry.is_prefill == (not is_decode)
        row.computed = entry.context_length
        row.table.extend(entry.new_block_ids)
        assert len(row.table) == len(range(0, row.computed, self.block_size)), "not the blocks it needs"

    def judge_padding(self, padding):
        row = self.finished_rows[padding.request_id]
        assert self.scheduler.policy.pads_finished_rows
        assert (padding.seat, padding.context_length) == (row.seat, row.computed)

    def judge_blocks(self, plan):
        live = [*self.rows.values(), *(self.finished_rows[row.request_id] for row in plan.padding)]
        blocks = [block for row in live for block in row.table]
        assert len(blocks) == len(set(blocks)), "two share a block"
        assert set(blocks) <= set(range(self.num_blocks))
        # A row that is left out although the budget would allow it has given up its seat and its blocks.
        if plan.num_tokens < self.budget:
            self.finished_rows = {row.request_id: self.finished_rows[row.request_id] for row in plan.padding}

    def slots(self, row, start, end):
        size = self.block_size
        return [row.table[place // size] * size + place % size for place in range(start, end)]

    def compute(self, plan):
        written = {}
        for entry in plan.scheduled:
            row = self.rows[entry.request_id]
            for offset, slot in enumerate(self.slots(row, entry.start, entry.context_length)):
                written[slot] = (entry.request_id, entry.start + offset)
        for padding in plan.padding:
            row, last = self.finished_rows[padding.request_id], padding.context_length - 1
            written[self.slots(row, last, last + 1)[0]] = (padding.request_id, last)
        assert len(written) == plan.num_tokens, "two tokens in one slot"
        self.pool |= written
        rows = [(self.rows[entry.request_id], entry) for entry in plan.scheduled]
        rows += [(self.finished_rows[padding.request_id], padding) for padding in plan.padding]
        for row, part in rows:
            found = [self.pool.get(slot) for slot in self.slots(row, 0, part.context_length)]
            assert found == [(part.request_id, place) for place in range(part.context_length)]

    def sample(self, plan, result):
        assert set(result.tokens) == {entry.request_id for entry in plan.scheduled if entry.samples}
        for name, token in result.tokens.items():
            wanted = output_of(self.accepted[name])
            assert token == wanted[len(self.outputs[name])]
            self.outputs[name].append(token)
            if len(self.outputs[name]) == len(wanted):
                self.finished_rows[name] = self.rows.pop(name)

    def after(self, record):
        """Compare what the scheduler says of the step just committed."""
        self.scheduler.check()
        queued = [state.id for state in [*self.scheduler.waiting, *self.scheduler.running]]
        assert Counter(queued) == Counter(set(self.accepted) - self.finished())
        assert {state.id for state in self.scheduler.running} == set(self.rows)
        assert set(record.finished) <= self.finished()
        assert (record.num_running, record.num_waiting) == (self.seated, self.waited)
        alive = [*self.rows.values(), *(self.finished_rows[name] for name in record.finished)]
        assert record.num_held_tokens == sum(row.computed for row in alive)
        assert record.num_held_blocks >= self.held + self.padded
        if not self.scheduler.policy.pads_finished_rows:
            assert record.num_held_blocks == self.held


def run(requests, policy="fcfs", *, seats=8, budget=64, num_blocks=64, block_size=1, max_model_len=None):
    """Serve requests under the eyes of a shadow, and hold the outcome against what was asked for."""
    scheduler = Scheduler(
        policies.get(policy) if isinstance(policy, str) else policy,
        SchedulerConfig(seats, budget, max_model_len),
        CacheConfig(num_blocks, block_size),
    )
    shadow = Shadow(scheduler, requests)
    trace = serve(requests, scheduler, shadow, on_step=shadow.after)
    assert not scheduler.has_work
    assert scheduler.blocks.num_free_blocks == num_blocks
    assert [record.id for record in trace.requests] == [request.id for request in requests]
    for request, record in zip(requests, trace.requests, strict=True):
        if shadow.accepted.get(request.id) is request:
            assert record.error is None
            assert record.tokens == output_of(request)
            assert len(record.token_times) == len(record.tokens)
            assert list(record.token_times) == sorted(set(record.token_times))
            assert record.first_scheduled == next(
                step.start
                for step in trace.steps
                if request.id in {admission.request.id for admission in step.plan.admitted}
            )
            assert record.finish_reason == (
                "stop" if request.output_length == len(record.tokens) else "length"
            )
        else:
            assert record.error is not None
            assert record.tokens == ()
    return trace


def served(trace):
    return [
        " ".join(f"{entry.request_id}{entry.num_tokens}" for entry in step.plan.scheduled)
        for step in trace.steps
    ]


def admitted(trace):
    return ["".join(admission.request.id for admission in step.plan.admitted) for step in trace.steps]


def preempted(trace):
    return ["".join(step.plan.preempted) for step in trace.steps]


# --- policies that stress it


class Chunked(Policy):
    """Want a block's worth of everyone, so that many prompts are begun at once."""

    name = "chunked"

    def propose(self, view):
        for state, wanted in super().propose(view):
            yield state, min(wanted, view.block_size)


class OldestLeaves(Chunked):
    """Preempt whoever was admitted first."""

    name = "oldest_leaves"

    def victim(self, view, candidates):
        return candidates[0]


class Selfless(Policy):
    """Preempt whoever asks."""

    name = "selfless"

    def propose(self, view):
        for state, wanted in super().propose(view):
            self.asking = state
            yield state, wanted

    def victim(self, view, candidates):
        return self.asking


class Erratic(Policy):
    """Decide by lot: the order, the wants and the victims."""

    name = "erratic"

    def __init__(self, seed, pads_finished_rows):
        self.random = random.Random(seed)
        self.pads_finished_rows = pads_finished_rows

    def propose(self, view):
        everyone = [*view.running, *view.waiting]
        self.random.shuffle(everyone)
        for state in everyone:
            yield state, self.random.randint(-1, 6)
        for state in everyone:
            yield state, state.num_pending_tokens

    def victim(self, view, candidates):
        return self.random.choice(candidates)


class Scripted(Policy):
    """Propose what the script says for a step, and go on as the base class does after its end."""

    name = "scripted"

    def __init__(self, *script):
        self.script = list(script)

    def propose(self, view):
        if not self.script:
            yield from super().propose(view)
            return
        states = {state.id: state for state in [*view.running, *view.waiting]}
        for part in self.script.pop(0).split():
            yield states[part[0]], int(part[1:] or 1)


# --- rules 1, 4 and 5 of the design, in any situation


NUM_SITUATIONS = 150


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


STRESS = {
    **{name: lambda seed, name=name: policies.get(name) for name in BUILT_IN},
    "chunked": lambda seed: Chunked(),
    "oldest leaves": lambda seed: OldestLeaves(),
    "selfless": lambda seed: Selfless(),
    "erratic": lambda seed: Erratic(seed, pads_finished_rows=False),
    "erratic, seats kept": lambda seed: Erratic(seed, pads_finished_rows=True),
}


@pytest.mark.parametrize("policy", STRESS)
def test_every_accepted_request_finishes_within_the_limits_and_the_pool_comes_back_whole(policy):
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


@pytest.mark.parametrize("policy", BUILT_IN)
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


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_head_of_the_queue_that_can_never_fit_blocks_nobody(policy):
    trace = run([Request("a", 20, 1), Request("b", 4, 5)], policy, num_blocks=4, block_size=4)
    assert "'a'" in trace.requests[0].error
    assert trace.requests[1].finish_reason == "length"


def test_a_prompt_that_fills_the_pool_is_rejected_if_it_wants_to_go_on():
    trace = run([Request("a", 8, 5), Request("b", 8, 1)], num_blocks=2, block_size=4)
    assert "12 tokens" in trace.requests[0].error
    assert trace.requests[1].finish_reason == "length"


@pytest.mark.parametrize("prompt", [1, 6])
def test_a_request_may_be_as_long_as_the_model_allows_and_the_next_is_served_after_a_rejection(prompt):
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


@pytest.mark.parametrize("policy", BUILT_IN)
def test_an_id_that_is_taken_is_rejected_before_and_after_its_first_bearer_is_done(policy):
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


def test_a_rejected_submission_changes_nothing_and_leaves_its_id_free():
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
    assert trace.requests[0].tokens == output_of(Request("a", 1, 4))
    assert "'b'" in trace.requests[1].error


@pytest.mark.parametrize("policy", BUILT_IN)
def test_outputs_have_exactly_the_length_asked_for_and_a_reason_to_end(policy):
    requests = [Request(str(length), 3, length) for length in range(1, 8)]
    requests += [Request(f"stop {length}", 3, 5, output_length=length) for length in range(1, 8)]
    trace = run(requests, policy, seats=3, num_blocks=24)
    assert [len(record.tokens) for record in trace.requests] == [*range(1, 8), 1, 2, 3, 4, 5, 5, 5]
    assert [record.finish_reason for record in trace.requests] == ["length"] * 7 + ["stop"] * 5 + [
        "length"
    ] * 2


# --- budget and seats


@pytest.mark.parametrize("policy", [*BUILT_IN, "erratic", "erratic, seats kept"])
def test_six_decodes_share_a_budget_of_four_and_all_finish(policy):
    trace = run([Request(name, 1, 5) for name in "abcdef"], STRESS[policy](0), budget=4)
    assert max(step.plan.num_tokens for step in trace.steps) == 4
    assert all(record.finish_reason == "length" for record in trace.requests)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(policy):
    trace = run([Request("a", 12, 2)], policy, budget=8)
    assert served(trace) == ["a8", "a4", "a1"]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_nobody_is_admitted_while_every_seat_is_held(policy):
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
            everyone = [*view.running, *view.waiting]
            capitals = [state for state in everyone if state.id.isupper()]
            return ((state, state.num_pending_tokens) for state in capitals or everyone)

    trace = run([Request(name, 1, 2) for name in "abcXYdZ"], Picky(), seats=2)
    assert admitted(trace) == ["XY", "", "Z", "", "ab", "", "cd", ""]


# --- blocks run out


@pytest.mark.parametrize("policy", [*BUILT_IN, "chunked", "oldest leaves", "selfless"])
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


def test_a_victim_that_was_scheduled_already_leaves_the_plan_and_refunds_its_budget():
    policy = Scripted("a b", "c", "c a b")
    trace = run([Request(name, 1, 3) for name in "abc"], policy, budget=2, num_blocks=4)
    assert served(trace)[:3] == ["a1 b1", "c1", "a1 b1"]
    assert preempted(trace)[:3] == ["", "", "c"]


def test_a_victim_that_was_admitted_in_the_same_step_never_sat_down():
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
    assert again.output_token_ids == output_of(requests[1])[:before]
    assert trace.requests[1].num_recomputed_tokens == 2 + before - 1


def test_requests_preempted_together_return_in_the_order_in_which_they_sat():
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


def test_nobody_is_admitted_in_a_step_that_preempts():
    # In the second step b's blocks become free for a, and would do for c as well.
    policy = Scripted("a2 b4", "a b c")
    trace = run([Request("a", 2, 3), Request("b", 4, 3), Request("c", 1, 1)], policy, num_blocks=6)
    assert preempted(trace)[1] == "b"
    assert served(trace)[1] == "a1"


def test_a_request_preempted_beside_and_at_a_block_edge_comes_out_as_if_it_never_was():
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


def test_the_request_that_asks_may_be_the_victim_and_the_others_go_on():
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


def test_padding_rows_give_way_before_anyone_loses_work():
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
        lambda scheduler: scheduler.blocks.allocate("d", 1),
        lambda scheduler: setattr(scheduler.running[0], "num_computed_tokens", 1),
        lambda scheduler: scheduler.blocks._free.pop(),
    ],
    ids=[
        "a held seat is free",
        "a running request is lost",
        "a request is in two queues",
        "two share a seat",
        "a finished request runs",
        "a running request waits",
        "a waiting request holds blocks",
        "tokens are miscounted",
        "a block is lost",
    ],
)
def test_check_notices_that(damage):
    scheduler = busy_scheduler()
    scheduler.check()
    damage(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()
