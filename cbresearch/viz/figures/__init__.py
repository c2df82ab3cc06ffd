"""Figures of recorded runs, by subject. Each function returns a figure whose title states the finding."""

from cbresearch.viz.figures.batch import occupancy, seats, seats_side_by_side
from cbresearch.viz.figures.choice import front, pareto, tradeoff
from cbresearch.viz.figures.latency import latency_cdfs
from cbresearch.viz.figures.machine import roofline
from cbresearch.viz.figures.memory import block_map, kv_categories, kv_memory, kv_memory_side_by_side

__all__ = [
    "block_map",
    "front",
    "kv_categories",
    "kv_memory",
    "kv_memory_side_by_side",
    "latency_cdfs",
    "occupancy",
    "pareto",
    "roofline",
    "seats",
    "seats_side_by_side",
    "tradeoff",
]
