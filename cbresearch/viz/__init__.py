"""Figures, an interactive player and the HTML report, all from recorded runs."""

from cbresearch.viz.figures import (
    kv_memory,
    kv_memory_side_by_side,
    latency_cdfs,
    occupancy,
    seats,
    seats_side_by_side,
)
from cbresearch.viz.player import player_html
from cbresearch.viz.report import write_report
from cbresearch.viz.style import PolicyLook, policy_look, use_style

__all__ = [
    "PolicyLook",
    "kv_memory",
    "kv_memory_side_by_side",
    "latency_cdfs",
    "occupancy",
    "player_html",
    "policy_look",
    "seats",
    "seats_side_by_side",
    "use_style",
    "write_report",
]
