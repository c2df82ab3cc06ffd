"""Names with options, such as `static:release` or `chat:rate=4,n=200`: read, checked and built."""

import difflib
import inspect
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

T = TypeVar("T")

_REMEDIES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split a name from its options: `"chat:rate=4,shared"` gives `("chat", {"rate": 4, "shared": True})`.

    Args:
        text: The name, and behind a colon the options, separated by commas; one without a value means True.

    Returns:
        The name and its options; a value that is no Python literal stays text.

    Raises:
        ValueError: An option is given twice.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, rest.split(","))):
        key, separator, value = part.partition("=")
        if key in options:
            raise ValueError(f"{text!r}: option {key} is given twice; give it once")
        options[key] = _value(value) if separator else True
    return name, options


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the near misses of a name as a question, or else all that is known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there is {', '.join(map(repr, known))}" if known else "it has none"


def build(kind: str, text: str, factories: Mapping[str, Callable[..., T]]) -> T:
    """Call the factory that a text names with the options that it gives.

    Args:
        kind: What is built, for error messages, such as "policy".
        text: A name with options, as for `parse`.
        factories: Functions or classes by name; their parameters are the options.

    Raises:
        ValueError: The name or an option is unknown (near misses are suggested), missing, or its value is not
            of the type that the factory's signature states.
    """
    name, options = parse(text)
    if name not in factories:
        raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, factories)}")
    known = inspect.signature(factories[name]).parameters
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{kind} {name!r} has no option {key!r}; {suggestion(key, known)}")
        types = get_args(known[key].annotation) or (known[key].annotation,)
        accepts = {*types, int} if float in types else {*types}
        remedies = [_REMEDIES[each] for each in types if each in _REMEDIES]
        if remedies and type(value) not in accepts:
            raise ValueError(
                f"{kind} {name!r}: option {key} is {value!r}; it must be {' or '.join(remedies)}"
            )
    for key, parameter in known.items():
        required = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if required and parameter.default is parameter.empty and key not in options:
            raise ValueError(f"{kind} {name!r} needs the option {key!r}; write {name}:{key}=…")
    return factories[name](**options)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
