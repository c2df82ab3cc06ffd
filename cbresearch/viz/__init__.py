"""Figures, an interactive player and the HTML report, all from recorded runs."""

from cbresearch.viz.charts import label_points, latency_cdfs, pareto, roofline, tradeoff
from cbresearch.viz.memory import kv_categories, kv_memory
from cbresearch.viz.player import player_html
from cbresearch.viz.report import first_section, write_report
from cbresearch.viz.style import PolicyLook, policy_look, use_style
from cbresearch.viz.timeline import occupancy, seats

__all__ = [
    "PolicyLook",
    "first_section",
    "kv_categories",
    "kv_memory",
    "label_points",
    "latency_cdfs",
    "occupancy",
    "pareto",
    "player_html",
    "policy_look",
    "roofline",
    "seats",
    "tradeoff",
    "use_style",
    "write_report",
]
