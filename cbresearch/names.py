"""The language of names with options: `name:option=value,option=value`, for policies, workloads and costs."""

import difflib
import inspect
import os
import re
import runpy
import sys
import traceback
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from cbresearch.checks import Bounds, count, real, shown

T = TypeVar("T")

_MOST_NAMED = 40
_TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_UNNAMED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split `name:option=value,flag` into the name and its options.

    Values are Python literals or else plain text; an option without a value means True. The name of something
    that a Python file defines, such as `mine.py:MyPolicy`, keeps its colon.

    Raises:
        ValueError: An option is given twice.
    """
    # The path may have colons of its own, as behind a drive's letter.
    file = re.match(r"(.+?\.py)(?::([^:]*))?(?::(.*))?$", text)
    name, _, rest = text.partition(":")
    if file:
        name, rest = f"{file[1]}:{file[2] or ''}", file[3] or ""
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
    folded = {one.lower(): one for one in known}
    near = [folded[one] for one in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return f"there is {', '.join(map(repr, known[:_MOST_NAMED]))}{more}" if known else "it has none"


def build(kind: str, text: str, factories: Mapping[str, Callable[..., T]]) -> T:
    """Build what a name with options stands for.

    Args:
        kind: What is built, such as "policy"; error messages begin with it.
        text: The name, with options after a colon.
        factories: Makes each thing from its options, by name. The options are checked against the signature
            (see `check_option`).

    Raises:
        ValueError: The name or an option is unknown (near misses are suggested), missing, given twice, of
            another type, or out of its range.
    """
    name, options = parse(text)
    several = re.split(r"[\s,;+|]+", text.strip())
    if len(several) > 1 and all(one.partition(":")[0] in factories for one in several if one):
        listed = " ".join(f"--{kind} {one}" for one in several if one)
        raise ValueError(f"{text!r} is not one {kind}; give each by itself: {listed}, or a list in Python")
    if name not in factories:
        raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, factories)}")
    parameters = inspect.signature(factories[name]).parameters.values()
    known = {one.name: one for one in parameters if one.kind not in _UNNAMED}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{kind} {name!r} has no option {option!r}; {suggestion(option, known)}")
        check_option(f"{kind} {name!r}: option {option}", value, known[option])
    for option, parameter in known.items():
        if option not in options and parameter.default is parameter.empty:
            raise ValueError(f"{kind} {name!r} needs the option {option!r}; write {name}:{option}=…")
    return factories[name](**options)


def with_options(
    kind: str, name: str, init: Callable[..., None], values: tuple[Any, ...], options: Mapping[str, Any]
) -> str:
    """Return the name under which `build` makes the same again; the options are checked as `build` does.

    Args:
        kind: What is made, such as "policy"; error messages begin with it.
        name: Its name without options.
        init: The constructor that gets the options.
        values: Options given by position.
        options: Options given by name.

    Raises:
        TypeError: The constructor takes no such option.
        ValueError: An option is of another type, or out of its range.
    """
    signature = inspect.signature(init)
    try:
        # The first parameter is the thing itself.
        _, *given = signature.bind_partial(None, *values, **options).arguments.items()
    except TypeError as error:
        has = ", ".join([*signature.parameters][1:]) or "none"
        raise TypeError(f"{kind} {name!r}: {error}; its options: {has}") from None
    written = []
    for option, value in given:
        parameter = signature.parameters[option]
        check_option(f"{kind} {name!r}: option {option}", value, parameter)
        # Of an object there is no text that would make it again.
        if isinstance(value, str | Real | None) and value != parameter.default:
            written.append(option if isinstance(value, bool) and value else f"{option}={value}")
    return f"{name}:{','.join(written)}" if written else name


def check_option(name: str, value: Any, parameter: Parameter) -> None:
    """Check a value against a parameter's annotation, or else against the type of its default.

    The annotation may be a type, a `Literal`, or a type with its range, such as `Annotated[int, Bounds(1)]`.
    Numbers of any type are taken, as long as they are finite; what is annotated otherwise is not checked.

    Args:
        name: What the error message calls it.
        value: The value.
        parameter: The parameter that gets it.

    Raises:
        ValueError: The value is of another type, or out of its range.
    """
    default, annotation, range_ = parameter.default, parameter.annotation, Bounds()
    if parameter.kind in _UNNAMED:
        return
    if get_origin(annotation) is Annotated:
        annotation, range_, *_ = get_args(annotation)
    types = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        if value not in types:
            raise ValueError(f"{name} is {shown(value)}; choose {' or '.join(map(str, types))}")
    elif not set(types) & set(_TYPES):
        types = (type(default),)
    is_whole, is_number = (isinstance(value, one) and not isinstance(value, bool) for one in (Integral, Real))
    if int in types and is_whole:
        count(name, int(value), *range_)
    elif float in types and is_number:
        real(name, value, *range_)
    elif (wanted := [_TYPES[kind] for kind in _TYPES if kind in types]) and type(value) not in types:
        example = f", such as {default}" if type(default) in (int, str) else ""
        raise ValueError(f"{name} is {shown(value)}; it must be {' or '.join(wanted)}{example}")


def load(kind: str, name: str, base: type[T]) -> type[T]:
    """Run a Python file and return the class that it defines, by a name such as `mine.py:MyPolicy`.

    Without a class, as in `mine.py:`, it is the only one that the file defines. The file may import others
    beside it.

    Raises:
        ValueError: There is no such file, it cannot be run, or it defines no such subclass of `base`.
    """
    given, _, defined = name.rpartition(":")
    path = os.path.expanduser(given)
    if not os.path.isfile(path):
        raise ValueError(f"{kind} {name!r}: there is no file {given!r} in {Path.cwd()}; give its path")
    folder = str(Path(path).resolve().parent)
    # First, as for a script; then last, for what its hooks import, so that it hides no other module.
    sys.path.insert(0, folder)
    try:
        module = runpy.run_path(path, run_name=path)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{kind} {name!r} cannot be run: {described(error)}; correct the file") from error
    finally:
        sys.path.remove(folder)
        sys.path += [folder] if folder not in sys.path else []
    classes = {key: it for key, it in module.items() if isinstance(it, type) and issubclass(it, base)}
    own = [key for key, it in classes.items() if it.__module__ == path]
    defined = own[0] if not defined and len(own) == 1 else defined
    if not defined and own:
        listed = " or ".join(f"{given}:{key}" for key in own)
        raise ValueError(f"{kind} {given!r} defines several, {', '.join(own)}; name one: {listed}")
    if defined not in classes:
        remedy = suggestion(defined, [key for key, value in classes.items() if value is not base])
        remedy = remedy if classes else f"derive a class in it from cbresearch.policies.{base.__name__}"
        raise ValueError(f"{kind} {name!r}: {given!r} defines no {base.__name__} {defined!r}; {remedy}")
    return classes[defined]


def described(error: BaseException) -> str:
    """Return an error in one line: its type, what it says, and the file and line that it came from."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{kind}: {error.msg} ({Path(error.filename or '?').name}, line {error.lineno})"
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{kind}: {text}{place}"


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
