"""Step-time models: how many seconds a plan takes, without a model."""

from cbresearch.costs.calibrated import FEATURES, Calibrated
from cbresearch.costs.linear import CostModel, Linear, Replayed
from cbresearch.costs.presets import SHAPES, parse
from cbresearch.costs.roofline import CARDS, Roofline

__all__ = [
    "CARDS",
    "FEATURES",
    "SHAPES",
    "Calibrated",
    "CostModel",
    "Linear",
    "Replayed",
    "Roofline",
    "parse",
]
