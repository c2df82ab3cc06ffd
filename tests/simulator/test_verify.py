"""`simulate(verify=True)` proves a policy's fast_forward on a workload, and finds one that lies."""

import re

import numpy as np
import pytest
from fuzz_fast_forward import limits, workload
from fuzz_policies import POLICIES

from cbresearch import CacheConfig, Policy, Request, SchedulerConfig, simulate
from cbresearch.costs import Linear
from cbresearch.policies import joining, queued, whole
from cbresearch.step import DecodeRun
from cbresearch.workloads import Exponential, Geometric, Poisson, Uniform, conversations

COST = Linear(0.3, 0.01, 0.0007)


@pytest.mark.parametrize("policy", POLICIES)
def test_verify_proves_fast_forward_of_every_policy(policy):
    for seed in range(6):
        rng = np.random.default_rng(1000 + seed)
        requests = workload(rng)
        config, cache = limits(requests, rng)
        trace = simulate(requests, policy, cost=COST, scheduler=config, cache=cache, verify=True)
        assert trace == simulate(requests, policy, cost=COST, scheduler=config, cache=cache)


def test_verify_returns_the_trace_of_the_run_itself():
    requests = [Request(str(place), 5, 40, arrival=3.0 * place) for place in range(8)]
    trace = simulate(requests, "fcfs", verify=True)
    assert any(isinstance(part, DecodeRun) for part in trace.parts)
    assert trace == simulate(requests, "fcfs")


def test_verify_asks_a_client_that_remembers_its_run_once():
    sessions = conversations(
        Poisson(0.5),
        6,
        np.random.default_rng(3),
        turns=Geometric(4.0),
        texts=Uniform(5, 40),
        outputs=Uniform(3, 30),
        think=Exponential(2.0),
    )
    cache = CacheConfig(2000)
    requests, on_finish = sessions.start()
    trace = simulate(requests, cost=COST, cache=cache, on_finish=on_finish, verify=True)
    requests, on_finish = sessions.start()
    assert trace == simulate(requests, cost=COST, cache=cache, on_finish=on_finish)
    assert len(trace.requests) == sessions.num_requests > len(requests)
    assert any(isinstance(part, DecodeRun) for part in trace.parts)


class Patient(Policy):
    """Let a request wait 10 seconds before it joins, and say that no decision turns on the time."""

    name = "patient"
    fast_forward = True

    def propose(self, view):
        yield from whole(view.running)
        # A queue alone is served at once, so that the run goes on.
        old = (state for state in queued(view) if view.now - state.arrival >= 10 or not view.running)
        yield from joining(view, old)


def patient_workload():
    return [Request("a", 5, 100), Request("b", 5, 5, arrival=2.5)]


def test_verify_finds_a_policy_that_wrongly_says_fast_forward_and_names_it_and_the_step():
    stepped = simulate(patient_workload(), Patient(), fast_forward=False)
    fast = simulate(patient_workload(), Patient())
    # What the run would show, were it not verified.
    assert [trace.requests[1].first_scheduled for trace in (stepped, fast)] == [13.0, 100.0]
    with pytest.raises(RuntimeError, match=r"policy 'patient' says fast_forward, but step \d+") as error:
        simulate(patient_workload(), Patient(), verify=True)
    step = int(re.search(r"step (\d+)", str(error.value))[1])
    first = next(place for place in range(200) if fast.steps[place] != stepped.steps[place])
    assert step == first
    assert "fast_forward" in str(error.value).partition("; ")[2]
    assert str(error.value).count("StepRecord") == 2


class Told(Policy):
    """Serve the lowest level first, 8 tokens served to a level, and say that levels do not change."""

    name = "told"
    fast_forward = True

    def begin(self):
        self.tokens = {}

    def propose(self, view):
        running = sorted(view.running, key=lambda state: self.tokens.get(state.id, 0) // 8)
        yield from whole(running)
        yield from joining(view, queued(view))

    def served(self, request, num_tokens):
        self.tokens[request.id] = self.tokens.get(request.id, 0) + num_tokens


class Slim(Policy):
    """Preempt the newest request once fewer than 4 blocks are free, and say that blocks do not matter."""

    name = "slim"
    fast_forward = True

    def propose(self, view):
        few = view.num_free_blocks < 4
        for state in view.running:
            if not (few and state is view.running[-1]):
                yield state, state.num_tokens - state.num_computed_tokens
        yield from joining(view, queued(view))


@pytest.mark.parametrize("policy", [Told, Slim])
def test_verify_finds_decisions_that_turn_on_tokens_served_or_free_blocks(policy):
    requests = [Request(str(place), 3 + 9 * place, 40, arrival=6.0 * place) for place in range(5)]
    with pytest.raises(RuntimeError, match=f"policy '{policy.name}' says fast_forward, but"):
        simulate(requests, policy(), cache=CacheConfig(14, 16), scheduler=SchedulerConfig(4), verify=True)
    # A class that says nothing is stepped, so there is nothing to find.
    honest = type("Honest", (policy,), {"name": "honest"})
    trace = simulate(requests, honest(), cache=CacheConfig(14, 16), scheduler=SchedulerConfig(4), verify=True)
    assert not any(isinstance(part, DecodeRun) for part in trace.parts)


def test_verify_of_a_run_in_which_requests_follow_others_asks_for_them_anew():
    def follow(record):
        return [Request(record.id + "+", 3, 30, arrival=record.finish + 0.5)] if len(record.id) < 4 else []

    requests = [Request("a", 3, 30), Request("b", 3, 20)]
    trace = simulate(requests, "fcfs", on_finish=follow, verify=True)
    assert len(trace.requests) == 8


@pytest.mark.parametrize("fast_forward", [True, False])
def test_verify_calls_on_step_once_for_each_step(fast_forward):
    seen = []
    options = {"on_step": seen.append, "fast_forward": fast_forward}
    trace = simulate([Request("a", 3, 30)], "fcfs", verify=True, **options)
    assert tuple(seen) == trace.steps


def test_verify_finds_a_lie_even_if_on_step_is_given():
    with pytest.raises(RuntimeError, match="policy 'patient' says fast_forward"):
        simulate(patient_workload(), Patient(), on_step=lambda record: None, verify=True)
