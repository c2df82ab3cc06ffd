"""Figures, an interactive player and the HTML report, all from recorded runs."""

from cbresearch.viz.figures import (
    block_map,
    kv_categories,
    kv_memory,
    kv_memory_side_by_side,
    latency_cdfs,
    occupancy,
    pareto,
    roofline,
    seats,
    seats_side_by_side,
    tradeoff,
)
from cbresearch.viz.player import player_html
from cbresearch.viz.report import first_section, write_report
from cbresearch.viz.style import PolicyLook, policy_look, use_style

__all__ = [
    "PolicyLook",
    "block_map",
    "first_section",
    "kv_categories",
    "kv_memory",
    "kv_memory_side_by_side",
    "latency_cdfs",
    "occupancy",
    "pareto",
    "player_html",
    "policy_look",
    "roofline",
    "seats",
    "seats_side_by_side",
    "tradeoff",
    "use_style",
    "write_report",
]
