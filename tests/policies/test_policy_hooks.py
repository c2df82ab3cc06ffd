"""A hook that misbehaves is named with its policy, and no request is lost."""

import traceback

import numpy as np
import pytest
from helpers.core import Referee

from cbresearch import CacheConfig, Request, SchedulerConfig, simulate
from cbresearch.costs import Linear
from cbresearch.policies import Policy, queued, whole
from cbresearch.request import RequestState
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Loop
from cbresearch.simulator import CostExecutor

STRANGER = RequestState(Request("z", 4, 4), order=0)


def requests(number=5):
    return [Request(f"r{n}", 6, 7, priority=-n, client=f"c{n % 2}") for n in range(number)]


def tight(policy, num_host_blocks=0):
    """Return a scheduler whose pool is too small for what it is to serve at once."""
    return Scheduler(policy, SchedulerConfig(3, 16), CacheConfig(16, 2, num_host_blocks=num_host_blocks))


def policy_with(**hooks):
    """Return a policy whose class has these hooks."""
    return type("Odd", (Policy,), {"name": "odd", **hooks})()


def run_on(scheduler, steps=1000):
    """Serve until no request is left, checking every invariant after each step; return the steps."""
    loop, now = Loop(scheduler, CostExecutor(Linear(1.0))), 0.0
    records = []
    while scheduler.has_work and len(records) < steps:
        record, _ = loop.step(lambda now=now: now)
        records.append(record)
        now = record.end
        scheduler.check()
    return records


def fail(*arguments):
    raise KeyError("mistake")


def leave(*arguments):
    raise SystemExit(7)


def failing_generator(self, view):
    for place, proposal in enumerate(Policy.propose(self, view)):
        if place == 2:
            raise ZeroDivisionError("a third one")
        yield proposal


def of_running(value):
    """Return a `propose` that puts one odd proposal behind the first good one."""

    def propose(self, view):
        yield from list(Policy.propose(self, view))[:1]
        yield value(view) if callable(value) else value

    return propose


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"propose": lambda self, view: None}, "`propose` failed: TypeError"),
        ({"propose": lambda self, view: 3}, "`propose` failed: TypeError"),
        ({"propose": lambda self, view: [state.id for state in view.waiting]}, "`propose` failed"),
        ({"propose": lambda self, view: list(view.waiting)}, "`propose` failed: TypeError"),
        ({"propose": lambda self, view: "ab"}, "`propose` failed"),
        ({"propose": fail}, "`propose` failed: KeyError: 'mistake'"),
        ({"propose": failing_generator}, "`propose` failed: ZeroDivisionError: a third one"),
        ({"propose": lambda self, view: view.running.sort()}, "`propose` failed: AttributeError"),
        ({"propose": of_running(("r1", 2))}, "'str' object.*it must yield pairs of a request of the view"),
        ({"propose": of_running(None)}, "yield pairs of a request of the view and a number of tokens"),
        ({"propose": of_running((STRANGER, 2))}, "'z'.*propose requests of the view only"),
        *(
            (
                {"propose": of_running(lambda view, bad=bad: (next(iter(view.waiting)), bad))},
                "must be an integer",
            )
            for bad in (
                1.0,
                0.5,
                -1.5,
                0.0,
                True,
                False,
                float("nan"),
                -float("inf"),
                "3",
                None,
                np.float32(2),
            )
        ),
        *(
            ({hook: leave}, f"`{hook}` failed: SystemExit: 7")
            for hook in ("begin", "propose", "victim", "served")
        ),
        ({"begin": fail}, "`begin` failed: KeyError: 'mistake'"),
        ({"wakes": fail}, "`wakes` failed: KeyError: 'mistake'"),
        ({"wakes": lambda self, view: float("nan")}, "what its `wakes` returns is nan"),
        ({"wakes": lambda self, view: float("inf")}, "what its `wakes` returns is inf"),
        ({"wakes": lambda self, view: "soon"}, "what its `wakes` returns is 'soon'"),
        ({"wakes": lambda self, view: True}, "what its `wakes` returns is True"),
        ({"wakes": lambda self, view: view.now + 1}, "`wakes` put off step 0 100000 times"),
        ({"victim": fail}, "`victim` failed: KeyError: 'mistake'"),
        ({"victim": lambda self, view, candidates: None}, "`victim` chose None"),
        ({"victim": lambda self, view, candidates: STRANGER}, "`victim` chose .*'z'"),
        ({"victim": lambda self, view, candidates: next(iter(view.waiting))}, "`victim` chose .*waiting"),
        ({"victim": lambda self, view, candidates: candidates[0].id}, "`victim` chose 'r0'"),
        ({"victim": lambda self, view, candidates: np.arange(3)}, "`victim` chose array"),
        ({"displace": fail}, "`displace` failed: KeyError: 'mistake'"),
        ({"displace": lambda self, view, waiting, candidates: STRANGER}, "`displace` chose .*'z'"),
        ({"displace": lambda self, view, waiting, candidates: waiting}, "`displace` chose .*waiting"),
        ({"displace": lambda self, view, waiting, candidates: False}, "`displace` chose False"),
        ({"preemption": fail}, "`preemption` failed: KeyError: 'mistake'"),
        ({"preemption": lambda self, view, victim: None}, "preempted by None"),
        ({"preemption": lambda self, view, victim: "swop"}, "preempted by 'swop'"),
        ({"served": fail}, "`served` failed: KeyError: 'mistake'"),
        ({"fast_forward": "no"}, "fast_forward is 'no'; set it to True or False"),
        ({"fast_forward": 1}, "fast_forward is 1"),
        ({"pads_finished_rows": None}, "pads_finished_rows is None"),
        ({"joins_running_batch": "yes"}, "joins_running_batch is 'yes'"),
    ],
)
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_hook_that_misbehaves_is_named_with_its_policy(hooks, said, fast_forward):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"(?s)policy 'odd'.*{said}"):
        simulate(
            requests(),
            policy_with(**{"fast_forward": True, **hooks}),
            scheduler=SchedulerConfig(3, 16),
            cache=CacheConfig(16, 2),
            fast_forward=fast_forward,
        )


