"""The loop: arrivals and the virtual clock, ties, rejections; nothing but the arguments in the outcome."""

import math
import os
import random
import subprocess
import sys

import pytest
from helpers.core import POLICIES, admission_order
from hygiene import ROOT

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies
from cbresearch.costs import Linear
from cbresearch.request import Rejected
from cbresearch.serve import Loop, serve
from cbresearch.simulator import UNIT_STEP, CostExecutor, simulate
from cbresearch.step import StepResult
from cbresearch.trace import Origin, TraceWriter, load


def run(requests, policy="fcfs", *, executor=None, on_step=None, seats=8, budget=64, num_blocks=64):
    scheduler = Scheduler(policies.get(policy), SchedulerConfig(seats, budget), CacheConfig(num_blocks, 1))
    return serve(requests, scheduler, executor or CostExecutor(UNIT_STEP), on_step=on_step)


def random_workload(seed):
    generator = random.Random(seed)
    return [
        Request(
            f"request {place}",
            generator.randint(1, 20),
            generator.randint(1, 9),
            arrival=round(generator.uniform(0, 9), 2),
        )
        for place in range(12)
    ]


# --- arrivals and the clock


def test_the_clock_jumps_to_the_next_arrival_when_there_is_nothing_to_do():
    trace = run([Request("a", 1, 2, arrival=3.0), Request("b", 1, 1, arrival=100.25)])
    assert [(step.start, step.end) for step in trace.steps] == [(3.0, 4.0), (4.0, 5.0), (100.25, 101.25)]
    assert [record.first_scheduled for record in trace.requests] == [3.0, 100.25]
    assert trace.requests[0].token_times == (4.0, 5.0)
    assert trace.duration == 101.25


def test_a_request_that_arrives_as_a_step_ends_joins_the_next_and_one_during_a_step_waits():
    requests = [
        Request("a", 1, 5),
        Request("at the end", 1, 1, arrival=1.0),
        Request("a moment later", 1, 1, arrival=math.nextafter(1.0, 2.0)),
    ]
    trace = run(requests)
    assert [record.first_scheduled for record in trace.requests] == [0.0, 1.0, 2.0]


def test_every_arrival_of_a_long_step_is_there_for_the_next():
    requests = [Request("a", 1, 2), *(Request(str(place), 1, 1, arrival=place) for place in range(1, 6))]
    trace = run(requests, executor=CostExecutor(Linear(step=5.0)))
    assert admission_order(trace) == ["a", "1", "2", "3", "4", "5"]
    assert {record.first_scheduled for record in trace.requests[1:]} == {5.0}


def test_steps_follow_one_another_without_overlap():
    trace = run(random_workload(1), executor=CostExecutor(Linear(step=0.1, token=0.01)))
    for earlier, later in zip(trace.steps, trace.steps[1:], strict=False):
        assert later.start >= earlier.end
        if later.start > earlier.end:
            assert later.start in {record.arrival for record in trace.requests}


def test_no_request_is_served_before_its_arrival_and_each_token_comes_at_the_end_of_its_step():
    trace = run(random_workload(2), seats=3)
    for record in trace.requests:
        assert record.first_scheduled >= record.arrival
        ends = [
            step.end
            for step in trace.steps
            for entry in step.plan.scheduled
            if entry.request_id == record.id and entry.samples
        ]
        assert list(record.token_times) == ends


# --- order


def test_requests_that_arrive_together_are_served_in_the_order_given():
    requests = [Request(name, 1, 1, arrival=2.5) for name in "dacb"]
    assert admission_order(run(requests, seats=1)) == ["d", "a", "c", "b"]


def test_requests_are_served_by_arrival_and_recorded_in_the_order_given():
    requests = [
        Request("late", 1, 1, arrival=0.5),
        Request("middle", 1, 1, arrival=0.25),
        Request("first", 1, 1),
    ]
    trace = run(requests, seats=1)
    assert admission_order(trace) == ["first", "middle", "late"]
    assert [record.id for record in trace.requests] == ["late", "middle", "first"]


def test_the_order_in_which_requests_are_given_matters_to_ties_alone():
    requests = random_workload(3)
    times = [request.arrival for request in requests]
    assert len(set(times)) == len(times)
    shuffled = random.Random(0).sample(requests, len(requests))
    assert run(requests, seats=3).steps == run(shuffled, seats=3).steps


# --- rejections


class Fussy(CostExecutor):
    """Reject what a model would."""

    def check(self, request):
        if request.id.startswith("odd"):
            raise ValueError(f"request {request.id!r}: odd")


