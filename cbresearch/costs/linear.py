"""Step times that are linear in tokens and contexts, or replayed from an earlier run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cbresearch import names
from cbresearch.step import Plan
from cbresearch.trace import Trace


class CostModel(Protocol):
    """Predict a step's duration in seconds.

    A model that also has `durations`, as `Linear` does, lets the simulator take many steps at once.
    """

    def __call__(self, plan: Plan) -> float:
        """Return the seconds that the plan takes."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A step time that is linear in its tokens: seconds = step + token * tokens + context * context tokens.

    Tokens count every row that is computed, padding included. Context tokens are the rows' context
    lengths summed, each query's own token included: the KV entries that attention reads. Blocks that are
    copied, swapped out or swapped in add their own term.

    Attributes:
        step: Seconds of a step, whatever is in it (weights are read, kernels are launched).
        token: Seconds per token computed.
        context: Seconds per context token attended.
        transfer: Seconds per block copied or swapped.

    Raises:
        ValueError: A coefficient is negative or not finite, or all are 0.
    """

    step: float
    token: float = 0.0
    context: float = 0.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        values = (self.step, self.token, self.context, self.transfer)
        if any(not math.isfinite(value) or value < 0 for value in values) or not any(values):
            raise ValueError(f"the linear cost is {values}; give finite seconds, none negative and not all 0")

    def __call__(self, plan: Plan) -> float:
        """Return the seconds that the plan takes."""
        seconds = self.step + self.token * plan.num_tokens + self.transfer * len(plan.transfers)
        return seconds + self.context * plan.num_context_tokens if self.context else seconds

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the seconds of a step without transfers, for policies that look ahead."""
        return self.step + self.token * num_tokens + self.context * num_context_tokens

    def durations(self, num_tokens: int, num_context_tokens: range) -> list[float]:
        """Return the seconds of consecutive steps without transfers, exactly as their plans cost.

        Args:
            num_tokens: Tokens that each of them computes.
            num_context_tokens: Context tokens of each.
        """
        seconds = self.step + self.token * num_tokens + self.transfer * 0
        context = self.context
        if not context:
            return [seconds] * len(num_context_tokens)
        return [seconds + context * number for number in num_context_tokens]

    @classmethod
    def parse(cls, text: str) -> "Linear":
        """Read `linear:T0,T_TOKEN,T_CONTEXT,T_BLOCK`, in seconds; trailing terms may be left out.

        The terms may be named as well: `linear:step=0.01,context=1e-7`.

        Raises:
            ValueError: The text is something else.
        """
        kind, _, numbers = text.partition(":")
        if kind == "linear" and "=" in numbers:
            return names.build("cost", text, {"linear": cls})
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if kind != "linear" or not 1 <= len(values) <= 4:
            raise ValueError(
                f"cost {text!r} is not known; write linear:T0,T_TOKEN,T_CONTEXT,T_BLOCK, in seconds"
            )
        return cls(*values)

    @classmethod
    def fit(cls, *traces: Trace, context: bool = False) -> "Linear":
        """Fit the coefficients to the measured steps of real runs by non-negative least squares.

        Each step's relative error counts alike, since the long prefill steps would drown the others.

        Args:
            traces: The runs.
            context: Fit a term for context tokens too.

        Raises:
            ValueError: There are fewer steps that took time than coefficients.
        """
        plans, seconds = timed_plans(traces)
        num_terms = 3 if context else 2
        if len(plans) < num_terms:
            raise ValueError(f"{len(plans)} steps are too few to fit a step time")
        features = [(1.0, plan.num_tokens, plan.num_context_tokens)[:num_terms] for plan in plans]
        return cls(*non_negative_fit(np.array(features, dtype=np.float64), seconds))


class Replayed:
    """Replay the step durations of an earlier run, in order.

    Args:
        durations: Seconds of each step.
    """

    def __init__(self, durations: Iterable[float]) -> None:
        self.durations = tuple(durations)

    def __call__(self, plan: Plan) -> float:
        """Return the recorded seconds of the plan's step.

        Raises:
            ValueError: The recorded run had fewer steps.
        """
        if plan.step >= len(self.durations):
            raise ValueError(f"step {plan.step} was never recorded; the run had {len(self.durations)} steps")
        return self.durations[plan.step]


def timed_plans(traces: Iterable[Trace]) -> tuple[list[Plan], np.ndarray]:
    """Return the plans of the steps that took time, and the seconds that each took."""
    steps = [record for trace in traces for record in trace.steps if record.duration > 0]
    return [record.plan for record in steps], np.array([record.duration for record in steps])


def non_negative_fit(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return coefficients, none negative, with the least sum of squared relative errors.

    Args:
        features: float64 `[num_steps, num_features]`.
        seconds: float64 `[num_steps]`, all above 0.
    """
    from scipy.optimize import nnls

    # Columns of one size, so that tolerances mean the same for each.
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    return [float(value) for value in solution / scale]
