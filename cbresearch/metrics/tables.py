"""The key figures of runs as one flat dict, and side by side as a table."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

from cbresearch.metrics import basic, cost
from cbresearch.metrics.pool import memory_shares
from cbresearch.metrics.reporting import Reporting
from cbresearch.metrics.slo import goodput, slo_attainment
from cbresearch.trace import Trace

__all__ = ["KpiRow", "kpi_table", "summary"]

_MEASURES = (basic.ttft, basic.tpot, basic.itl, basic.latency, basic.queue_time)

# Name, unit, key in `summary`, and what its value is multiplied by.
# Counts come first: they do not depend on the clock.
_ROWS: tuple[tuple[str, str, str, float], ...] = (
    ("steps", "", "num_steps", 1),
    ("mean occupancy", "rows", "occupancy_rows", 1),
    ("utilization", "%", "utilization", 100),
    ("output throughput", "tokens/s", "output_throughput_tokens_per_s", 1),
    ("request throughput", "requests/s", "request_throughput_requests_per_s", 1),
    ("TTFT p50", "ms", "ttft_p50_s", 1e3),
    ("TTFT p99", "ms", "ttft_p99_s", 1e3),
    ("TPOT p50", "ms", "tpot_p50_s", 1e3),
    ("TPOT p99", "ms", "tpot_p99_s", 1e3),
    ("ITL p99", "ms", "itl_p99_s", 1e3),
    ("latency p50", "s", "latency_p50_s", 1),
    ("latency p99", "s", "latency_p99_s", 1),
    ("peak KV memory", "tokens", "peak_kv_tokens", 1),
    ("peak KV memory", "MiB", "peak_kv_bytes", 2**-20),
    ("fragmentation", "%", "fragmentation", 100),
    ("prefix hit rate", "%", "prefix_hit_rate", 100),
    ("preemptions", "", "num_preemptions", 1),
    ("requests served", "", "num_finished", 1),
    ("requests rejected", "", "num_rejected", 1),
    ("requests failed", "", "num_failed", 1),
    ("requests aborted", "", "num_aborted", 1),
    ("kept the SLO", "%", "slo_attainment", 100),
    ("goodput", "requests/s", "goodput_requests_per_s", 1),
    ("cost per million output tokens", "", "cost_per_million_output_tokens", 1),
    ("cost per million total tokens", "", "cost_per_million_total_tokens", 1),
)


class KpiRow(NamedTuple):
    """One line of the comparison of runs, ready to print.

    Attributes:
        name: Name of the quantity.
        unit: Unit of its values; empty for a pure number.
        values: One text a run, “–” where undefined.
        sizes: Sample size n behind each run's percentile; empty in rows of another kind.
    """

    name: str
    unit: str
    values: tuple[str, ...]
    sizes: tuple[str, ...] = ()


def summary(
    trace: Trace, bytes_per_token: int | None = None, reporting: Reporting | None = None
) -> dict[str, float | int | None]:
    """Return every metric as one flat dict that JSON can hold; units end the names, undefined is None.

    Args:
        trace: The run.
        bytes_per_token: KV bytes of one token; without it `peak_kv_bytes` is None.
        reporting: With an SLO, there are `goodput_requests_per_s` and `slo_attainment`; with a price, costs
            in its currency.
    """
    values = dict(trace.once(_measured))
    if bytes_per_token is not None:
        values["peak_kv_bytes"] = basic.peak_kv_bytes(trace, bytes_per_token)
    if reporting is not None and reporting.slo is not None:
        values["slo_attainment"] = slo_attainment(trace, reporting.slo)
        values["goodput_requests_per_s"] = goodput(trace, reporting.slo)
    if reporting is not None and reporting.price_per_hour is not None:
        price = reporting.price_per_hour
        values["cost_per_million_output_tokens"] = cost.cost_per_million_tokens(trace, price)
        values["cost_per_million_total_tokens"] = cost.cost_per_million_total_tokens(trace, price)
    # JSON has no infinity: a mean of times near the largest float is undefined, and loses no other figure.
    return {key: None if one is None or not math.isfinite(one) else one for key, one in values.items()}


def _measured(trace: Trace) -> dict[str, float | int | None]:
    """Return every metric that needs nothing but the run."""
    counts = basic.token_counts(trace)
    reasons = [record.finish_reason for record in trace.served]
    values: dict[str, float | int | None] = {
        "num_requests": len(trace.requests),
        "num_rejected": len(trace.requests) - len(reasons),
        "num_finished": reasons.count("stop") + reasons.count("length"),
        "num_aborted": reasons.count("abort"),
        "num_failed": reasons.count("error"),
        "num_steps": trace.num_ended_steps,
        "num_preemptions": basic.num_preemptions(trace),
        "makespan_s": basic.makespan(trace),
        "output_throughput_tokens_per_s": basic.output_throughput(trace),
        "total_throughput_tokens_per_s": basic.total_throughput(trace),
        "request_throughput_requests_per_s": basic.request_throughput(trace),
        "occupancy_rows": basic.occupancy(trace),
        "time_weighted_occupancy_rows": basic.time_weighted_occupancy(trace),
        "utilization": basic.utilization(trace),
        "time_weighted_utilization": basic.time_weighted_utilization(trace),
        "wasted_row_share": basic.wasted_row_share(trace),
        "fragmentation": basic.fragmentation(trace),
        "time_weighted_fragmentation": basic.time_weighted_fragmentation(trace),
        "peak_kv_tokens": basic.peak_kv_tokens(trace),
        "peak_kv_bytes": None,
        "mean_pool_use": basic.mean_pool_use(trace),
        **{f"kv_{name}_share": share for name, share in memory_shares(trace).items()},
        **{
            f"num_{kind}_blocks": basic.total_of_steps(trace, f"num_{kind}_blocks")
            for kind in ("copied", "swapped_out", "swapped_in")
        },
        "prefix_hit_rate": basic.prefix_hit_rate(trace),
        **{f"num_{kind}_tokens": number for kind, number in counts._asdict().items()},
        "num_computed_tokens": counts.computed,
    }
    for measure in _MEASURES:
        for statistic, value in asdict(measure(trace)).items():
            values[f"{measure.__name__}_{statistic}" + ("" if statistic == "n" else "_s")] = value
    return values


def kpi_table(
    traces: Mapping[str, Trace], bytes_per_token: int | None = None, reporting: Reporting | None = None
) -> list[KpiRow]:
    """Return the key figures of runs side by side, for the console and the report.

    Failed and aborted requests have a row each where a run has any.

    Args:
        traces: The runs by label; the values of each row are in this order.
        bytes_per_token: KV bytes of one token; without it the peak is given in tokens.
        reporting: With an SLO there are rows of how often it was kept, with a price rows of costs.
    """
    runs = [summary(trace, bytes_per_token, reporting) for trace in traces.values()]
    unused = "peak_kv_bytes" if bytes_per_token is None else "peak_kv_tokens"
    rows = []
    for name, unit, key, scale in _ROWS:
        values = [run.get(key) for run in runs]
        if key == unused or any(key not in run for run in runs):
            continue
        if key in ("num_failed", "num_aborted") and not any(values):
            continue
        if key.startswith("cost") and reporting is not None:
            unit = reporting.currency
        texts = tuple(_text(value if value is None or scale == 1 else value * scale) for value in values)
        measure, rank, _ = key.partition("_p50_s" if key.endswith("_p50_s") else "_p99_s")
        sizes = tuple(str(run[f"{measure}_n"]) for run in runs) if rank else ()
        rows.append(KpiRow(name, unit, texts, sizes))
    return rows


def _text(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
