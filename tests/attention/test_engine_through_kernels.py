"""The whole engine through the Triton kernels, in the interpreter, against the same engine in PyTorch."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.kernel_families import FAMILIES, build

from cbresearch import policies
from cbresearch.attention import choose_backend
from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve


def run(loaded, requests, backend, cache, limits, policy="fcfs"):
    scheduler = Scheduler(policies.get(policy), limits, cache)
    executor = ModelExecutor(loaded, limits, cache, backend=backend, fill=math.nan)
    # In a thread, since at pytest's depth CPython 3.11 maps and unmaps a part of its stack again and again.
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(serve, requests, scheduler, executor, on_step=lambda record: scheduler.check())
        return served.result()


# Each family under one of the two modes, for what a mode copies does not depend on the family.
@pytest.mark.parametrize(("family", "mode"), [*zip(FAMILIES, ["recompute", "swap"] * 2, strict=True)])
def test_tokens_through_the_kernels_equal_those_through_pytorch(family, mode):
    rng = np.random.default_rng(3)
    head = rng.integers(3, 97, 8).tolist()
    prompts = [tuple(head + rng.integers(3, 97, rng.integers(1, 6)).tolist()) for _ in range(4)]
    requests = [Request(f"r{n}", prompt, 7, arrival=0.02 * n) for n, prompt in enumerate(prompts)]
    limits = SchedulerConfig(3, 11, preemption=mode)
    cache = CacheConfig(7, 4, prefix_caching=True, num_host_blocks=8)
    # The steps last as long as they do, so the schedules may differ; the answers may not.
    loaded = build(family)
    plain = run(loaded, requests, "torch", cache, limits)
    through = run(loaded, requests, "triton", cache, limits)
    assert through.outputs == plain.outputs
    assert len(set(through.outputs.values())) > 1
    assert sum(record.num_preemptions for record in through.requests) > 0, "no request was preempted"
    assert sum(record.num_cached_tokens for record in through.requests) > 0, "nothing was found cached"


def test_a_row_computed_over_again_writes_nothing_through_the_kernels():
    loaded = build("llama")
    requests = [Request(f"r{n}", (5 + n, 9, 11), 2 + 4 * n) for n in range(3)]
    arguments = (CacheConfig(20, 4), SchedulerConfig(3, 64), "static")
    plain = run(loaded, requests, "torch", *arguments)
    assert run(loaded, requests, "triton", *arguments).outputs == plain.outputs
    assert any(step.plan.padding for step in plain.steps)


SHAPE = ModelShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, num_parameters=1)
LATENTS = ModelShape(
    num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, num_parameters=1, latent_dim=24, value_head_dim=8
)


@pytest.mark.parametrize(
    ("asked", "shape", "device", "chosen"),
    [
        (None, SHAPE, "cpu", "torch"),
        (None, SHAPE, "cuda", "triton"),
        (None, LATENTS, "cuda", "torch"),
        ("triton", SHAPE, "cpu", "triton"),
        ("torch", SHAPE, "cuda", "torch"),
    ],
)
def test_a_gpu_takes_the_kernels_where_they_fit_and_a_cpu_only_when_asked(asked, shape, device, chosen):
    assert choose_backend(asked, shape, torch.device(device)) == chosen


@pytest.mark.parametrize(
    ("asked", "shape", "said"), [("tritn", SHAPE, "tritn"), ("triton", LATENTS, "latents")]
)
def test_a_backend_that_cannot_be_is_rejected(asked, shape, said):
    with pytest.raises(ValueError, match=said):
        choose_backend(asked, shape, torch.device("cpu"))
