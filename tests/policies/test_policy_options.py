"""Every option of every policy is checked when it is built, by name or by class, and is part of its name."""

import copy
import inspect
import math
import pickle
import re
from typing import get_args

import numpy as np
import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, policies, simulate
from cbresearch.policies import Policy
from cbresearch.scheduler import Scheduler
from cbresearch.simulator import replan

CLASSES = {name: type(policies.get(name)) for name in policies.available()}
OPTIONS = [
    (name, parameter)
    for name, policy in CLASSES.items()
    for parameter in list(inspect.signature(policy.__init__).parameters.values())[1:]
]
IDS = [f"{name}:{parameter.name}" for name, parameter in OPTIONS]
WRONG = [math.nan, math.inf, -math.inf, -1, -0.5, 10**400, 10**5000, 1e300, "abc", "", None, [1], b"1", 2, 7j]


def as_text(value):
    """Return a value as it is typed."""
    if value == math.inf:
        return "1e999"
    return "9" * 5000 if value == 10**5000 else value


def wrong_values(parameter):
    """Return the values that an option cannot have, whatever it counts."""
    if type(parameter.default) in (bool, str):
        return WRONG
    return [value for value in WRONG if value != 2] + [True, False] + [1.5] * (type(parameter.default) is int)


@pytest.mark.parametrize(("name", "parameter"), OPTIONS, ids=IDS)
def test_every_option_of_every_policy_rejects_what_it_cannot_be_when_built(name, parameter):
    for value in wrong_values(parameter):
        with pytest.raises(ValueError, match=f"policy '{name}': option {parameter.name} is ") as rejection:
            CLASSES[name](**{parameter.name: value})
        assert re.search("must be|choose", str(rejection.value))
        with pytest.raises(ValueError, match=f"option {parameter.name} "):
            policies.get(f"{name}:{parameter.name}={as_text(value)}")


@pytest.mark.parametrize(
    "name",
    [
        "dlpm:quantum=0",
        "static:wait=abc",
        "static:wait=",
        "mlfq:levels=0",
        "mlfq:quantum",
        "past_future:history=0",
        "past_future:reserved=1.5",
        "new_token_ratio:decay=0",
        "vllm_v0:watermark=2",
        "hrrn:token_seconds=0",
        "andes:speed=0",
        "lpm:shared=0",
        "vtc:output_weight=-1",
        "orca:reserve=min",
        "orca:reserve",
        "vllm_v1:priority=1",
        "static:wait={[]}",
        "static:wait=" + "(" * 5000,
        "static:release,release",
        "fcfs:quantum=3",
        "continuous:quantum=3",
    ],
)
def test_get_rejects_an_option_with_the_name_and_the_remedy(name):
    with pytest.raises(ValueError, match=re.escape(name.partition(":")[0])) as rejection:
        policies.get(name)
    assert re.search("must be|choose|give it once|it has none", str(rejection.value))


@pytest.mark.parametrize(("name", "parameter"), OPTIONS, ids=IDS)
def test_the_name_of_a_policy_that_was_built_with_an_option_builds_the_same_again(name, parameter):
    default = parameter.default
    value = {bool: True, str: "pow2", int: np.int64(7), float: np.float32(0.25)}[type(default)]
    built = CLASSES[name](**{parameter.name: value})
    assert built.name.startswith(f"{name}:{parameter.name}")
    assert vars(policies.get(built.name)) == vars(built)
    assert CLASSES[name](default).name == name if IDS.count(name) == 1 else CLASSES[name]().name == name


def test_the_trace_of_a_policy_object_keeps_its_options_and_can_be_replanned():
    trace = simulate([Request(str(n), 5, 3, arrival=n) for n in range(9)], policies.get("static:wait=3"))
    given = simulate([Request(str(n), 5, 3, arrival=n) for n in range(9)], CLASSES["static"](wait=3))
    assert given.policy == trace.policy == "static:wait=3"
    assert given.steps == trace.steps
    assert replan(given).num_equal == len(given.steps)