def test_a_hook_that_fails_keeps_its_traceback():
    with pytest.raises(RuntimeError) as failure:
        simulate(requests(), policy_with(propose=failing_generator))
    shown = "".join(traceback.format_exception(failure.value))
    assert "in failing_generator" in shown
    assert "ZeroDivisionError: a third one" in shown
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


class Tripping(Policy):
    """Fail in one hook at one call, and do as a preemptive priority order does otherwise."""

    name = "tripping"

    def __init__(self, hook, calls):
        self.hook, self.calls = hook, calls

    def trip(self, hook):
        if hook == self.hook:
            self.calls -= 1
            if self.calls == 0:
                raise KeyError("tripped")

    def propose(self, view):
        for proposal in whole(sorted([*view.running, *queued(view)], key=lambda one: one.priority)):
            self.trip("propose")
            yield proposal
            self.trip("resume")

    def victim(self, view, candidates):
        self.trip("victim")
        return candidates.pop()

    def displace(self, view, waiting, candidates):
        self.trip("displace")
        worst = max(candidates, key=lambda one: one.priority, default=None)
        return worst if worst is not None and worst.priority > waiting.priority else None

    def preemption(self, view, victim):
        self.trip("preemption")
        return "swap" if victim.order % 2 else "recompute"

    def served(self, request, num_tokens):
        self.trip("served")


