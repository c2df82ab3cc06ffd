"""One request's life in plain words, and why a step left somebody out, against the plans themselves."""

import random
import re

import pytest

from cbresearch import CacheConfig, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.export import explain
from cbresearch.request import Rejected, parallel_samples
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, CostExecutor
from cbresearch.step import SKIP_REASONS

POLICIES = ("fcfs", "static", "static:wait=2", "prefill_first", "priority", "sjf", "vllm_v1", "vtc", "mc_sf")


def random_run(policy, seed):
    draw = random.Random(seed)
    requests = [
        Request(
            f"r{place}",
            draw.randint(1, 14),
            draw.randint(1, 9),
            arrival=float(draw.randint(0, 12)),
            priority=draw.randint(0, 2),
            client="ab"[place % 2],
        )
        for place in range(10)
    ]
    mode = draw.choice(("recompute", "swap"))
    return simulate(
        requests,
        policy,
        scheduler=SchedulerConfig(draw.randint(1, 5), draw.choice((3, 9, 99)), preemption=mode),
        cache=CacheConfig(24 + draw.randint(0, 9), 1, num_host_blocks=30 * (mode == "swap")),
    )


def numbers(pattern, text):
    return [int(number) for number in re.findall(pattern, text)]


def test_a_life_with_a_wait_a_swap_and_a_return_is_told_in_order():
    requests = [Request("a", 5, 6, client="x"), Request("b", 3, 7, arrival=0.5)]
    trace = simulate(
        requests,
        scheduler=SchedulerConfig(2, 4, preemption="swap"),
        cache=CacheConfig(12, 1, num_host_blocks=6),
    )
    assert explain(trace, "a") == (
        "request 'a'\n"
        "  arrived at 0 s with 5 tokens from client 'x'\n"
        "  took seat 0 in step 0, at 0 s, with nothing cached\n"
        "  had 5 tokens computed in 2 steps, steps 0 to 1, for 1 new token\n"
        "  decoded in 5 steps, steps 2 to 6, for 5 new tokens\n"
        "  finished at 7 s with 6 tokens (length: max_tokens was reached); TTFT 2 s, latency 7 s"
    )
    assert explain(trace, "b") == (
        "request 'b'\n"
        "  arrived at 0.5 s with 3 tokens\n"
        "  waited 0.5 s, in which no step began\n"
        "  took seat 1 in step 1, at 1 s, with nothing cached\n"
        "  had 3 tokens computed in 1 step, step 1, for 1 new token\n"
        "  decoded in 2 steps, steps 2 to 3, for 2 new tokens\n"
        "  lost seat 1 before step 4, at 4 s: its KV moved to the host (swap)\n"
        "  waited 3 s, through 3 steps: the KV pool had no room (2); others needed its room (1)\n"
        "  came back to seat 0 in step 7, at 7 s, with 5 tokens in the KV cache already\n"
        "  decoded in 4 steps, steps 7 to 10, for 4 new tokens\n"
        "  finished at 11 s with 7 tokens (length: max_tokens was reached); TTFT 1.5 s, latency 10.5 s"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_of_a_life_is_told_once(policy):
    for seed in range(6):
        trace = random_run(policy, seed)
        for record in trace.requests:
            text = explain(trace, record.id)
            during = [
                step for step in trace.steps if record.arrival <= step.start and step.end <= record.finish
            ]
            mine = [
                entry for step in during for entry in step.plan.scheduled if entry.request_id == record.id
            ]
            assert sum(numbers(r"(?:computed|decoded) in (\d+) step", text)) == len(mine)
            assert sum(numbers(r"had (\d+) tokens? computed", text)) == sum(
                entry.num_tokens for entry in mine if entry.is_prefill
            )
            assert sum(numbers(r"for (\d+) new token", text)) == len(record.tokens)
            assert sum(numbers(r"through (\d+) step", text)) == len(during) - len(mine)
            assert sum(numbers(r"\((\d+)\)", text)) == len(during) - len(mine)
            assert len(numbers(r"lost seat (\d+)", text)) == record.num_preemptions
            padding = [
                step for step in trace.steps if record.id in [row.request_id for row in step.plan.padding]
            ]
            assert sum(numbers(r"for nothing in (\d+) step", text)) == len(padding)
            assert f"finished at {record.finish:g} s with {len(record.tokens)} token" in text
            assert f"TTFT {record.ttft:g} s, latency {record.latency:g} s" in text


@pytest.mark.parametrize("policy", POLICIES)
def test_num_skipped_counts_every_request_that_is_not_served_by_its_reason(policy):
    totals = dict.fromkeys(SKIP_REASONS, 0)
    for seed in range(10):
        trace = random_run(policy, seed)
        for step in trace.steps:
            skipped = {reason: step.num_skipped()[reason] for reason in SKIP_REASONS}
            assert min(skipped.values()) >= 0
            there = step.num_running + step.num_waiting
            assert sum(skipped.values()) == there - len(step.plan.scheduled) - len(step.plan.preempted)
            for reason, number in skipped.items():
                totals[reason] += number
    assert totals["seats" if policy != "static" else "policy"] > 0
    assert totals["blocks"] + totals["policy"] > 0


@pytest.mark.parametrize(
    ("limits", "pool", "reason"),
    [
        ({"max_num_seqs": 1}, {}, "no seat was free"),
        ({"max_num_batched_tokens": 6}, {}, "the token budget was used up"),
        ({}, {"num_blocks": 9}, "the KV pool had no room"),
        (
            {"max_num_batched_tokens": 9, "chunked_prefill": False},
            {},
            "the whole prompt did not fit the token budget",
        ),
    ],
)
def test_a_wait_has_its_reason(limits, pool, reason):
    requests = [Request("a", 6, 3), Request("b", 6, 3)]
    trace = simulate(
        requests,
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 99, **limits}),
        cache=CacheConfig(**{"num_blocks": 99, "block_size": 1, **pool}),
    )
    assert f"steps: {reason} (" in explain(trace, "b") or f"step: {reason} (" in explain(trace, "b")
    assert "waited" not in explain(trace, "a")


