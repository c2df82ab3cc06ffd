"""Run experiments: compare policies, sweep grids, search capacities; tidy, with an environment stamp."""

from cbresearch.experiments.capacity import Capacity, TriedRate, capacity
from cbresearch.experiments.compare import (
    Comparison,
    Policies,
    Prediction,
    Workload,
    compare,
    compare_simulated,
    predictions,
)
from cbresearch.experiments.environment import environment
from cbresearch.experiments.sweep import Run, SweepResult, sweep

__all__ = [
    "Capacity",
    "Comparison",
    "Policies",
    "Prediction",
    "Run",
    "SweepResult",
    "TriedRate",
    "Workload",
    "capacity",
    "compare",
    "compare_simulated",
    "environment",
    "predictions",
    "sweep",
]
