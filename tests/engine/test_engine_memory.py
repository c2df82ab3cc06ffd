"""Swaps, forks, windows, hits and aborts on a real model: tokens are those of the prompt alone."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conftest import generate_alone
from helpers.core import POLICIES, Meddler, least_pool, preempting, serve_on_model

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

NUM_COMBINATIONS = 48
NUM_SHARDS = 3
MODES = ("recompute", "swap")


def random_model_case(seed, answers):
    """Draw requests with known continuations, policy, limits and pools down to the least."""
    rng = np.random.default_rng(seed)
    expected, requests = {}, []
    for place in range(int(rng.integers(2, 6))):
        answer = answers[int(rng.integers(len(answers)))]
        max_tokens = int(rng.integers(1, 13))
        request = Request(f"r{place}", answer.prompt, max_tokens, float(rng.choice([0.0, rng.random() / 10])))
        samples = parallel_samples(request, int(rng.integers(2, 4))) if rng.random() < 0.4 else (request,)
        requests += samples
        expected |= {sample.id: answer.continuation[:max_tokens] for sample in samples}
    block_size = int(rng.choice([1, 3, 16]))
    limits = SchedulerConfig(int(rng.integers(2, 9)), int(rng.choice([7, 64, 2048])), preemption="swap")
    cache = CacheConfig(
        least_pool(requests, limits, block_size) + int(rng.choice([0, 0, 1, 4])),
        block_size,
        prefix_caching=bool(rng.integers(2)),
        num_host_blocks=int(rng.choice([0, 1, 6, 200, 200])),
    )
    return requests, expected, POLICIES[seed % len(POLICIES)], limits, cache


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_model_tokens_equal_generate_alone_whatever_is_swapped_and_forked(shard, tiny, alone):
    seen: Counter[str] = Counter()
    for seed in range(shard, NUM_COMBINATIONS, NUM_SHARDS):
        requests, expected, policy, limits, cache = random_model_case(seed, alone)
        trace, executor = serve_on_model(tiny, requests, policy, limits, cache)
        assert trace.outputs == expected, f"seed {seed}: {policy}, {limits}, {cache}"
        seen.update(executor.num_transfers)
    assert min(seen[kind] for kind in ("swap_out", "swap_in", "copy")) > 0


def test_a_cached_prompt_on_a_model_gives_the_tokens_of_a_computed_one(tiny, alone):
    answers = [answer for answer in alone if len(answer.prompt) in (3, 16, 32, 33, 48)]
    requests = [
        Request(f"{n} {time}", answer.prompt, 5, time)
        for n, answer in enumerate(answers)
        for time in (0.0, 1000.0)
    ]
    limits = SchedulerConfig(8, 2048)
    cache = CacheConfig(400, 3, prefix_caching=True)
    trace, _ = serve_on_model(tiny, requests, "fcfs", limits, cache)
    cached = {record.id: record.num_cached_tokens for record in trace.requests}
    for n, answer in enumerate(answers):
        assert trace.outputs[f"{n} 0.0"] == trace.outputs[f"{n} 1000.0"] == answer.continuation[:5]
        assert cached[f"{n} 1000.0"] >= (len(answer.prompt) - 1) // 3 * 3
        assert cached[f"{n} 1000.0"] < len(answer.prompt)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [False, True])
def test_model_tokens_are_the_same_whichever_step_a_request_is_preempted_after(mode, caching, tiny, alone):
    chosen = [alone[3], alone[6]]
    requests = [Request(str(n), answer.prompt, 6) for n, answer in enumerate(chosen)]
    expected = {str(n): answer.continuation[:6] for n, answer in enumerate(chosen)}
    limits = SchedulerConfig(4, 20, preemption=mode)
    cache = CacheConfig(60, 3, prefix_caching=caching, num_host_blocks=60)
    for name in ("0", "1"):
        for step in range(7):
            between = preempting(name, {step}, mode)
            trace, executor = serve_on_model(tiny, requests, "fcfs", limits, cache, between)
            assert trace.outputs == expected, f"{name} preempted after step {step}"
            assert (executor.num_transfers["swap_out"] > 0) == (
                mode == "swap" and sum(record.num_preemptions for record in trace.requests) > 0
            )


def test_model_tokens_are_the_same_among_random_aborts_and_preemptions_in_tiny_pools(tiny, alone):
    seen: Counter[str] = Counter()
    for seed in range(14):
        requests, expected, policy, limits, cache = random_model_case(100 + seed, alone)
        meddler = Meddler(seed, rate=0.2, aborts=0.1, patience=20)
        trace, executor = serve_on_model(tiny, requests, policy, limits, cache, meddler)
        for record in trace.requests:
            want = expected[record.id]
            assert record.tokens == (want[: len(record.tokens)] if record.finish_reason == "abort" else want)
        seen.update(executor.num_transfers)
        seen["abort"] += meddler.num_aborted.total()
    assert all(seen[kind] > 0 for kind in ("swap_out", "swap_in", "copy", "abort")), seen


def test_a_padding_row_on_a_model_writes_nothing(tiny, alone):
    # What it would write lies in a block that others may share by now, or that it gave back.
    requests = [Request("a", alone[3].prompt, 2), Request("b", alone[6].prompt, 6)]
    limits, cache = SchedulerConfig(4, 2048), CacheConfig(60, 3)
    scheduler = Scheduler(policies.get("static"), limits, cache)
    executor = ModelExecutor(tiny, limits, cache, fill=math.nan)
    num_padded = 0

    class Marking:
        check = executor.check

        def execute(self, plan):
            nonlocal num_padded
            slots = []
            for row in plan.padding:
                place, offset = divmod(row.context_length - 1, cache.block_size)
                slots.append(scheduler.kv.table(row.request_id)[place] * cache.block_size + offset)
            for layer in executor.cache.kv:
                layer[slots] = 7.0
            result = executor.execute(plan)
            num_padded += len(slots)
            assert all(bool((layer[slots] == 7.0).all()) for layer in executor.cache.kv)
            return result

    trace = serve(requests, scheduler, Marking())
    assert num_padded == 4
    assert trace.outputs["b"] == alone[6].continuation[:6]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_model_with_a_window_never_reads_blocks_that_were_freed(block_size, caching):
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from cbresearch import models

    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        sliding_window=4,
    )
    loaded = models.wrap("windowed", MistralForCausalLM(config))
    loaded = replace(loaded, eos_token_ids=frozenset())
    requests = [
        Request(str(n), tuple((7 * n + 3 * k) % 60 + 3 for k in range(1 + 5 * n)), 12, 0.001 * n)
        for n in range(5)
    ]
    num_blocks = math.ceil((3 + 7) / block_size) + 3
    limits = SchedulerConfig(4, 7, preemption="swap")
    cache = CacheConfig(num_blocks, block_size, caching, num_host_blocks=8, sliding_window=4)
    assert max(request.num_prompt_tokens + 11 for request in requests) > cache.num_tokens

    def between(scheduler, record):
        if record.plan.step % 5 == 4 and scheduler.running:
            scheduler.preempt(scheduler.running[-1].id, "swap")

    trace, executor = serve_on_model(loaded, requests, "fcfs", limits, cache, between)
    for request in requests:
        assert trace.outputs[request.id] == generate_alone(loaded.model, request.prompt, 12)
    assert executor.num_transfers["swap_out"] > 0
    assert caching or executor.num_transfers["swap_in"] > 0
