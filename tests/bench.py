"""Benchmarks, printed as ratios measured in one run: `make bench`.

The engine against two ways that transformers itself offers, on the same requests; the engine's time
against the time inside the model; the scheduler's time. Absolute figures move from run to run on a shared
machine; contestants are interleaved and medians compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from cbresearch import models, policies
from cbresearch.blocks import BlockManager
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.engine import ModelExecutor
from cbresearch.models import LoadedModel
from cbresearch.request import Request, SamplingParams
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.workloads import load, resolve_prompts

Tokens = list[tuple[int, ...]]


def engine(loaded: LoadedModel, requests: Sequence[Request], num_seqs: int) -> Tokens:
    """Serve with our engine, first come first served."""
    limits, cache = SchedulerConfig(num_seqs, 512), CacheConfig(2048)
    trace = serve(
        requests, Scheduler(policies.get("fcfs"), limits, cache), ModelExecutor(loaded, limits, cache)
    )
    return [record.tokens for record in trace.requests]


def padded_generate(loaded: LoadedModel, requests: Sequence[Request], num_seqs: int) -> Tokens:
    """Serve with `generate`, in left-padded batches that run until their longest request is done."""
    outputs: Tokens = []
    for first in range(0, len(requests), num_seqs):
        batch = requests[first : first + num_seqs]
        width = max(request.num_prompt_tokens for request in batch)
        input_ids = torch.tensor(
            [[0] * (width - len(request.prompt)) + list(request.prompt) for request in batch]
        )
        mask = torch.tensor(
            [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
        )
        longest = max(request.max_tokens for request in batch)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=0)
        rows = loaded.model.generate(input_ids, attention_mask=mask, generation_config=config)[
            :, width:
        ].tolist()
        outputs += [tuple(row[: request.max_tokens]) for row, request in zip(rows, batch, strict=True)]
    return outputs


def generate_batch(loaded: LoadedModel, requests: Sequence[Request]) -> Tokens:
    """Serve with transformers' own continuous batching, each request with its own length."""
    settings = ContinuousBatchingConfig(
        max_batch_tokens=512, num_blocks=1024, page_size=16, use_cuda_graph=False
    )
    config = GenerationConfig(max_new_tokens=512, do_sample=False, pad_token_id=0, eos_token_id=-1)
    outputs: dict[str, tuple[int, ...]] = {}
    with loaded.model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, block=True, timeout=5
    ) as manager:
        for request in requests:
            manager.add_request(
                list(request.prompt),
                request_id=request.id,
                max_new_tokens=request.max_tokens,
                eos_token_id=-1,
            )
        while len(outputs) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = tuple(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch ended early")
    return [outputs[request.id] for request in requests]


def compare_throughput(num_requests: int, num_rounds: int) -> None:
    """Print each contestant's throughput, and the engine's as a ratio to the others."""
    loaded = models.load("tiny")
    loaded.model.generation_config.eos_token_id = None
    rng = np.random.default_rng(0)
    requests = [
        replace(request, sampling=SamplingParams(ignore_eos=True))
        for request in resolve_prompts(load("lognormal128", rng), None, loaded.shape.vocab_size, rng)
    ][:num_requests]
    num_tokens = sum(request.max_tokens for request in requests)
    contestants: dict[str, Callable[[], Tokens]] = {
        "generate, batches of 8": lambda: padded_generate(loaded, requests, 8),
        "generate_batch": lambda: generate_batch(loaded, requests),
        "engine, 8 slots": lambda: engine(loaded, requests, 8),
        "engine, 64 slots": lambda: engine(loaded, requests, 64),
    }
    outputs: dict[str, Tokens] = {}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    engine(loaded, requests[:8], 8)
    with tqdm(total=num_rounds * len(contestants), desc="throughput") as bar:
        for _ in range(num_rounds):
            for name, serve_all in contestants.items():
                began = time.perf_counter()
                outputs[name] = serve_all()
                seconds[name].append(time.perf_counter() - began)
                bar.update()
    mean_prompt = np.mean([request.num_prompt_tokens for request in requests])
    print(
        f"{len(requests)} requests, {num_tokens} output tokens, prompts of mean {mean_prompt:.1f}; "
        f"{torch.get_num_threads()} threads; median of {num_rounds} interleaved rounds (least to most)"
    )
    medians = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, high = num_tokens / max(times), num_tokens / min(times)
        same = sum(a == b for a, b in zip(outputs[name], outputs["engine, 8 slots"], strict=True))
        print(
            f"  {name:24} {medians[name]:8.0f} tokens/s ({low:.0f} to {high:.0f}); "
            f"{same} of {len(requests)} outputs equal the engine's"
        )
    for slots in (8, 64):
        ours = f"engine, {slots} slots"
        for name in ("generate, batches of 8", "generate_batch"):
            print(f"  {ours} / {name}: {medians[ours] / medians[name]:.2f}x")


def compare_to_forward(num_requests: int) -> None:
    """Print the engine's total time over the time inside the model's forward, in the same steps."""
    loaded = models.load("tiny")
    rng = np.random.default_rng(0)
    requests = resolve_prompts(load("lognormal128", rng), None, loaded.shape.vocab_size, rng)[:num_requests]
    for slots in (8, 64):
        inside: list[float] = []
        before = loaded.model.register_forward_pre_hook(
            lambda *_, inside=inside: inside.append(-time.perf_counter())
        )
        after = loaded.model.register_forward_hook(
            lambda *_, inside=inside: inside.append(inside.pop() + time.perf_counter())
        )
        began = time.perf_counter()
        engine(loaded, requests, slots)
        total = time.perf_counter() - began
        before.remove()
        after.remove()
        print(
            f"engine at {slots} slots: {total:.2f} s in all, {sum(inside):.2f} s inside the model's forward "
            f"({len(inside)} steps): {total / sum(inside):.3f}x"
        )


def time_scheduler(num_running: int, num_steps: int = 400) -> None:
    """Print the scheduler's host time per running request and step of vllm_v1, with nothing but decodes."""
    limits = SchedulerConfig(num_running, max(2048, num_running))
    scheduler = Scheduler(policies.get("vllm_v1"), limits, CacheConfig(num_running * 64))
    executor = CostExecutor(Linear(step=1.0))
    for place in range(num_running):
        scheduler.submit(Request(str(place), prompt=8, max_tokens=1000))
    samples = []
    now = 0.0
    for _ in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        planned = time.perf_counter()
        result = executor.execute(plan)
        executed = time.perf_counter()
        scheduler.commit(plan, result, now)
        samples.append((planned - began + time.perf_counter() - executed) / len(plan.scheduled))
        now += result.duration
    print(
        f"scheduler at {num_running} running: {statistics.median(samples) * 1e6:.2f} us "
        "per running request and step (schedule and commit, median step)"
    )


def time_blocks(num_blocks: int, num_rounds: int = 400) -> dict[str, float]:
    """Return the seconds of the block manager's operations in a pool full of cached blocks."""
    size, num_hits = 16, 8
    blocks = BlockManager(CacheConfig(num_blocks, size, prefix_caching=True))
    prefix = tuple(range(num_hits * size))
    # Everything is cached, so that each new block has to evict one, as in a server that has run for long.
    for place in range(num_blocks // 10):
        token_ids = (place, *range(10 * size - 1))
        blocks.allocate("filler", len(token_ids))
        blocks.enter("filler", token_ids, len(token_ids))
        blocks.free("filler")
    seconds: dict[str, list[float]] = {"append": [], "allocate with 8 hits": [], "free": []}
    for place in range(num_rounds):
        token_ids = (*prefix, place)
        began = time.perf_counter()
        matched = blocks.match(token_ids)
        assert blocks.can_allocate("a", len(token_ids), matched)
        blocks.share("a", matched)
        blocks.allocate("a", len(token_ids))
        allocated = time.perf_counter()
        for num_tokens in range(len(token_ids) + 1, len(token_ids) + 1 + size):
            blocks.allocate("a", num_tokens)
        appended = time.perf_counter()
        if not matched:
            blocks.enter("a", prefix, len(prefix))
        freeing = time.perf_counter()
        blocks.free("a")
        freed = time.perf_counter()
        assert len(matched) == (num_hits if place else 0)
        seconds["allocate with 8 hits"].append(allocated - began)
        seconds["append"].append((appended - allocated) / size)
        seconds["free"].append(freed - freeing)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compare_pool_sizes(small: int = 1_000, large: int = 100_000, num_rounds: int = 5) -> None:
    """Print what the block manager takes in a small and in a large pool, best of interleaved rounds."""
    rounds = [(time_blocks(small), time_blocks(large)) for _ in range(num_rounds)]
    few, many = (
        {name: min(times[name] for times in side) for name in side[0]} for side in zip(*rounds, strict=True)
    )
    for name, seconds in few.items():
        print(
            f"blocks: {name:20} {seconds * 1e6:6.2f} us at {small:,} blocks, {many[name] * 1e6:6.2f} us at "
            f"{large:,}: {many[name] / seconds:.2f}x"
        )


def main() -> None:
    """Run all benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128, help="requests in the throughput comparison")
    parser.add_argument(
        "--rounds", type=int, default=3, help="interleaved rounds of the throughput comparison"
    )
    options = parser.parse_args()
    compare_pool_sizes()
    for num_running in (64, 256, 1024):
        time_scheduler(num_running)
    compare_to_forward(options.requests)
    compare_throughput(options.requests, options.rounds)


if __name__ == "__main__":
    main()
