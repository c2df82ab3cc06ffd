"""A step time fitted to the steps of real runs, with its error and the range that was seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbresearch.costs.linear import non_negative_fit, timed_plans
from cbresearch.costs.roofline import num_query_key_pairs
from cbresearch.step import Plan
from cbresearch.trace import Trace

_FEW = range(2, 8)
_OF_FEW = tuple(f"steps of {number} tokens" for number in _FEW)

FEATURES = (
    "steps",
    "steps of several tokens",
    *_OF_FEW,
    "decode rows",
    "prefill tokens",
    "prefill chunks",
    "context tokens of decode rows",
    "context tokens of chunks",
    "query-key pairs of chunks",
    "blocks moved",
)
"""The numbers of a step whose weighted sum is its seconds."""

# A run may go beyond what was seen by this much before the fit is an extrapolation.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A step time fitted by non-negative least squares of relative errors to steps of real runs.

    Attributes:
        coefficients: Seconds per unit of each of `FEATURES`.
        largest: Largest value of each feature in a step of those runs.
        held_out_error: Median relative error, without sign, of the steps held out of the fit.
        held_out_bias: Total predicted time of the held-out steps over their total measured time, less 1.
        num_fitted: Number of steps in the fit.
        num_held_out: Number of steps held out.
        may_extrapolate: Predict steps beyond what was seen as well.
    """

    coefficients: tuple[float, ...]
    largest: tuple[float, ...]
    held_out_error: float
    held_out_bias: float
    num_fitted: int
    num_held_out: int
    may_extrapolate: bool = False

    def __call__(self, plan: Plan) -> float:
        """Return the seconds that the plan takes.

        Raises:
            ValueError: A feature of the step is over a quarter larger than in the runs, and the cost may not
                extrapolate.
        """
        features = features_of(plan)
        if not self.may_extrapolate:
            for name, value, most in zip(FEATURES, features, self.largest, strict=True):
                # Without a step of just so many tokens in the fit, it counts as one of several tokens.
                if value > _MARGIN * most and name not in _OF_FEW:
                    raise ValueError(
                        f"step {plan.step} has {value:g} {name}, and the runs that the cost was fitted to "
                        f"had {most:g} at most; calibrate on a run with as many, or set may_extrapolate"
                    )
        return sum(value * seconds for value, seconds in zip(features, self.coefficients, strict=True))

    @classmethod
    def fit(
        cls,
        *traces: Trace,
        hold_out: float = 0.2,
        rng: np.random.Generator | None = None,
        may_extrapolate: bool = False,
    ) -> "Calibrated":
        """Fit the coefficients to measured steps, and measure the errors on held-out steps.

        Args:
            traces: The runs.
            hold_out: Share of the steps to hold out.
            rng: Draws the held-out steps; by default a generator seeded with 0.
            may_extrapolate: Predict steps beyond what was seen as well.

        Raises:
            ValueError: There are fewer than twice as many steps as features, or the share is out of range.
        """
        if not 0 < hold_out < 1:
            raise ValueError(f"hold_out is {hold_out!r}; give a share between 0 and 1")
        plans, seconds = timed_plans(traces)
        if len(plans) < 2 * len(FEATURES):
            raise ValueError(
                f"{len(plans)} steps are too few to fit {len(FEATURES)} coefficients; give twice as many"
            )
        features = np.array([features_of(plan) for plan in plans], dtype=np.float64)
        order = (rng or np.random.default_rng(0)).permutation(len(plans))
        held, seen = np.split(order, [max(1, round(hold_out * len(plans)))])
        coefficients = non_negative_fit(features[seen], seconds[seen])
        predicted = features[held] @ np.array(coefficients)
        return cls(
            coefficients=tuple(coefficients),
            largest=tuple(float(value) for value in features.max(axis=0)),
            held_out_error=float(np.median(np.abs(predicted / seconds[held] - 1))),
            held_out_bias=float(predicted.sum() / seconds[held].sum() - 1),
            num_fitted=len(seen),
            num_held_out=len(held),
            may_extrapolate=may_extrapolate,
        )


def features_of(plan: Plan) -> Sequence[float]:
    """Return a step's `FEATURES`."""
    chunks = [entry for entry in plan.scheduled if entry.num_tokens > 1]
    num_decode_rows = len(plan.scheduled) - len(chunks) + len(plan.padding)
    num_tokens = plan.num_tokens
    chunk_context = sum(entry.context_length for entry in chunks)
    return (
        1,
        # A product of one row is another routine than one of several: on a CPU, cheaper by more than a row.
        int(num_tokens > 1),
        # Rows are computed in groups: a few that do not fill one may cost more than several that do.
        *(int(num_tokens == number) for number in _FEW),
        num_decode_rows,
        sum(entry.num_tokens for entry in chunks),
        len(chunks),
        plan.num_context_tokens - chunk_context,
        chunk_context,
        num_query_key_pairs(chunks),
        len(plan.transfers),
    )
