"""What the closed forms check of their arguments; each raises ValueError with the name and the value."""

import math

import numpy as np
import numpy.typing as npt

from cbresearch.checks import count as count  # noqa: PLC0414

__all__ = ["Lengths"]

Lengths = npt.ArrayLike


def lengths_array(name: str, values: Lengths) -> npt.NDArray[np.float64]:
    """Return a list of at least one finite length above 0 as an array."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; give a list of at least one length")
    for value in array[~(np.isfinite(array) & (array > 0))]:
        raise ValueError(f"{name} holds {float(value)!r}; lengths are finite and above 0")
    return array


def paired_lengths(**lists: Lengths) -> list[npt.NDArray[np.float64]]:
    """Return lists of lengths as arrays, which must be equally long: one value a request in each."""
    (name, first), *others = arrays = [(name, lengths_array(name, values)) for name, values in lists.items()]
    for other, values in others:
        if len(values) != len(first):
            raise ValueError(f"{name} has {len(first)} values, but {other} has {len(values)}")
    return [values for _, values in arrays]


def positive(**values: float) -> None:
    """Require finite numbers above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite and above 0")


def non_negative(**values: float) -> None:
    """Require finite numbers of 0 or more."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be finite, 0 or more")
