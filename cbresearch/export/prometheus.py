"""A run's figures as a vLLM server would expose them, for tools that read its metrics."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from cbresearch import metrics
from cbresearch.trace import Trace


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# vLLM's own bounds (v1/metrics/loggers.py), so that quantiles read off both are alike.
_TTFT = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_TOKEN_GAPS = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUESTS = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_STEP_TOKENS = tuple(2.0**power for power in (0, 3, *range(4, 15)))
_LENGTHS = tuple(mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5))


def prometheus(trace: Trace) -> str:
    """Return a run in the Prometheus text format, under vLLM's metric names where they mean the same.

    Counters and histograms are those of the whole run, or of a window of it; gauges, which tell of a moment,
    are in `to_perfetto`. As there, TTFT and queue time count from arrival; a prefix query is a prompt token
    of a request that got a seat, a hit one whose KV was cached.

    Args:
        trace: The run; its policy becomes a label.
    """
    served = trace.served
    seated = [record for record in served if record.first_scheduled is not None]
    reasons = Counter(record.finish_reason for record in served if record.finish_reason is not None)
    step_tokens = trace.step_columns["num_tokens"][: trace.num_ended_steps].tolist()
    prompts = sum(record.num_prompt_tokens or 0 for record in seated)
    label = 'policy="{}"'.format(trace.policy.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))

    def between(begin: str, end: str) -> Any:
        return (trace.request_columns[f"{end}_s"] - trace.request_columns[f"{begin}_s"]).tolist()

    counters: dict[str, dict[str, int]] = {
        "num_preemptions": {"": metrics.num_preemptions(trace)},
        "prompt_tokens": {"": prompts},
        "generation_tokens": {"": metrics.token_counts(trace).output},
        "request_success": {f',finished_reason="{name}"': reasons[name] for name in sorted(reasons)},
    }
    if trace.cache.prefix_caching:
        hits = sum(record.num_cached_tokens for record in seated)
        counters |= {"prefix_cache_queries": {"": prompts}, "prefix_cache_hits": {"": hits}}
    histograms: dict[str, tuple[Iterable[float | None], Sequence[float]]] = {
        "time_to_first_token_seconds": ((record.ttft for record in served), _TTFT),
        "inter_token_latency_seconds": ((gap for record in served for gap in record.itl), _TOKEN_GAPS),
        "request_time_per_output_token_seconds": ((record.tpot for record in served), _TOKEN_GAPS),
        "e2e_request_latency_seconds": ((record.latency for record in served), _REQUESTS),
        "request_queue_time_seconds": (between("arrival", "first_scheduled"), _REQUESTS),
        "request_prefill_time_seconds": (between("first_scheduled", "first_token"), _REQUESTS),
        "request_decode_time_seconds": (between("first_token", "finish"), _REQUESTS),
        "request_inference_time_seconds": (between("first_scheduled", "finish"), _REQUESTS),
        "iteration_tokens_total": (step_tokens, _STEP_TOKENS),
        "request_prompt_tokens": ((record.num_prompt_tokens for record in seated), _LENGTHS),
        "request_generation_tokens": ((len(record.tokens) for record in served), _LENGTHS),
    }
    lines: list[str] = []
    for name, counts in counters.items():
        lines.append(f"# TYPE vllm:{name}_total counter")
        lines += [f"vllm:{name}_total{{{label}{more}}} {count}" for more, count in counts.items()]
    for name, (values, bounds) in histograms.items():
        found = sorted(value for value in values if value is not None and value == value)
        lines.append(f"# TYPE vllm:{name} histogram")
        numbers = {repr(float(bound)): bisect_right(found, bound) for bound in bounds} | {"+Inf": len(found)}
        lines += [f'vllm:{name}_bucket{{{label},le="{le}"}} {count}' for le, count in numbers.items()]
        lines += [f"vllm:{name}_count{{{label}}} {len(found)}", f"vllm:{name}_sum{{{label}}} {sum(found)!r}"]
    return "\n".join(lines) + "\n"
