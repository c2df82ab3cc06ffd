"""What the room's modules share: types, random generators, and checks of numbers, texts and lines."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cbresearch.request import Rejected, Request

Rng = np.random.Generator

Requests = Sequence[Request | Rejected]
"""A workload: requests, with a rejection in the place of each that cannot be served."""


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise a ValueError with the name, the value and the remedy unless a condition holds."""
    if not holds:
        raise ValueError(f"{name} is {value!r}; {remedy}")


def require_positive(name: str, value: float, unit: str) -> None:
    """Raise a ValueError unless a value is a positive finite number."""
    require(0 < value < math.inf, name, value, f"it must be a positive number ({unit})")


def checked(name: str, drawn: ArrayLike, number: int, least: float, remedy: str, whole: bool) -> list[Any]:
    """Return drawn numbers as a list; raises ValueError with the first that is not one of those allowed.

    Args:
        name: What one of them is, for error messages.
        drawn: The numbers.
        number: How many were asked for.
        least: The smallest that is allowed; all are finite.
        remedy: What to draw instead.
        whole: Whether only whole numbers are allowed.
    """
    values = np.asarray(drawn)
    if values.shape != (number,) or values.dtype.kind not in "iuf":
        raise ValueError(f"the {name}s are {values.dtype} of the shape {values.shape}; draw {number} numbers")
    allowed = np.isfinite(values) & (values >= least) & ((values % 1 == 0) | (not whole))
    if not allowed.all():
        place = int(allowed.argmin())
        raise ValueError(f"{name} {place} is {values[place].item()!r}; {remedy}")
    return list(values.tolist())


def shown(value: object) -> str:
    """Return a value as an error message shows it, cut short if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_text(key: str, text: str) -> bytes:
    """Return a text in UTF-8; raises ValueError where it cannot be written so."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{key} has {half!r}, half a surrogate pair; write the whole character") from None


def numbered_lines(content: bytes) -> list[tuple[int, bytes]]:
    """Return a file's lines that are not blank, each with its number from 1."""
    # Split as bytes: one line that is not UTF-8 must not cost the others.
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def independent_generators(rng: Rng, number: int) -> list[Rng]:
    """Return so many random generators, all seeded by one number that `rng` draws."""
    seed = int(rng.integers(2**63))
    return [np.random.default_rng([seed, part]) for part in range(number)]