def test_rejections_keep_their_place_and_their_reason_while_the_others_are_served():
    requests = [
        Rejected("line", "line 1: not JSON", 4.0),
        Request("a", 2, 3),
        Request("odd one", 2, 3, client="c"),
        Request("long", 99, 9, arrival=7.0),
        Request("a", 1, 1),
        Request("text", "not resolved", 2),
        Request("b", 2, 2),
    ]
    trace = run(requests, executor=Fussy(UNIT_STEP))
    assert [record.id for record in trace.requests] == [request.id for request in requests]
    assert [record.arrival for record in trace.requests] == [4.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0]
    errors = [record.error for record in trace.requests]
    assert errors[0] == "line 1: not JSON"
    assert errors[2] == "request 'odd one': odd"
    assert [error is None for error in errors] == [False, True, False, False, False, False, True]
    for place in (3, 4, 5):
        assert repr(requests[place].id) in errors[place]
    assert [record.num_prompt_tokens for record in trace.requests] == [None, 2, 2, 99, 1, None, 2]
    assert [record.max_tokens for record in trace.requests] == [None, 3, 3, 9, 1, 2, 2]
    assert trace.requests[2].client == "c"
    assert [record.id for record in trace.served] == ["a", "b"]
    assert set(trace.outputs) == {"a", "b"}
    assert [len(record.tokens) for record in trace.requests] == [0, 3, 0, 0, 0, 0, 2]


def test_the_arrival_of_a_rejected_request_takes_no_step_and_no_time():
    alone = [Request("a", 1, 2), Request("b", 1, 2, arrival=9.0)]
    rejected = [
        Rejected("x", "bad", 4.0),
        Request("long", 99, 9, arrival=5.0),
        Request("late", 99, 9, arrival=77.0),
    ]
    assert run([*alone, *rejected]).steps == run(alone).steps


def test_a_duplicate_that_arrives_first_is_the_one_that_is_served():
    requests = [Request("a", 1, 2, arrival=5.0), Request("a", 1, 3, arrival=1.0)]
    trace = run(requests)
    assert [record.error is None for record in trace.requests] == [False, True]


@pytest.mark.parametrize(
    "requests", [[], [Rejected("a", "why")], [Request("a", 99, 9)]], ids=["none", "rejected", "long"]
)
def test_a_run_without_a_request_to_serve_has_no_steps_and_takes_no_time(requests):
    trace = run(requests)
    assert trace.steps == ()
    assert trace.duration == 0
    assert len(trace.requests) == len(requests)


def test_requests_may_come_from_a_generator():
    assert run(request for request in random_workload(4)).steps == run(random_workload(4)).steps


# --- watching, and executors that fail


def test_on_step_sees_each_record_once_as_it_comes():
    seen = []
    trace = run(random_workload(5), on_step=seen.append)
    assert tuple(seen) == trace.steps


def test_a_trace_names_the_policy_and_the_limits():
    trace = run([Request("a", 1, 1)], "sjf", seats=3, budget=5, num_blocks=7)
    assert (trace.policy, trace.scheduler, trace.cache) == ("sjf", SchedulerConfig(3, 5), CacheConfig(7, 1))


def test_an_executor_that_fails_stops_the_run_with_its_own_error():
    class Broken(CostExecutor):
        def execute(self, plan):
            if plan.step == 2:
                raise FloatingPointError("not finite")
            return super().execute(plan)

    with pytest.raises(FloatingPointError, match="not finite"):
        run([Request("a", 1, 5)], executor=Broken(UNIT_STEP))


@pytest.mark.parametrize("duration", [math.nan, -1.0, -1e-9, math.inf, None, "soon", [1.0], 1j])
def test_a_step_that_takes_no_real_time_stops_the_run_and_names_the_step(duration):
    cost = CostExecutor(lambda plan: duration if plan.step == 1 else 1.0)
    with pytest.raises(ValueError, match=f"step 1.*{duration}"):
        run([Request("a", 1, 3)], executor=cost)


def test_steps_that_take_no_time_are_allowed():
    trace = run(random_workload(6), executor=CostExecutor(lambda plan: 0.0))
    assert all(record.finish_reason for record in trace.requests)
    assert trace.duration == max(record.arrival for record in trace.requests)


def test_a_token_that_the_executor_says_ends_the_output_ends_it():
    class Ending(CostExecutor):
        def execute(self, plan):
            result = super().execute(plan)
            return StepResult(result.duration, result.tokens, frozenset({"a"} if plan.step == 2 else ()))

    trace = run([Request("a", 1, 9), Request("b", 1, 5)], executor=Ending(UNIT_STEP))
    assert [(len(record.tokens), record.finish_reason) for record in trace.requests] == [
        (3, "stop"),
        (5, "length"),
    ]


# --- nothing but the arguments decides


