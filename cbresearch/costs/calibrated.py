"""A step time that is fitted to the steps of real runs, and says how well it fits and where it was fitted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbresearch.costs.linear import non_negative_fit
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
"""What a step's seconds are a sum of, each times its coefficient."""

# A run may go beyond what was seen by this much before the fit is an extrapolation.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A step time fitted by non-negative least squares of relative errors to steps of real runs.

    Attributes:
        coefficients: Seconds per unit of each of `FEATURES`.
        largest: Of each feature, the largest value in a step of those runs.
        held_out_error: Median relative error, without sign, of steps that the fit did not see.
        held_out_bias: Their total predicted time over their total measured time, less 1.
        num_fitted: Steps that the fit saw.
        num_held_out: Steps that it did not.
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
            ValueError: The step has more of something than the runs had, by over a quarter, and the cost may
                not extrapolate.
        """
        features = features_of(plan)
        if not self.may_extrapolate:
            for name, value, most in zip(FEATURES, features, self.largest, strict=True):
                # Whoever saw no step of just so many tokens takes it for one of several.
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
        """Fit the coefficients to measured steps, and try them on steps held out.

        Args:
            traces: The runs.
            hold_out: Share of the steps that the errors are measured on; the fit does not see them.
            rng: Draws them; by default a generator seeded with 0.
            may_extrapolate: Predict steps beyond what was seen as well.

        Raises:
            ValueError: There are fewer than twice as many steps as features, or the share is out of range.
        """
        if not 0 < hold_out < 1:
            raise ValueError(f"hold_out is {hold_out!r}; give a share between 0 and 1")
        steps = [record for trace in traces for record in trace.steps if record.duration > 0]
        if len(steps) < 2 * len(FEATURES):
            raise ValueError(
                f"{len(steps)} steps are too few to fit {len(FEATURES)} coefficients; give twice as many"
            )
        features = np.array([features_of(record.plan) for record in steps], dtype=np.float64)
        seconds = np.array([record.duration for record in steps])
        order = (rng or np.random.default_rng(0)).permutation(len(steps))
        held, seen = np.split(order, [max(1, round(hold_out * len(steps)))])
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
        # A single row by a matrix is another routine than several: on a CPU a cheaper one by more than a row.
        int(num_tokens > 1),
        # Several are computed in groups, so that few that do not fill one may be dearer than more that do.
        *(int(num_tokens == number) for number in _FEW),
        num_decode_rows,
        sum(entry.num_tokens for entry in chunks),
        len(chunks),
        plan.num_context_tokens - chunk_context,
        chunk_context,
        sum(
            entry.num_tokens * entry.start + entry.num_tokens * (entry.num_tokens + 1) // 2
            for entry in chunks
        ),
        len(plan.transfers),
    )
