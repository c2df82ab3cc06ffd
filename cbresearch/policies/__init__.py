"""Scheduling policies: build one by name with `get`, add your own with `register`."""

import difflib
import inspect
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.policies.batching import PrefillFirst, Static
from cbresearch.policies.fairness import DeficitLongestPrefix, LongestPrefixMatch, VirtualTokenCounter
from cbresearch.policies.memory import Admitting, MaxUtilization, NewTokenRatio, NoEvict, PastFuture
from cbresearch.policies.servers import Orca, Sarathi, SplitFuse, VllmV0, VllmV1
from cbresearch.policies.size import (
    HighestResponseRatioNext,
    LearningToRank,
    MemoryCheckedShortestFirst,
    Ranked,
    ShortestJobFirst,
    ShortestRemaining,
    SkipJoinFeedback,
    Trail,
)
from cbresearch.policies.urgency import Andes, EarliestDeadline, LeastSlack, Priority

__all__ = [
    "Admitting",
    "Entry",
    "Policy",
    "Proposal",
    "Ranked",
    "View",
    "available",
    "get",
    "in_turn",
    "joining",
    "queued",
    "register",
    "table",
    "whole",
]

PolicyClass = TypeVar("PolicyClass", bound=type[Policy])

# The one registry of the package: a notebook cell adds to it, and every entry point looks names up in it.
_REGISTRY: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Policy,
        Static,
        PrefillFirst,
        Orca,
        VllmV0,
        VllmV1,
        Sarathi,
        SplitFuse,
        ShortestJobFirst,
        ShortestRemaining,
        LearningToRank,
        Trail,
        SkipJoinFeedback,
        HighestResponseRatioNext,
        MemoryCheckedShortestFirst,
        NoEvict,
        MaxUtilization,
        PastFuture,
        NewTokenRatio,
        VirtualTokenCounter,
        DeficitLongestPrefix,
        LongestPrefixMatch,
        Priority,
        EarliestDeadline,
        LeastSlack,
        Andes,
    )
}


class Entry(NamedTuple):
    """What is known of a policy.

    Attributes:
        rule: Its rule in one line.
        family: "batching", "size", "memory", "fairness", "slo" or "locality".
        source: Where the rule was published; empty for one of your own that names none.
    """

    rule: str
    family: str
    source: str


def register(policy: PolicyClass) -> PolicyClass:
    """Make a policy class known under its `name`; usable as a decorator.

    Raises:
        ValueError: The class has no name of its own, or another class holds that name.
    """
    if "name" not in vars(policy) or not policy.name:
        raise ValueError(f"{policy.__name__} has no `name` of its own; set one so that it can be asked for")
    known = _REGISTRY.get(policy.name)
    # A notebook cell that is run again defines the class again: the same qualified name may replace itself.
    if known is not None and (known.__module__, known.__qualname__) != (
        policy.__module__,
        policy.__qualname__,
    ):
        raise ValueError(f"policy name {policy.name!r} belongs to {known.__name__}; choose another")
    _REGISTRY[policy.name] = policy
    return policy


def available() -> Mapping[str, str]:
    """Return the known policy names, each with the one-line rule from its docstring."""
    return {name: entry.rule for name, entry in table().items()}


def table() -> Mapping[str, Entry]:
    """Return the known policies by name, each with its one-line rule, its family and its source."""
    return {
        name: Entry(
            (inspect.getdoc(policy) or "").partition("\n")[0],
            policy.family,
            # A base's source is not that of a policy derived from it.
            vars(policy).get("source", ""),
        )
        for name, policy in sorted(_REGISTRY.items())
    }


def get(name: str | Policy) -> Policy:
    """Build a policy from its name, such as `"sjf"` or `"static:release"` or `"past_future:reserved=0.05"`.

    Options follow the name after a colon, separated by commas; one without a value means True. A policy that
    is built already is returned as it is.

    Raises:
        TypeError: It is neither a name nor a policy, such as a class that was not called.
        ValueError: The name or an option is unknown (near misses are suggested), missing, or of a false kind.
    """
    if isinstance(name, Policy):
        return name
    if not isinstance(name, str):
        raise TypeError(f"the policy is {name!r}; give the name of one, or a policy built from its class")
    base, _, options = name.partition(":")
    policy = _REGISTRY.get(base)
    if policy is None:
        raise ValueError(f"unknown policy {base!r}; {suggestion(base, _REGISTRY)}")
    known = _options(policy)
    arguments = dict(_option(part) for part in options.split(",") if part)
    for option in arguments:
        if option not in known:
            raise ValueError(f"policy {base!r} has no option {option!r}; {suggestion(option, known)}")
    for option, parameter in known.items():
        given = arguments.get(option, parameter.default)
        if given is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ValueError(f"policy {base!r} needs the option {option!r}; write {base}:{option}=…")
        if isinstance(parameter.default, bool) and not isinstance(given, bool):
            raise ValueError(f"policy {base!r}: option {option} is {given!r}; it must be True or False")
    built = policy(**arguments)
    # The options are part of a run's name.
    built.name = name
    return built


def suggestion(name: str, known: Mapping[str, Any]) -> str:
    """Return a sentence that names the near misses of `name`, or all that is known."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    return f"there is {', '.join(repr(match) for match in sorted(known))}" if known else "it has none"


def _options(policy: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(policy).parameters


def _option(part: str) -> tuple[str, Any]:
    key, separator, text = part.partition("=")
    if not separator:
        return key, True
    if text.lower() in ("true", "false"):
        return key, text.lower() == "true"
    try:
        return key, literal_eval(text)
    except (ValueError, SyntaxError):
        return key, text
