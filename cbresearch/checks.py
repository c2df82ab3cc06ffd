"""Checks of what callers give; each names the value and what it must be."""

import math
import re
from dataclasses import fields
from numbers import Real
from operator import index
from typing import Annotated, Any, NamedTuple


class Bounds(NamedTuple):
    """The range of an option, as part of its annotation: `Annotated[float, Bounds(0, 1)]`.

    Attributes:
        least: The smallest number that is allowed.
        most: The largest number that is allowed.
    """

    least: float = -math.inf
    most: float = math.inf


_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")

# What most options are.
Number = Annotated[int, Bounds(1, 10**9)]
Size = Annotated[float, Bounds(0, 1e9)]
PositiveSize = Annotated[float, Bounds(1e-9, 1e9)]
Share = Annotated[float, Bounds(0, 1)]


def text(name: str, value: Any, *, optional: bool = False) -> None:
    """Require a text that can be written to a file.

    Args:
        name: What the error message calls it.
        value: The text.
        optional: Whether None will do.

    Raises:
        ValueError: It is no text, or has half of a surrogate pair.
    """
    if not isinstance(value, str) and not (optional and value is None):
        raise ValueError(f"{name} is {value!r}; it must be a text")
    if half := _HALF_OF_A_PAIR.search(value or ""):
        raise ValueError(f"{name} has {half[0]!r}, half a surrogate pair; write the whole character")


def count(name: str, value: Any, least: float = 1, most: float = math.inf) -> int:
    """Return an integer as a plain int, whatever integer type it came as.

    Args:
        name: What the error message calls it.
        value: The number.
        least: The smallest that is allowed.
        most: The largest that is allowed.

    Raises:
        ValueError: It is no integer, or out of range.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        limits = f" of at least {least}" if most == math.inf else f" from {least} to {most}"
        limits = limits if least > -math.inf else ""
        raise ValueError(f"{name} is {shown(value)}; it must be an integer{limits}")
    return number


def real(
    name: str, value: Any, least: float = 0, most: float = math.inf, *, positive: bool = False, unit: str = ""
) -> float:
    """Return a finite number as a plain float, whatever number type it came as.

    Args:
        name: What the error message calls it.
        value: The number.
        least: The smallest that is allowed.
        most: The largest that is allowed.
        positive: Whether 0 is too small.
        unit: What the number counts, for the error message.

    Raises:
        ValueError: It is no number, not finite, or out of range.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.nan
    if not least <= number <= most or math.isinf(number) or (positive and number == 0):
        kind = f"{'positive' if positive else 'finite'} number{unit and f' of {unit}'}"
        limits = kind if positive or least == -math.inf else f"{kind}, {least:g} or more"
        if most < math.inf:
            limits = f"number from {least:g} to {most:g}"
        raise ValueError(f"{name} is {shown(value)}; it must be a {limits}")
    return number


def shown(value: Any) -> str:
    """Return a value as error messages show it."""
    # Python refuses to write an integer of over 4,300 digits.
    is_long = isinstance(value, int) and value.bit_length() > 4000
    return f"an integer of {value.bit_length()} bits" if is_long else repr(value)


def check_numbers(config: Any, **ranges: tuple[float, float]) -> None:
    """Turn the numbers of a frozen dataclass into plain ints and floats within their ranges; check its flags.

    A field whose default is None may be None. Without a range, an integer is at least 1, or 0 if that is its
    default, and a float is positive.

    Raises:
        ValueError: One is out of range; the message begins with the name of the dataclass.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        name = f"{type(config).__name__}: {field.name}"
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
        if field.type in (int, int | None):
            least, most = ranges.get(field.name, (0 if field.default == 0 else 1, math.inf))
            object.__setattr__(config, field.name, count(name, count(name, value, least), least, most))
        elif field.type in (float, float | None):
            positive = field.name not in ranges
            number = real(name, value, *ranges.get(field.name, ()), positive=positive)
            object.__setattr__(config, field.name, number)
