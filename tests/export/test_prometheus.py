"""What a run exposes under vLLM's names, read back by the Prometheus client's own parser."""

import bisect
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cbresearch import CacheConfig, Request, SchedulerConfig, metrics, simulate
from cbresearch.costs import Linear
from cbresearch.export import prometheus
from cbresearch.trace import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    requests = [
        Request(f"r{place}", tuple(range(5 + place % 3)), 1 + place % 19, arrival=0.1 * place)
        for place in range(30)
    ]
    requests.append(Request("too long", 999, 9))
    pool = CacheConfig(num_blocks=9, block_size=4, prefix_caching=True)
    return simulate(requests, cost=Linear(0.3, 0.02), scheduler=SchedulerConfig(4, 16), cache=pool)


@pytest.fixture(scope="module")
def samples(trace) -> dict[str, dict]:
    """Return the value of each sample by name and labels, the policy's aside."""
    found: dict[str, dict] = {}
    for family in text_string_to_metric_families(prometheus(trace)):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "policy")
            assert sample.labels["policy"] == trace.policy
            found.setdefault(sample.name.removeprefix("vllm:"), {})[labels] = sample.value
    return found


def test_counters_are_the_sums_over_the_requests(trace, samples):
    assert metrics.num_preemptions(trace) > 0 and metrics.prefix_hit_rate(trace) > 0
    assert samples["num_preemptions_total"] == {(): metrics.num_preemptions(trace)}
    assert samples["generation_tokens_total"] == {(): sum(map(len, trace.outputs.values()))}
    assert samples["prompt_tokens_total"] == {(): sum(record.num_prompt_tokens for record in trace.served)}
    assert samples["request_success_total"] == {("length",): 30}
    hits, queries = samples["prefix_cache_hits_total"][()], samples["prefix_cache_queries_total"][()]
    assert hits / queries == pytest.approx(metrics.prefix_hit_rate(trace))


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("time_to_first_token_seconds", metrics.ttft),
        ("inter_token_latency_seconds", metrics.itl),
        ("request_time_per_output_token_seconds", metrics.tpot),
        ("e2e_request_latency_seconds", metrics.latency),
        ("request_queue_time_seconds", metrics.queue_time),
    ],
)
def test_histograms_have_the_count_and_the_mean_of_the_metric(trace, samples, name, measure):
    summary = measure(trace)
    assert samples[f"{name}_count"][()] == summary.n
    assert samples[f"{name}_sum"][()] / summary.n == pytest.approx(summary.mean)


def test_a_bucket_counts_what_does_not_exceed_its_bound(trace, samples):
    values = sorted(record.ttft for record in trace.served)
    buckets = samples["time_to_first_token_seconds_bucket"]
    assert len(buckets) == 23
    for (bound,), number in buckets.items():
        assert number == bisect.bisect_right(values, float(bound))


def test_prefill_and_decode_make_up_inference(samples):
    parts = [samples[f"request_{part}_time_seconds_sum"][()] for part in ("prefill", "decode", "inference")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])


def test_every_sample_belongs_to_a_family_of_a_known_type(trace):
    families = list(text_string_to_metric_families(prometheus(trace)))
    assert {family.type for family in families} == {"counter", "histogram"}
    assert all(family.samples for family in families)


def test_a_counter_keeps_all_its_digits():
    trace = simulate([Request(f"r{n}", 123_457, 3) for n in range(9)], scheduler=SchedulerConfig(4, 200_000))
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(prometheus(trace))
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_total"
    )
    assert value == 9 * 123_457


def test_a_run_without_requests_exposes_zeros():
    text = prometheus(simulate([]))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {s.value for s in families["vllm:time_to_first_token_seconds"].samples} == {0}


def test_a_policy_name_with_quotes_stays_one_label(trace):
    text = prometheus(replace(trace, policy='a"b\\c\nd'))
    assert {s.labels["policy"] for f in text_string_to_metric_families(text) for s in f.samples} == {
        'a"b\\c\nd'
    }
