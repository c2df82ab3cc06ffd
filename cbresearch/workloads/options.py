"""Options behind a workload's name: `chat:rate=4,n=200`."""

import inspect
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any

from cbresearch.workloads.lines import suggestion


def parse_options(name: str, text: str, known: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the options of a workload; one without a value means True.

    Args:
        name: The workload, for error messages.
        text: What stands behind the colon, separated by commas.
        known: The parameters that may be given, by name.

    Raises:
        ValueError: An option is unknown (near misses are suggested), given twice, or of a false kind.
    """
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, separator, value = part.partition("=")
        if key not in known:
            remedy = suggestion(key, known) if known else "it has none"
            raise ValueError(f"workload {name!r} has no option {key!r}; {remedy}")
        if key in options:
            raise ValueError(f"workload {name!r}: option {key} is given twice; give it once")
        options[key] = _checked(name, key, _value(value) if separator else True, known[key].default)
    return options


def keyword_options(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function that can be given by name only."""
    parameters = inspect.signature(function).parameters
    return {key: value for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _checked(name: str, key: str, value: Any, default: Any) -> Any:
    """Return a value of the kind that the default is; a default of None stands for a number."""
    kinds: tuple[type, ...]
    if isinstance(default, bool):
        kinds, remedy = (bool,), "True or False"
    elif isinstance(default, str):
        kinds, remedy = (str,), f"a text, such as {default}"
    elif isinstance(default, int):
        kinds, remedy = (int,), f"a whole number, such as {default}"
    else:
        kinds, remedy = (int, float), "a number"
    if type(value) not in kinds:
        raise ValueError(f"workload {name!r}: option {key} is {value!r}; it must be {remedy}")
    return value
