"""What needs a GPU: `make gpu`. Without one, everything here is skipped."""

import math

import pytest
import torch
from conftest import generate_alone
from helpers.engine_runs import POLICIES, assert_served_as_alone, least_pool, run

from cbresearch import models
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.policies import get
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def tiny_on_gpu():
    loaded = models.load("tiny", device="cuda")
    loaded.model.generation_config.eos_token_id = None
    return loaded


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_float32_tokens_on_the_gpu_equal_generate_alone_on_the_cpu(
    policy, block_size, tiny_on_gpu, alone, top_two_gap
):
    requests = [Request(f"r{n}", answer.prompt, 12) for n, answer in enumerate(alone)]
    expected = {f"r{n}": (answer.continuation[:12], answer.prompt) for n, answer in enumerate(alone)}
    cache = CacheConfig(least_pool(requests, block_size) + 2, block_size)
    trace = run(tiny_on_gpu, requests, policy, SchedulerConfig(6, 64), cache)
    assert_served_as_alone(models.load("tiny"), trace, expected, top_two_gap)


def test_a_half_precision_run_on_the_gpu_is_finite_and_complete(alone):
    loaded = models.load("tiny", device="cuda", dtype=torch.bfloat16)
    limits, cache = SchedulerConfig(8, 256), CacheConfig(200)
    requests = [Request(f"r{n}", answer.prompt, 12) for n, answer in enumerate(alone)]
    scheduler = Scheduler(get("fcfs"), limits, cache)
    trace = serve(requests, scheduler, ModelExecutor(loaded, limits, cache, fill=math.nan))
    assert all(record.error is None and record.tokens for record in trace.requests)


def test_the_model_on_the_gpu_answers_as_on_the_cpu(tiny_on_gpu, alone):
    prompt = torch.tensor([alone[5].prompt], device="cuda")
    with torch.inference_mode():
        best = tiny_on_gpu.model(prompt, use_cache=False).logits[0, -1].argmax()
    assert int(best) == generate_alone(models.load("tiny").model, alone[5].prompt, 1)[0]