def test_a_static_batch_keeps_a_newcomer_waiting_by_policy():
    trace = simulate([Request("a", 1, 4), Request("b", 1, 1, arrival=1.0)], "static")
    assert "waited 3 s, through 3 steps: the policy chose others (3)" in explain(trace, "b")


def test_a_parallel_sample_waits_for_its_siblings_prompt():
    samples = parallel_samples(Request("a", (1, 2, 3, 4, 5, 6), 3), 2)
    trace = simulate(samples, scheduler=SchedulerConfig(4, 4), cache=CacheConfig(50, 4))
    text = explain(trace, "a/1")
    assert "a parallel sample was computing the prompt" in text
    assert "with 5 tokens in the KV cache already" in text


def test_a_cached_prefix_and_a_recompute_are_told():
    prompt = tuple(range(9))
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(1), CacheConfig(50, 4, prefix_caching=True))

    def on_step(record):
        if record.plan.step == 3:
            scheduler.preempt("again", "recompute")

    trace = serve(
        [Request("first", prompt, 2), Request("again", prompt, 4)],
        scheduler,
        CostExecutor(UNIT_STEP),
        on_step=on_step,
    )
    text = explain(trace, "again")
    assert "took seat 0 in step 2, at 2 s, with 8 tokens in the KV cache already" in text
    assert "lost seat 0 before step 4, at 4 s: its KV was given up" in text
    assert "came back to seat 0 in step 4, at 4 s, with 8 tokens in the KV cache already" in text


def test_a_rejected_request_is_told_with_its_error():
    trace = simulate(
        [Request("big", 99, 2), Rejected("line", "line 3 is no JSON")], cache=CacheConfig(4, 1), policy="fcfs"
    )
    assert explain(trace, "big").splitlines()[-1] == f"  was rejected: {trace.requests[0].error}"
    assert explain(trace, "line").splitlines()[-1] == "  was rejected: line 3 is no JSON"


@pytest.mark.parametrize("step", [0, 2, 5])
def test_an_aborted_request_is_told_up_to_its_end(step):
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(1), CacheConfig(50))

    def on_step(record):
        if record.plan.step == step:
            scheduler.abort("b")

    trace = serve(
        [Request("a", 1, 4), Request("b", 1, 9), Request("c", 1, 9)],
        scheduler,
        CostExecutor(UNIT_STEP),
        on_step=on_step,
    )
    text = explain(trace, "b")
    assert text.splitlines()[-1] == (
        f"  was aborted before step {step + 1}, at {step + 1} s, with {max(0, step - 3)} tokens"
    )
    assert f"through {min(step + 1, 4)} step" in text


def test_an_unknown_request_is_answered_with_near_misses():
    trace = simulate([Request(name, 1, 1) for name in ("alpha", "beta", "gamma")])
    with pytest.raises(ValueError, match=r"no request 'alpa' .* did you mean 'alpha'\?"):
        explain(trace, "alpa")
    with pytest.raises(ValueError, match="no request 'x' in this run of 0 requests; it has none"):
        explain(simulate([]), "x")
