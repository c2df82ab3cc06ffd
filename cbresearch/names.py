"""The language of names with options: `name:option=value,option=value`, for policies, workloads and costs."""

import difflib
import inspect
import runpy
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

T = TypeVar("T")

_MOST_NAMED = 40
_TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split `name:option=value,flag` into the name and its options.

    Values are Python literals or else plain text; an option without a value means True. The name of something
    that a Python file defines, such as `mine.py:MyPolicy`, keeps its colon.

    Raises:
        ValueError: An option is given twice.
    """
    name, _, rest = text.partition(":")
    if name.endswith(".py"):
        defined, _, rest = rest.partition(":")
        name = f"{name}:{defined}"
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, rest.split(","))):
        option, separator, value = part.partition("=")
        if option in options:
            raise ValueError(f"{text!r}: option {option} is given twice; give it once")
        options[option] = _value(value) if separator else True
    return name, options


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a clause that names the near misses of `name`, or else what is known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return f"there is {', '.join(map(repr, known[:_MOST_NAMED]))}{more}" if known else "it has none"


def build(kind: str, text: str, factories: Mapping[str, Callable[..., T]]) -> T:
    """Build what a name with options stands for.

    Args:
        kind: What is built, such as "policy"; error messages begin with it.
        text: The name, with options after a colon.
        factories: Makes each thing from its options, by name. The options are checked against the signature:
            a value has the type of the parameter's default, or else of its annotation.

    Raises:
        ValueError: The name or an option is unknown (near misses are suggested), missing, given twice, or of
            another type.
    """
    name, options = parse(text)
    if name not in factories:
        raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, factories)}")
    parameters = inspect.signature(factories[name]).parameters.values()
    known = {one.name: one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{kind} {name!r} has no option {option!r}; {suggestion(option, known)}")
        _check_type(f"{kind} {name!r}: option {option}", value, known[option])
    for option, parameter in known.items():
        if option not in options and parameter.default is parameter.empty:
            raise ValueError(f"{kind} {name!r} needs the option {option!r}; write {name}:{option}=…")
    return factories[name](**options)


def load(kind: str, name: str, base: type[T]) -> type[T]:
    """Run a Python file and return the class that it defines, by a name such as `mine.py:MyPolicy`.

    Raises:
        ValueError: There is no such file, or it defines no such subclass of `base`.
    """
    path, _, defined = name.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"{kind} {name!r}: there is no file {path!r} in {Path.cwd()}; give its path")
    module = runpy.run_path(path, run_name=path)
    classes = {key: it for key, it in module.items() if isinstance(it, type) and issubclass(it, base)}
    if defined not in classes:
        remedy = suggestion(defined, [key for key, value in classes.items() if value is not base])
        raise ValueError(f"{kind} {name!r}: {path!r} defines no {base.__name__} {defined!r}; {remedy}")
    return classes[defined]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check_type(option: str, value: Any, parameter: inspect.Parameter) -> None:
    default = parameter.default
    types = get_args(parameter.annotation) or (parameter.annotation,)
    if not set(types) & set(_TYPES):
        types = (type(default),)
    wanted = [_TYPES[kind] for kind in _TYPES if kind in types]
    if not wanted or type(value) in types or (float in types and type(value) is int):
        return
    example = f", such as {default}" if type(default) in (int, str) else ""
    raise ValueError(f"{option} is {value!r}; it must be {' or '.join(wanted)}{example}")