def test_the_hosts_clock_does_not_reach_a_simulated_run(no_clocks):
    cost = Linear(step=0.01, token=0.003, context=0.0001)
    plain = run(random_workload(7), executor=CostExecutor(cost), seats=3)

    with no_clocks():
        patched = run(random_workload(7), executor=CostExecutor(cost), seats=3)
    assert patched == plain


def test_the_module_level_random_generator_neither_decides_nor_is_used():
    random.seed(1)
    before = random.getstate()
    first = [run(random_workload(8), name, num_blocks=30) for name in POLICIES]
    assert random.getstate() == before
    random.seed(2)
    assert [run(random_workload(8), name, num_blocks=30) for name in POLICIES] == first


DIGEST = """
import hashlib, random
from cbresearch import CacheConfig, Request, SchedulerConfig, simulate
from cbresearch.costs import Linear

draw = random.Random(9)
requests = [
    Request(f"request {place}", draw.randint(1, 20), draw.randint(1, 9), arrival=draw.uniform(0, 9))
    for place in range(12)
]
sha, num_preemptions = hashlib.sha256(), 0
for name in ("fcfs", "prefill_first", "sjf", "static", "vllm_v1"):
    trace = simulate(
        requests,
        name,
        cost=Linear(0.7, 0.013, 0.0007),
        scheduler=SchedulerConfig(8, 64),
        cache=CacheConfig(30, 1),
    )
    num_preemptions += sum(record.num_preemptions for record in trace.requests)
    sha.update(repr((trace, list(trace.steps))).encode())
assert num_preemptions
print(sha.hexdigest())
"""


def test_a_run_has_the_same_bytes_in_every_process_under_any_hash_seed():
    digests = set()
    for seed in ("0", "1", "random"):
        result = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(result.stdout.strip())
    assert len(digests) == 1


def test_a_policy_is_asked_at_the_time_of_each_step():
    asked = []

    class Clocked(Policy):
        name = "clocked"

        def propose(self, view):
            asked.append(view.now)
            return super().propose(view)

    scheduler = Scheduler(Clocked(), SchedulerConfig(), CacheConfig(64, 1))
    trace = serve(random_workload(10), scheduler, CostExecutor(Linear(step=0.3)))
    assert asked == [step.start for step in trace.steps]


def test_on_finish_sends_the_next_request_of_a_client_once_its_answer_is_there():
    def follow(record):
        user, turn = record.id.split("-")
        if int(turn) < 3:
            yield Request(
                f"{user}-{int(turn) + 1}", 2, 2, arrival=record.finish + (0.5 if user == "a" else 0)
            )

    trace = simulate([Request("a-0", 2, 2), Request("b-0", 2, 3, arrival=1.5)], "fcfs", on_finish=follow)
    assert [record.id for record in trace.requests] == [f"{u}-{n}" for n in range(4) for u in "ab"]
    by_id = {record.id: record for record in trace.requests}
    for user, pause in (("a", 0.5), ("b", 0.0)):
        for turn in range(1, 4):
            earlier, later = by_id[f"{user}-{turn - 1}"], by_id[f"{user}-{turn}"]
            assert later.arrival == earlier.finish + pause
            assert later.first_scheduled >= later.arrival


def test_on_finish_of_a_rejected_request_is_served_and_never_arrives_in_the_past():
    def follow(record):
        return [Request("second", 2, 1)] if record.is_rejected else []

    requests = [Request("long", 2, 1, arrival=3.0), Request("too long", 99, 1, arrival=3.0)]
    trace = simulate(requests, "fcfs", cache=CacheConfig(2, 4), on_finish=follow)
    assert [record.id for record in trace.requests] == ["long", "too long", "second"]
    assert (trace.requests[2].arrival, trace.requests[2].finish_reason) == (3.0, "length")


# --- what a run records


def test_a_record_tells_when_the_scheduler_got_to_know_a_request():
    requests = [
        Request("a", 1, 2),
        Request("during a step", 1, 1, arrival=0.5),
        Rejected("x", "bad", 0.5),
        Request("long", 99, 9, arrival=3.0),
    ]
    assert [record.queued for record in run(requests).requests] == [0.0, 1.0, None, None]


def test_a_trace_names_what_recorded_it():
    scheduler = Scheduler(Policy(), SchedulerConfig(), CacheConfig(8, 1))
    origin = Origin("other", "1.2", "tiny")
    assert serve([], scheduler, CostExecutor(UNIT_STEP), origin=origin).origin == origin
    assert run([]).origin.engine == "cbresearch"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_writer_gets_the_steps_and_requests_of_the_trace(policy, tmp_path):
    requests = [*random_workload(11), Rejected("x", "bad", 2.0), Request("long", 99, 9, arrival=3.0)]
    limits, cache = SchedulerConfig(3, 64), CacheConfig(30, 1)
    with TraceWriter(tmp_path / "run.jsonl", policy=policy, scheduler=limits, cache=cache) as writer:
        scheduler = Scheduler(policies.get(policy), limits, cache)
        trace = serve(requests, scheduler, CostExecutor(UNIT_STEP), writer=writer)
    written = load(tmp_path / "run.jsonl")
    assert written.steps == trace.steps
    assert sorted(written.requests, key=str) == sorted(trace.requests, key=str)


