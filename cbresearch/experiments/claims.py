"""Claims: what was predicted, what was measured, and how far apart the two may be."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

MIME_TYPE = "application/vnd.cbresearch.claims+json"
"""Under this type a notebook keeps its claims in its outputs, where `tests/collect_claims.py` finds them."""


class Claim(NamedTuple):
    """A number that was predicted and then measured.

    Attributes:
        name: The quantity, as a reader knows it.
        unit: Its unit; empty for counts and ratios.
        predicted: What a formula, a model or a published figure says.
        measured: What a run gave.
        tolerance: The largest error allowed: a fraction of the prediction, or a difference in the claim's
            unit if `is_absolute`.
        is_absolute: Whether error and tolerance are differences instead of fractions.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    tolerance: float
    is_absolute: bool

    @property
    def error(self) -> float:
        """Return measured − predicted, as a fraction of the prediction unless the claim is absolute."""
        difference = self.measured - self.predicted
        return difference if self.is_absolute else difference / abs(self.predicted)

    @property
    def holds(self) -> bool:
        """Return whether the error is within the tolerance."""
        return abs(self.error) <= self.tolerance

    def row(self) -> dict[str, Any]:
        """Return the claim as texts and plain values, rounded so that they are the same on every machine."""
        return {
            "claim": self.name,
            "unit": self.unit,
            "predicted": _number(self.predicted),
            "measured": _number(self.measured),
            "error": self._amount(self.error, signed=True),
            "tolerance": self._amount(self.tolerance),
            "holds": self.holds,
        }

    def _amount(self, value: float, signed: bool = False) -> str:
        """Return an error or a tolerance with two significant digits; what is rounding of floats is 0."""
        scale = 1.0 if self.is_absolute else 100.0
        if abs(value) < 1e-9 * ((abs(self.predicted) or 1.0) if self.is_absolute else 1.0):
            value = 0.0
        rounded = float(f"{value * scale:.2g}")
        sign = "+" if signed and rounded > 0 else ""
        return f"{sign}{_number(rounded)} {self.unit if self.is_absolute else '%'}".rstrip()


class Claims:
    """The claims of one notebook, each held against its tolerance when it is made.

    As the last value of a cell it shows the table of all of them.

    Args:
        raises: Whether a claim that does not hold fails. Not for what is measured with a clock: a busy
            computer is no reason to stop, and the table shows what did not hold.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self._raises = raises
        self._claims: list[Claim] = []

    def check(
        self,
        name: str,
        predicted: float,
        measured: float | None,
        *,
        within: float,
        absolute: bool = False,
        unit: str = "",
    ) -> None:
        """Note a prediction and its measurement, and fail if they are too far apart.

        Args:
            name: The quantity; each claim has a name of its own.
            predicted: What a formula, a model or a published figure says.
            measured: What a run gave; None, which is an undefined metric, fails.
            within: The largest error allowed, as a fraction of the prediction; 0 for what must be equal.
            absolute: Take `within` as a difference in `unit` instead; needed where the prediction is 0.
            unit: The unit of both numbers.

        Raises:
            AssertionError: They are farther apart, or nothing was measured.
            ValueError: The name is taken, a number is not finite, the tolerance is negative, or the
                prediction is 0 and the tolerance a fraction.
        """
        if any(claim.name == name for claim in self._claims):
            raise ValueError(
                f"claim {name!r} was made before; give each a name of its own, or, to run a cell again, run "
                "the notebook from its first cell"
            )
        if not 0 <= within < math.inf or not math.isfinite(predicted):
            raise ValueError(f"claim {name!r}: predicted {predicted}, within {within}; give finite numbers")
        if predicted == 0 and not absolute:
            raise ValueError(f"claim {name!r} predicts 0, of which there is no fraction; set absolute=True")
        if measured is None or not math.isfinite(measured):
            raise AssertionError(f"claim {name!r} predicts {predicted} {unit}, and nothing was measured")
        claim = Claim(name, unit, float(predicted), float(measured), float(within), absolute)
        self._claims.append(claim)
        if self._raises and not claim.holds:
            row = claim.row()
            raise AssertionError(
                f"claim {name!r}: predicted {row['predicted']} {unit}, measured {row['measured']} {unit}; "
                f"the error is {row['error']}, more than {row['tolerance']}"
            )

    def __iter__(self) -> Iterator[Claim]:
        """Iterate over the claims in the order in which they were made."""
        return iter(self._claims)

    def rows(self) -> list[dict[str, Any]]:
        """Return each claim as a row of texts, whose numbers are rounded, and whether it holds."""
        return [claim.row() for claim in self._claims]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        import pandas as pd

        rows = self.rows()
        with pd.option_context("display.max_colwidth", None):
            html = _table(rows).to_html(index=False, border=0)
        return {"text/plain": plain(rows), "text/html": html, MIME_TYPE: {"claims": rows}}


def plain(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of claims, as from `Claims.rows` and with further columns if need be, as plain text."""
    return str(_table(rows).to_string(index=False))


def _table(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(rows).replace({"holds": {True: "yes", False: "NO"}})


def _number(value: float) -> str:
    """Return a number with four significant digits, a whole one of up to nine digits in full."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.3e}"
    # From here on four digits would be rounded up to 1e+04.
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"
