"""What the room's modules share: types, random generators, and checks of numbers, texts and lines."""

import codecs
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cbresearch.request import Rejected, Request

Rng = np.random.Generator

_STAMP = re.compile(
    r"((?:199|20\d)\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(?: *(?:Z|UTC|GMT|([+-]\d\d(?::?\d\d)?)))?",
    re.ASCII | re.IGNORECASE,
)

Requests = Sequence[Request | Rejected]
"""A workload: requests, with a rejection in the place of each that cannot be served."""


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise a ValueError with the name, the value and the remedy unless a condition holds."""
    if not holds:
        raise ValueError(f"{name} is {value!r}; {remedy}")


def checked(name: str, drawn: ArrayLike, number: int, remedy: str, *, whole: bool = False) -> list[Any]:
    """Return drawn numbers as a list; raises ValueError with the first that is not one of those allowed.

    Args:
        name: What one of them is, for error messages.
        drawn: The numbers.
        number: How many were asked for.
        remedy: What to draw instead.
        whole: Whether they are whole numbers from 1 on, and not finite ones from 0 on.
    """
    values = np.asarray(drawn)
    if values.shape != (number,) or values.dtype.kind not in "iuf":
        raise ValueError(f"the {name}s are {values.dtype} of the shape {values.shape}; draw {number} numbers")
    allowed = np.isfinite(values) & (values >= whole) & ((values % 1 == 0) | (not whole))
    if not allowed.all():
        place = int(allowed.argmin())
        raise ValueError(f"{name} {place} is {values[place].item()!r}; {remedy}")
    return list(values.astype(int if whole else float).tolist())


def numbered_lines(content: bytes) -> list[tuple[int, bytes]]:
    """Return a file's lines that are not blank, each with its number from 1."""
    # Split as bytes: one line that is not UTF-8 must not cost the others.
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def relative_seconds(
    times: Iterable[object], power: int = 0, *, since_first: bool = True, num_arrivals: int | None = None
) -> list[float]:
    """Return times in seconds, without the loss of a digit of theirs.

    Where the earliest number is 10^9 or more, all count from 1970, in seconds, milliseconds, microseconds or
    nanoseconds, as the number of digits tells; 0 is then the earliest.

    Args:
        times: Numbers, or their texts, or stamps of a date and a time.
        power: A second has 10^power of their units, where they do not count from 1970.
        since_first: Whether 0 is the earliest even so.
        num_arrivals: So many of the first times tell the clock and the earliest, for the others too.

    Returns:
        The seconds; NaN for what is no number from 0 on, or lies 10^9 seconds (32 years) behind the earliest.
    """
    exact, powers = list(map(_exact, times)), [power] * 20
    if min(filter(Decimal.is_finite, exact[:num_arrivals]), default=0) >= 10**9:
        # 10 or 11 digits are seconds, 12 to 14 milliseconds.
        powers, since_first = [max(0, (place - 8) // 3 * 3) for place in range(20)], True
    scales = [Decimal(1).scaleb(-power) for power in powers]
    exact = [time * scales[max(0, time.adjusted())] for time in exact]
    first = min(filter(Decimal.is_finite, exact[: num_arrivals if since_first else 0]), default=Decimal())
    seconds = [float(time - first) for time in exact]
    return [time if time < 1e9 else math.nan for time in seconds]


def _exact(time: object) -> Decimal:
    # A float of a JSON file remembers its text.
    text = getattr(time, "text", str(time))
    try:
        if stamp := _STAMP.fullmatch(text):
            seconds = datetime.fromisoformat(f"{stamp[1]}{stamp[3] or 'Z'}").timestamp()
            text = f"{seconds:.0f}{stamp[2] or ''}e9"
        # Added to 0, a zero such as 0e30 has one digit.
        number = Decimal(text if text.isascii() and "_" not in text else "nan") + 0
        return number if 0 <= number < 10**20 else Decimal("nan")
    except (ArithmeticError, ValueError):
        return Decimal("nan")


def checked_rng(rng: object) -> Rng:
    """Return a random generator; raises ValueError unless it is one of numpy."""
    if isinstance(rng, Rng):
        return rng
    raise ValueError(f"rng is {rng!r}; give a random generator as rng, such as numpy.random.default_rng(0)")


def split_rng(rng: Rng, number: int) -> list[Rng]:
    """Return so many random generators, all seeded by one number that `rng` draws."""
    seed = int(checked_rng(rng).integers(2**63))
    return [np.random.default_rng([seed, part]) for part in range(number)]
