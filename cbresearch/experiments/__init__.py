"""Experiments: compare policies, sweep grids, search capacities, hold claims against measurements."""

from cbresearch.experiments.capacity import Capacity as Capacity
from cbresearch.experiments.capacity import capacity as capacity
from cbresearch.experiments.claims import Claims as Claims
from cbresearch.experiments.compare import Comparison as Comparison
from cbresearch.experiments.compare import compare as compare
from cbresearch.experiments.compare import default_cache as default_cache
from cbresearch.experiments.compare import predictions as predictions
from cbresearch.experiments.environment import environment as environment
from cbresearch.experiments.sweep import SweepResult as SweepResult
from cbresearch.experiments.sweep import sweep as sweep
