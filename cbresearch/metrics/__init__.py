"""What a run achieved, measured from its `Trace` alone; `formulas` predicts the same quantities.

A quantity that the trace does not define (a mean of nothing, a rate over no time) is None, never 0.
Refused requests are counted and enter nothing else. Step-weighted means count each step once, time-weighted
ones count it by its duration; they differ where a step's duration depends on what is in it.
"""

from cbresearch.metrics.basic import (
    Summary,
    TokenCounts,
    fragmentation,
    itl,
    latency,
    makespan,
    mean_pool_use,
    memory_shares,
    num_preemptions,
    occupancy,
    output_throughput,
    peak_kv_bytes,
    peak_kv_tokens,
    percentile,
    prefix_hit_rate,
    queue_time,
    request_throughput,
    speed_up,
    summarize,
    time_weighted_fragmentation,
    time_weighted_occupancy,
    time_weighted_utilization,
    token_counts,
    total_throughput,
    tpot,
    ttft,
    utilization,
    wasted_row_share,
)
from cbresearch.metrics.clients import jain_index, service_by_client
from cbresearch.metrics.cost import cost_per_million_tokens, cost_per_million_total_tokens
from cbresearch.metrics.exposition import exposition
from cbresearch.metrics.intervals import (
    Interval,
    batch_means_interval,
    mean_interval,
    percentile_interval,
    warm_up_length,
)
from cbresearch.metrics.queues import mean_in_system, mean_queue_length, residence_time, without_warm_up
from cbresearch.metrics.slo import Slo, fluidity_index, goodput, slo_attainment
from cbresearch.metrics.tables import KpiRow, kpi_table, summary

__all__ = [
    "Interval",
    "KpiRow",
    "Slo",
    "Summary",
    "TokenCounts",
    "batch_means_interval",
    "cost_per_million_tokens",
    "cost_per_million_total_tokens",
    "exposition",
    "fluidity_index",
    "fragmentation",
    "goodput",
    "itl",
    "jain_index",
    "kpi_table",
    "latency",
    "makespan",
    "mean_in_system",
    "mean_interval",
    "mean_pool_use",
    "mean_queue_length",
    "memory_shares",
    "num_preemptions",
    "occupancy",
    "output_throughput",
    "peak_kv_bytes",
    "peak_kv_tokens",
    "percentile",
    "percentile_interval",
    "prefix_hit_rate",
    "queue_time",
    "request_throughput",
    "residence_time",
    "service_by_client",
    "slo_attainment",
    "speed_up",
    "summarize",
    "summary",
    "time_weighted_fragmentation",
    "time_weighted_occupancy",
    "time_weighted_utilization",
    "token_counts",
    "total_throughput",
    "tpot",
    "ttft",
    "utilization",
    "warm_up_length",
    "wasted_row_share",
    "without_warm_up",
]
