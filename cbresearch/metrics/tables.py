"""The key figures of runs as one flat dict, and side by side as a table."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

from cbresearch.metrics import basic
from cbresearch.metrics.cost import cost_per_million_tokens, cost_per_million_total_tokens
from cbresearch.metrics.slo import Slo, goodput, slo_attainment
from cbresearch.trace import Trace, column

_MEASURES = (basic.ttft, basic.tpot, basic.itl, basic.latency, basic.queue_time)
_TRANSFERS = (("copied", "copy"), ("swapped_out", "swap_out"), ("swapped_in", "swap_in"))


class KpiRow(NamedTuple):
    """One line of the comparison of runs, ready to print.

    Attributes:
        name: Of the quantity.
        unit: Of its values; empty for a pure number.
        values: One text a run, "–" where undefined.
        sizes: Sample size n behind each run's percentile; empty in rows of another kind.
    """

    name: str
    unit: str
    values: tuple[str, ...]
    sizes: tuple[str, ...] = ()


def summary(
    trace: Trace,
    bytes_per_token: int | None = None,
    *,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
) -> dict[str, float | int | None]:
    """Return every metric as one flat dict that JSON can hold; units end the names, undefined is None.

    Args:
        trace: The run.
        bytes_per_token: KV bytes of one token; without it there is no `peak_kv_bytes`.
        slo: What was promised; without it there are no `goodput_requests_per_s` and `slo_attainment`.
        price_per_hour: Price of the machine's hour; without it there are no costs, which are in its currency.
    """
    counts = basic.token_counts(trace)
    values: dict[str, float | int | None] = {
        "num_requests": len(trace.requests),
        "num_refused": len(trace.requests) - len(trace.served),
        "num_finished": sum(record.is_complete for record in trace.served),
        "num_aborted": sum(record.finish_reason == "abort" for record in trace.served),
        "num_failed": sum(record.finish_reason == "error" for record in trace.served),
        "num_steps": len(trace.steps),
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
        "peak_kv_bytes": None if bytes_per_token is None else basic.peak_kv_bytes(trace, bytes_per_token),
        "mean_pool_use": basic.mean_pool_use(trace),
        **{f"kv_{name}_share": share for name, share in basic.memory_shares(trace).items()},
        **{f"num_{kind}_blocks": int(sum(column(trace.steps, transfer))) for kind, transfer in _TRANSFERS},
        "prefix_hit_rate": basic.prefix_hit_rate(trace),
        **{f"num_{kind}_tokens": number for kind, number in counts._asdict().items()},
        "num_computed_tokens": counts.computed,
    }
    for measure in _MEASURES:
        for statistic, value in asdict(measure(trace)).items():
            values[f"{measure.__name__}_{statistic}" + ("" if statistic == "n" else "_s")] = value
    if slo is not None:
        values |= {
            "slo_attainment": slo_attainment(trace, slo),
            "goodput_requests_per_s": goodput(trace, slo),
        }
    if price_per_hour is not None:
        values |= {
            "cost_per_million_output_tokens": cost_per_million_tokens(trace, price_per_hour),
            "cost_per_million_total_tokens": cost_per_million_total_tokens(trace, price_per_hour),
        }
    return values


def kpi_table(
    traces: Mapping[str, Trace],
    bytes_per_token: int | None = None,
    *,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> list[KpiRow]:
    """Return the key figures of runs side by side, for the console and the report.

    Failed and aborted requests have a row each where a run has any.

    Args:
        traces: The runs by label; the values of each row are in this order.
        bytes_per_token: KV bytes of one token; without it the peak is given in tokens.
        slo: What was promised; without it there is no row of what was kept.
        price_per_hour: Price of the machine's hour; without it there is no row of costs.
        currency: Of the price.
    """
    runs = [
        summary(trace, bytes_per_token, slo=slo, price_per_hour=price_per_hour) for trace in traces.values()
    ]

    def row(name: str, unit: str, key: str, scale: float = 1, sample: str = "") -> KpiRow:
        values = (run[key] for run in runs)
        texts = tuple(_text(value if value is None or scale == 1 else value * scale) for value in values)
        return KpiRow(name, unit, texts, tuple(str(run[f"{sample}_n"]) for run in runs) if sample else ())

    def timing(name: str, rank: str, unit: str, scale: float) -> KpiRow:
        sample = name.lower()
        return row(f"{name} {rank}", unit, f"{sample}_{rank}_s", scale, sample)

    ended = [
        row(f"requests {kind}", "", f"num_{kind}")
        for kind in ("failed", "aborted")
        if any(run[f"num_{kind}"] for run in runs)
    ]
    if bytes_per_token is None:
        peak = row("peak KV memory", "tokens", "peak_kv_tokens")
    else:
        peak = row("peak KV memory", "MiB", "peak_kv_bytes", 2**-20)
    promised = (
        []
        if slo is None
        else [
            row("kept the SLO", "%", "slo_attainment", 100),
            row("goodput", "requests/s", "goodput_requests_per_s"),
        ]
    )
    costs = (
        []
        if price_per_hour is None
        else [
            row(f"cost per million {kind} tokens", currency, f"cost_per_million_{kind}_tokens")
            for kind in ("output", "total")
        ]
    )
    return [
        row("output throughput", "tokens/s", "output_throughput_tokens_per_s"),
        row("request throughput", "requests/s", "request_throughput_requests_per_s"),
        row("mean occupancy", "rows", "occupancy_rows"),
        row("utilization", "%", "utilization", 100),
        timing("TTFT", "p50", "ms", 1e3),
        timing("TTFT", "p99", "ms", 1e3),
        timing("TPOT", "p50", "ms", 1e3),
        timing("TPOT", "p99", "ms", 1e3),
        timing("ITL", "p99", "ms", 1e3),
        timing("latency", "p50", "s", 1),
        timing("latency", "p99", "s", 1),
        peak,
        row("fragmentation", "%", "fragmentation", 100),
        row("prefix hit rate", "%", "prefix_hit_rate", 100),
        row("preemptions", "", "num_preemptions"),
        row("requests served", "", "num_finished"),
        row("requests refused", "", "num_refused"),
        *ended,
        *promised,
        *costs,
    ]


def _text(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
