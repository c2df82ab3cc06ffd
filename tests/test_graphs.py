"""Decode steps in static tensors, replayed on a CPU through Triton's interpreter, against the plain path."""

import math

import numpy as np
import pytest
from helpers.kernel_families import FAMILIES, build

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.engine.forward import GraphForward
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve


def run(executor, requests, policy, limits):
    scheduler = Scheduler(policies.get(policy), limits, executor.cache.config)
    return serve(requests, scheduler, executor, on_step=lambda record: scheduler.check())


@pytest.mark.parametrize(("family", "num_splits"), [("llama", None), *((family, 3) for family in FAMILIES)])
def test_tokens_of_replayed_steps_equal_those_of_the_plain_path(family, num_splits):
    rng = np.random.default_rng(3)
    # Contexts of more than 16 and 32 keys, the kernel's tile, fill two and three pieces.
    requests = [
        Request(f"r{n}", tuple(rng.integers(3, 97, size).tolist()), max_tokens)
        for n, (size, max_tokens) in enumerate([(30, 5), (3, 3), (14, 5)])
    ]
    limits, cache = SchedulerConfig(3, 64), CacheConfig(13, 4)
    loaded = build(family)
    plain = run(
        ModelExecutor(loaded, limits, cache, backend="torch", fill=math.nan), requests, "fcfs", limits
    )
    executor = ModelExecutor(loaded, limits, cache, backend="triton", graphs=True, fill=math.nan)
    if num_splits:
        executor._run_model = GraphForward(loaded.model, executor.cache, 3, cache.num_tokens, num_splits)
    assert list(executor._run_model._graphs) == [3, 2, 1]
    fills = []
    for size, (static, replay) in executor._run_model._graphs.items():
        executor._run_model._graphs[size] = (
            static,
            lambda size=size, replay=replay: (
                fills.append(size),
                replay(),
            )[1],
        )
    through = run(executor, requests, "fcfs", limits)
    assert through.outputs == plain.outputs
    assert {1, 3} <= set(fills), "steps of these sizes were not replayed"


def test_rows_that_only_fill_a_batch_up_write_nothing():
    loaded = build("llama")
    limits, cache = SchedulerConfig(5, 64), CacheConfig(20, 4)
    executor = ModelExecutor(loaded, limits, cache, backend="triton", graphs=True, fill=math.nan)
    # Three decodes, of which one is computed over again, in a batch of four.
    requests = [Request(f"r{n}", (5 + n, 9, 11), 2 + 4 * n) for n in range(3)]
    trace = run(executor, requests, "static", limits)
    assert any(step.plan.padding for step in trace.steps)
    written = sum((~layer.isnan().all(dim=(1, 2))).sum() for layer in executor.cache.kv)
    stored = sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    assert written == len(executor.cache.kv) * stored


def test_graphs_without_triton_are_rejected():
    limits, cache = SchedulerConfig(2, 8), CacheConfig(8, 4)
    with pytest.raises(ValueError, match="the attention backend is 'torch'"):
        ModelExecutor(build("llama"), limits, cache, backend="torch", graphs=True)