def test_a_writer_keeps_what_was_served_before_the_run_stopped(tmp_path):
    class Broken(CostExecutor):
        def execute(self, plan):
            if plan.step == 3:
                raise FloatingPointError("not finite")
            return super().execute(plan)

    limits, cache = SchedulerConfig(), CacheConfig(30, 1)
    with TraceWriter(tmp_path / "run.jsonl", policy="fcfs", scheduler=limits, cache=cache) as writer:
        scheduler = Scheduler(policies.get("fcfs"), limits, cache)
        with pytest.raises(FloatingPointError):
            serve([Request("a", 1, 2), Request("b", 1, 9)], scheduler, Broken(UNIT_STEP), writer=writer)
    written = load(tmp_path / "run.jsonl")
    assert len(written.steps) == 3
    by_id = {record.id: record for record in written.requests}
    assert (by_id["a"].finish_reason, by_id["b"].finish_reason) == ("length", None)
    assert len(by_id["b"].tokens) == 3


def test_a_writer_keeps_the_tokens_of_steps_that_were_taken_at_once(tmp_path):
    def stop(record):
        raise InterruptedError

    limits, cache = SchedulerConfig(), CacheConfig(300, 1)
    with TraceWriter(tmp_path / "run.jsonl", policy="fcfs", scheduler=limits, cache=cache) as writer:
        scheduler = Scheduler(policies.get("fcfs"), limits, cache)
        executor = CostExecutor(UNIT_STEP)
        with pytest.raises(InterruptedError):
            serve(
                [Request("a", 1, 20), Request("b", 1, 90)], scheduler, executor, on_finish=stop, writer=writer
            )
    written = load(tmp_path / "run.jsonl")
    assert len(written.parts) < len(written.steps) == 20
    assert [record.token_times for record in written.requests] == [tuple(map(float, range(1, 21)))] * 2
    assert [record.finish_reason for record in written.requests] == ["length", None]


# --- the loop on a clock of the caller's


def test_a_loop_takes_steps_on_the_callers_clock():
    scheduler = Scheduler(Policy(), SchedulerConfig(), CacheConfig(8, 1))
    loop, now = Loop(scheduler, Fussy(Linear(step=0.25))), iter((1.0, 2.0, 5.0, 6.0))
    with pytest.raises(ValueError, match="odd"):
        loop.validate(Request("odd one", 1, 1))
    with pytest.raises(ValueError, match="'long'"):
        loop.submit(Request("long", 99, 1), 0.5)
    state = loop.submit(Request("a", 1, 2), 0.5)
    record, finished = loop.step(lambda: next(now))
    # The first clock is for the policy, the second one is when the step began.
    assert (record.start, record.end, finished) == (2.0, 2.25, ())
    record, finished = loop.step(lambda: next(now))
    assert (record.start, finished) == (6.0, (state,))
    assert (state.queued, state.first_scheduled, state.token_times) == (0.5, 1.0, [2.25, 6.25])


def test_a_writer_gets_the_end_of_a_request_that_is_aborted_between_steps(tmp_path):
    limits, cache = SchedulerConfig(2), CacheConfig(20)
    scheduler = Scheduler(policies.get("fcfs"), limits, cache)

    def abort(record):
        if record.plan.step == 2:
            scheduler.abort("a")

    path = tmp_path / "run.jsonl"
    with TraceWriter(path, policy="fcfs", scheduler=limits, cache=cache) as writer:
        requests = [Request("a", 3, 9), Request("b", 3, 9)]
        trace = serve(requests, scheduler, CostExecutor(UNIT_STEP), on_step=abort, writer=writer)
    assert [record.finish_reason for record in trace.requests] == ["abort", "length"]
    assert load(path) == trace


def test_a_client_that_sends_a_request_behind_its_deadline_or_none_at_all_does_not_end_the_run():
    late = Request("late", 5, 3, deadline=0.5)
    asked = []

    def on_finish(record):
        asked.append(record.id)
        return [late] if record.id == "a" else None

    trace = simulate([Request("a", 5, 3)], on_finish=on_finish)
    assert asked == ["a", "late"]
    assert [len(record.tokens) for record in trace.requests] == [3, 3]
    with pytest.raises(TypeError, match="entry 0 of the requests is 5"):
        simulate([Request("a", 5, 3)], on_finish=lambda record: [5])
