"""A run's figures as a vLLM server would expose them, for tools that read its metrics."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cbresearch.metrics.basic import num_preemptions
from cbresearch.trace import Trace

# vLLM's own bounds (v1/metrics/loggers.py), so that quantiles read off both are alike.
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_GAPS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
_REQUESTS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)  # fmt: skip
_STEP_TOKENS = tuple(2.0**power for power in (0, 3, *range(4, 15)))
_LENGTHS = tuple(mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5))


def exposition(trace: Trace) -> str:
    """Return a run in the Prometheus text format, under vLLM's metric names where they mean the same.

    Counters and histograms are those of the whole run; gauges, which tell of a moment, are in
    `Trace.to_perfetto`. As there, TTFT and queue time count from arrival; a prefix query is a prompt token of
    a request that got a seat, a hit one whose KV was cached.

    Args:
        trace: The run; its policy becomes a label.
    """
    served = trace.served
    lines: list[str] = []
    policy = trace.policy.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    def counter(name: str, values: dict[str, int]) -> None:
        lines.append(f"# TYPE vllm:{name}_total counter")
        lines.extend(f'vllm:{name}_total{{policy="{policy}"{more}}} {values[more]}' for more in values)

    def histogram(name: str, values: Iterable[float | None], bounds: Sequence[float]) -> None:
        lines.append(f"# TYPE vllm:{name} histogram")
        found = [value for value in values if value is not None]
        counts = Counter(bisect_left(bounds, value) for value in found)
        number = 0
        for place, bound in enumerate(bounds):
            number += counts[place]
            lines.append(f'vllm:{name}_bucket{{policy="{policy}",le="{float(bound)!r}"}} {number}')
        lines.append(f'vllm:{name}_bucket{{policy="{policy}",le="+Inf"}} {len(found)}')
        lines.append(f'vllm:{name}_count{{policy="{policy}"}} {len(found)}')
        lines.append(f'vllm:{name}_sum{{policy="{policy}"}} {sum(found)!r}')

    seated = [record for record in served if record.first_scheduled is not None]
    reasons = Counter(record.finish_reason for record in served if record.finish_reason is not None)
    prompts = sum(record.num_prompt_tokens or 0 for record in seated)
    counter("num_preemptions", {"": num_preemptions(trace)})
    counter("prompt_tokens", {"": prompts})
    counter("generation_tokens", {"": sum(len(record.tokens) for record in served)})
    counter("request_success", {f',finished_reason="{name}"': reasons[name] for name in sorted(reasons)})
    if trace.cache.prefix_caching:
        counter("prefix_cache_queries", {"": prompts})
        counter("prefix_cache_hits", {"": sum(record.num_cached_tokens for record in seated)})

    def between(begin: str, end: str) -> Iterator[float | None]:
        for record in served:
            first, last = getattr(record, begin), getattr(record, end)
            yield None if first is None or last is None else last - first

    histogram("time_to_first_token_seconds", (record.ttft for record in served), _TTFT)
    histogram("inter_token_latency_seconds", (gap for record in served for gap in record.itl), _TOKEN_GAPS)
    histogram("request_time_per_output_token_seconds", (record.tpot for record in served), _TOKEN_GAPS)
    histogram("e2e_request_latency_seconds", (record.latency for record in served), _REQUESTS)
    histogram("request_queue_time_seconds", between("arrival", "first_scheduled"), _REQUESTS)
    histogram("request_prefill_time_seconds", between("first_scheduled", "first_token"), _REQUESTS)
    histogram("request_decode_time_seconds", between("first_token", "finish"), _REQUESTS)
    histogram("request_inference_time_seconds", between("first_scheduled", "finish"), _REQUESTS)
    histogram("iteration_tokens_total", (step.plan.num_tokens for step in trace.steps), _STEP_TOKENS)
    histogram("request_prompt_tokens", (record.num_prompt_tokens for record in seated), _LENGTHS)
    histogram("request_generation_tokens", (len(record.tokens) for record in served), _LENGTHS)
    return "\n".join(lines) + "\n"