@pytest.mark.parametrize("hook", ["propose", "resume", "victim", "displace", "preemption", "served"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_step_that_fails_loses_no_request_and_the_next_ones_serve_them_all(hook, caching):
    num_failures = 0
    for calls in range(1, 40):
        policy = Tripping(hook, calls)
        cache = CacheConfig(11, 2, prefix_caching=caching, num_host_blocks=8, cache_on_schedule=caching)
        scheduler = Scheduler(policy, SchedulerConfig(3, 16), cache)
        states = [
            scheduler.submit(Request(one.id, (1, 2, one.priority + 9, 4, 5, 6), 7, priority=one.priority))
            for one in requests()
        ]
        # Where the hook fails behind the step, the referee does not see what came of it.
        referee = Referee(scheduler, 2000) if hook != "served" else None
        loop, now = Loop(scheduler, referee or CostExecutor(Linear(1.0))), 0.0
        while scheduler.has_work:
            try:
                record, _ = loop.step(lambda now=now: now)
                assert record.plan.num_tokens <= 16
                if referee is not None:
                    referee.after(record)
            except RuntimeError as error:
                assert "policy 'tripping:hook=" in str(error)
                num_failures += 1
            now += 1.0
            scheduler.check()
        assert [len(state.output_token_ids) for state in states] == [7] * 5
        assert scheduler.kv.num_free_blocks == 11
    assert num_failures > 1


def test_tokens_of_any_integer_type_are_proposed():
    steps = simulate(requests(), "fcfs", scheduler=SchedulerConfig(3, 16)).steps
    for kind in (np.int64, np.int8, np.uint64):

        def propose(self, view, kind=kind):
            return ((state, kind(wanted)) for state, wanted in Policy.propose(self, view))

        odd = policy_with(propose=propose)
        assert simulate(requests(), odd, scheduler=SchedulerConfig(3, 16)).steps == steps


def test_proposals_of_no_tokens_and_of_one_request_twice_are_passed_over():
    def propose(self, view):
        for state, wanted in Policy.propose(self, view):
            yield from [(state, 0), (state, -3), (state, wanted), (state, wanted)]

    steps = simulate(requests(), "fcfs", scheduler=SchedulerConfig(3, 16)).steps
    assert simulate(requests(), policy_with(propose=propose), scheduler=SchedulerConfig(3, 16)).steps == steps


def test_a_running_request_of_another_scheduler_is_rejected():
    other, mine = tight("fcfs"), None
    for one in requests(2):
        other.submit(one)
    other.schedule(0.0)
    mine = tight(policy_with(propose=lambda self, view: policy_proposals(other)))
    states = [mine.submit(one) for one in requests(2)]
    with pytest.raises(ValueError, match=r"policy 'odd' proposed .*'r0', running.*requests of the view only"):
        mine.schedule(0.0)
    mine.check()
    mine.policy = policy_with()
    run_on(mine)
    assert [len(state.output_token_ids) for state in states] == [7, 7]


def policy_proposals(scheduler):
    return [(state, 1) for state in scheduler.running]


def test_a_policy_may_put_off_a_step_again_and_again_as_long_as_it_ends():
    policy = policy_with(wakes=lambda self, view: view.now + 0.01 if view.now < 50 else None)
    assert simulate(requests(), policy).requests[0].first_scheduled == pytest.approx(50.0, abs=0.02)
    past = policy_with(wakes=lambda self, view: view.now - 5)
    assert simulate(requests(), past).steps == simulate(requests(), "fcfs").steps


@pytest.mark.parametrize("policy", ["vtc", "dlpm", "mlfq", "past_future"])
def test_no_account_is_kept_of_a_request_that_was_aborted(policy):
    scheduler = tight(policy, num_host_blocks=8)
    for round_ in range(4):
        for n in range(6):
            scheduler.submit(Request(f"{round_}/{n}", 4, 9, client=f"c{n % 2}"))
        run_on(scheduler, 3)
        for n in range(6):
            if f"{round_}/{n}" in [state.id for state in (*scheduler.running, *scheduler.waiting)]:
                scheduler.abort(f"{round_}/{n}")
    kept = {name: value for name, value in vars(scheduler.policy).items() if isinstance(value, dict)}
    assert all(len(value) <= 2 for value in kept.values()), kept
    assert not getattr(scheduler.policy, "_outputs", ()), "an aborted output is not as long as it would be"


@pytest.mark.parametrize("status", ["waiting", "running", "swapped"])
def test_served_is_told_of_an_abort_with_no_tokens(status):
    told = []

    class Listening(Policy):
        """Write down what is served."""

        name = "listening"

        def served(self, request, num_tokens):
            told.append((request.id, num_tokens, request.finish_reason))

    scheduler = tight(Listening(), num_host_blocks=16)
    scheduler.submit(Request("a", 4, 9))
    if status != "waiting":
        run_on(scheduler, 2)
    if status == "swapped":
        scheduler.preempt("a", "swap")
    scheduler.abort("a")
    assert told[-1] == ("a", 0, "abort")
    assert told[:-1] == ([] if status == "waiting" else [("a", 4, None), ("a", 1, None)])
