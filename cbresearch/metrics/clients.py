"""How fairly clients were served."""

from collections.abc import Iterable

from cbresearch.metrics.basic import sample_of

__all__ = ["jain_index"]


def jain_index(shares: Iterable[float]) -> float | None:
    """Return Jain's fairness index (Σx)²/(n·Σx²): 1 for equal shares, 1/n if one client has everything.

    Source: Jain, Chiu and Hawe, DEC TR-301, 1984.

    Args:
        shares: One a client, none negative.

    Returns:
        None without clients, or if all shares are 0.

    Raises:
        ValueError: A share is negative or not finite.
    """
    sample = sample_of(shares)
    if sample.size and sample.min() < 0:
        raise ValueError(f"a share is {float(sample.min())!r}; none may be negative")
    squares = float((sample**2).sum())
    return float(sample.sum()) ** 2 / (sample.size * squares) if squares else None
