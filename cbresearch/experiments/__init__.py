"""Experiments: compare policies, sweep grids, search capacities, hold claims against measurements."""

from cbresearch.experiments.capacity import Capacity, TriedRate, capacity
from cbresearch.experiments.claims import Claims
from cbresearch.experiments.compare import Comparison, Prediction, compare, default_cache, predictions
from cbresearch.experiments.environment import environment
from cbresearch.experiments.sweep import Run, SweepResult, sweep

__all__ = [
    "Capacity",
    "Claims",
    "Comparison",
    "Prediction",
    "Run",
    "SweepResult",
    "TriedRate",
    "capacity",
    "compare",
    "default_cache",
    "environment",
    "predictions",
    "sweep",
]