def test_a_policy_of_a_class_without_a_name_is_not_called_by_the_name_of_its_base():
    class Mine(Policy):
        """Do nothing else."""

        def __init__(self, weight: float = 1.0, key=len):
            self.weight, self.key = weight, key

    assert Mine().name == "Mine"
    assert Mine(2, key=max).name == "Mine:weight=2"

    class Named(Policy):
        """Do nothing else either."""

        name = "named"

    assert type("Heir", (Named,), {"__module__": __name__})().name == "named"
    trace = simulate([Request("a", 5, 3)], Mine())
    with pytest.raises(ValueError, match="unknown policy 'Mine'"):
        replan(trace)


def test_a_policy_rejects_an_option_that_its_class_does_not_have():
    with pytest.raises(TypeError, match=r"policy 'dlpm': .*'quanta'; its options: quantum"):
        CLASSES["dlpm"](quanta=3)
    for wrong in (lambda: Policy(3), lambda: CLASSES["sjf"](3), lambda: CLASSES["sjf"](starvation=3)):
        with pytest.raises(TypeError, match=r"its options: none"):
            wrong()


def test_a_policy_that_needs_an_option_can_be_copied_and_pickled():
    built = Needy(3)
    for again in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert (again.share, again.name) == (3, "Needy:share=3")


class Needy(Policy):
    """Need an option."""

    def __init__(self, share: float):
        self.share = share


def test_dlpm_gives_as_many_quanta_at_once_as_one_by_one():
    prompts = [tuple(range(n, n + 50 + 7 * n)) for n in range(12)]
    requests = [Request(str(n), prompt, 3, client=f"c{n % 3}") for n, prompt in enumerate(prompts)]

    class OneByOne(CLASSES["dlpm"]):
        """Give a client a quantum only when it is asked for."""

        def propose(self, view):
            yield from policies.whole(policies.in_turn(view))
            waiting = list(policies.queued(view))
            while waiting and view.admitting:
                while all(self.accounts[request.client] <= 0 for request in waiting):
                    for client in {request.client for request in waiting}:
                        self.accounts[client] += self.quantum
                head = next(request for request in waiting if self.accounts[request.client] > 0)
                waiting.remove(head)
                yield head, head.num_pending_tokens
                if head.seat is not None:
                    self.accounts[head.client] -= head.num_pending_tokens

    limits = SchedulerConfig(2, 1000)
    for quantum in (1, 3, 50):
        one = simulate(requests, OneByOne(quantum), scheduler=limits)
        assert simulate(requests, f"dlpm:quantum={quantum}", scheduler=limits).steps == one.steps


def test_dlpm_does_not_give_quanta_one_by_one_to_a_client_with_a_huge_debt():
    requests = [Request(str(n), 10**9, 1) for n in range(3)]
    trace = simulate(
        requests,
        "dlpm:quantum=1",
        scheduler=SchedulerConfig(1, 10**9),
        cache=CacheConfig(10**6, 1000),
    )
    assert [record.finish for record in trace.requests] == [1.0, 2.0, 3.0]


def test_every_annotation_of_an_option_says_its_type_and_range():
    for name, parameter in OPTIONS:
        is_checked = parameter.annotation is bool or get_args(parameter.annotation)
        assert is_checked, f"{name}: {parameter} has no range"


def test_a_scheduler_takes_a_policy_by_name_and_rejects_what_is_none():
    limits, cache = SchedulerConfig(), CacheConfig(10)
    assert Scheduler("static:wait=3", limits, cache).policy.wait == 3
    with pytest.raises(TypeError, match="give the name of one, or a policy built from its class"):
        Scheduler(Policy, limits, cache)
    with pytest.raises(ValueError, match="unknown policy 'fcsf'; did you mean 'fcfs'"):
        Scheduler("fcsf", limits, cache)


def test_continuous_is_another_name_of_fcfs():
    requests = [Request(str(n), 5, 3 + n % 4, arrival=0.5 * n) for n in range(9)]
    trace = simulate(requests, "continuous")
    assert trace.steps == simulate(requests, "fcfs").steps
    assert type(policies.get("continuous")) is Policy
    assert "continuous" not in policies.available()
