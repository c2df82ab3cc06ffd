"""Scheduling policies: build one by name with `get`, add your own with `register`."""

import inspect
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from cbresearch import names
from cbresearch.policies import base, batching, fairness, memory, servers, size, urgency
from cbresearch.policies.base import Policy as Policy
from cbresearch.policies.base import Proposal as Proposal
from cbresearch.policies.base import View as View
from cbresearch.policies.base import in_turn as in_turn
from cbresearch.policies.base import joining as joining
from cbresearch.policies.base import queued as queued
from cbresearch.policies.base import whole as whole
from cbresearch.policies.memory import Admitting as Admitting
from cbresearch.policies.size import Ranked as Ranked

PolicyClass = TypeVar("PolicyClass", bound=type[Policy])


class Entry(NamedTuple):
    """What is known of a policy.

    Attributes:
        rule: The policy's rule in one line.
        family: "batching", "size", "memory", "fairness", "slo" or "locality".
        source: Where the rule was published; empty for a policy of your own that names none.
    """

    rule: str
    family: str
    source: str


# The one registry of the package: a notebook cell adds to it, and every entry point looks names up in it. It
# starts with the classes that say where their rule was published; the others are bases. "continuous" is what
# many call the first.
_REGISTRY: dict[str, type[Policy]] = {
    policy.name: policy
    for module in (base, batching, fairness, memory, servers, size, urgency)
    for policy in vars(module).values()
    if isinstance(policy, type) and issubclass(policy, Policy) and "source" in vars(policy)
} | {"continuous": Policy}


def register(policy: PolicyClass) -> PolicyClass:
    """Make a policy class known under its `name`; usable as a decorator.

    A class replaces the one of its own name and module, and in a notebook any other class of the notebook.

    Raises:
        TypeError: It is no policy class.
        ValueError: The class has no name of its own, or another class holds that name.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise TypeError(f"{policy!r} is no policy class; register the class itself, derived from Policy")
    if not (name := vars(policy).get("name")) or not isinstance(name, str) or names.parse(name) != (name, {}):
        remedy = "set one, without a colon, so that it can be asked for"
        raise ValueError(f"{policy.__name__} has no `name` of its own; {remedy}")
    known = _REGISTRY.get(policy.name, policy)
    # A notebook cell that is run again defines the class again, perhaps under another name.
    is_again = policy.__module__ == "__main__" or known.__qualname__ == policy.__qualname__
    if known.__module__ != policy.__module__ or not is_again:
        raise ValueError(
            f"policy name {policy.name!r} belongs to {known.__name__} of {known.__module__}; choose another"
        )
    _REGISTRY[policy.name] = policy
    return policy


def available() -> Mapping[str, str]:
    """Return the known policy names, each with its one-line rule."""
    return {name: entry.rule for name, entry in table().items()}


def table() -> Mapping[str, Entry]:
    """Return the known policies by name, each with its one-line rule, its family and its source."""
    return {
        # A base's source is not that of a policy derived from it.
        name: Entry(
            (inspect.getdoc(policy) or "").split("\n")[0], policy.family, vars(policy).get("source", "")
        )
        for name, policy in sorted(_REGISTRY.items())
        if name == policy.name
    }


def get(name: str | Policy) -> Policy:
    """Build a policy from its name, such as `"sjf"` or `"static:release"` or `"past_future:reserved=0.05"`.

    Options follow the name after a colon, separated by commas; one without a value means True. A class in a
    Python file is a name too: `"mine.py:MyPolicy"` or `"mine.py:MyPolicy:alpha=0.5"` runs the file.

    Args:
        name: The name, or a policy, which is returned as it is.

    Raises:
        TypeError: It is neither a name nor a policy, such as a class that was not called.
        ValueError: The name or an option is unknown (near misses are suggested), missing, or of another type;
            or there is no such file, or no such class in it; or its constructor fails.
    """
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str):
        raise TypeError(f"the policy is {name!r}; give the name of one, or a policy built from its class")
    known, _ = names.parse(name)
    from_file = {known: names.load("policy", known, Policy)} if ".py:" in known else {}
    try:
        built = names.build("policy", name, from_file or _REGISTRY)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and known in str(error):
            raise
        remedy = "give other options, or correct the class"
        raise ValueError(f"policy {name!r} cannot be built: {names.described(error)}; {remedy}") from error
    # The options are part of a run's name.
    built.name = name
    return built
