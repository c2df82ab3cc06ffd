"""The engine against others on the same requests, with as many slots, in one run.

The others are transformers' `generate` on left-padded batches, transformers' own continuous batching
(`generate_batch`), and vLLM's CPU build. That one needs an environment of its own, whose Python is named by
CBRESEARCH_VLLM_PYTHON; `make bench-vllm` sets it up beside the project's (`set_up_vllm`). Without it vLLM
is left out.

Contestants take turns, and medians are compared, since absolute figures move from run to run on a shared
machine; a ratio's range is that of the ratios inside each round. Nobody's start-up is counted: models are
loaded, compiled and warmed up before the first round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from cbresearch import models, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.models import LoadedModel
from cbresearch.request import Request, SamplingParams
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.workloads import load, resolve_prompts

Tokens = list[tuple[int, ...]]
# Serves some requests; returns their tokens and the seconds that it took.
Contestant = Callable[[Sequence[Request]], tuple[Tokens, float]]

MAX_NUM_BATCHED_TOKENS = 512
VLLM_VARIABLE = "CBRESEARCH_VLLM_PYTHON"
WORKLOADS = {"tiny": "lognormal128", "smollm2-135m": "chat24"}
NUM_BLOCKS = {"tiny": 2048, "smollm2-135m": 512}


def prepare(name: str, num_requests: int | None) -> tuple[LoadedModel, list[Request]]:
    """Load a model, and the requests that it is measured with; all outputs run to their full length."""
    loaded = models.load(name)
    loaded.model.generation_config.eos_token_id = None
    rng = np.random.default_rng(0)
    drawn = resolve_prompts(load(WORKLOADS[name], rng), loaded.encode, loaded.shape.vocab_size, rng)
    whole = SamplingParams(ignore_eos=True)
    return loaded, [replace(request, arrival=0.0, sampling=whole) for request in drawn][:num_requests]


def timed(serve_all: Callable[[Sequence[Request]], Tokens]) -> Contestant:
    """Return a contestant that is timed in this process."""

    def timed_serve(requests: Sequence[Request]) -> tuple[Tokens, float]:
        began = time.perf_counter()
        tokens = serve_all(requests)
        return tokens, time.perf_counter() - began

    return timed_serve


def executor(loaded: LoadedModel, num_seqs: int, *, compile: bool) -> ModelExecutor:
    """Return an executor for up to `num_seqs` requests, warmed up."""
    limits = SchedulerConfig(num_seqs, MAX_NUM_BATCHED_TOKENS)
    made = ModelExecutor(loaded, limits, CacheConfig(NUM_BLOCKS[loaded.name]), compile=compile)
    made.warm_up()
    return made


def engine(made: ModelExecutor, requests: Sequence[Request], num_seqs: int) -> Tokens:
    """Serve with our engine, first come first served."""
    limits = SchedulerConfig(num_seqs, MAX_NUM_BATCHED_TOKENS)
    trace = serve(requests, Scheduler(policies.get("fcfs"), limits, made.cache.config), made)
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
        max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
        num_blocks=NUM_BLOCKS[loaded.name] // 2,
        page_size=16,
        use_cuda_graph=False,
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


@contextmanager
def vllm(python: str, folder: Path, num_seqs: int) -> Iterator[Contestant]:
    """Start vLLM's CPU build in its own environment, and yield it as a contestant.

    Raises:
        RuntimeError: It does not start, or ends early.
    """
    child = Path(__file__).with_name("vllm_child.py")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, str(child), str(folder), str(num_seqs), str(MAX_NUM_BATCHED_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None

        def answer() -> dict:
            line = process.stdout.readline()
            if not line:
                process.wait()
                log.seek(0)
                raise RuntimeError(f"vLLM ended with {process.returncode}:\n{log.read()[-3000:]}")
            return json.loads(line)

        def serve_all(requests: Sequence[Request]) -> tuple[Tokens, float]:
            asked = {
                "prompts": [list(request.prompt) for request in requests],
                "max_tokens": [request.max_tokens for request in requests],
            }
            print(json.dumps(asked), file=process.stdin, flush=True)
            answered = answer()
            return [tuple(tokens) for tokens in answered["tokens"]], answered["seconds"]

        try:
            answer()
            yield serve_all
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def vllm_python() -> str | None:
    """Return the Python of vLLM's environment, or say why vLLM is left out."""
    python = os.environ.get(VLLM_VARIABLE)
    if not python or not Path(python).exists():
        print(f"vLLM is left out: {VLLM_VARIABLE} {'names no file' if python else 'is not set'}")
        return None
    return python


def compare_throughput(
    name: str, all_slots: Sequence[int], num_requests: int | None, num_rounds: int
) -> None:
    """Print each contestant's throughput, and the engine's as ratios to the others."""
    loaded, requests = prepare(name, num_requests)
    num_tokens = sum(request.max_tokens for request in requests)
    python = vllm_python()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if python:
            loaded.model.save_pretrained(folder)
        contestants: dict[str, Contestant] = {}
        ours: dict[int, list[str]] = {slots: [] for slots in all_slots}
        theirs: dict[int, list[str]] = {slots: [] for slots in all_slots}
        for label, compile in (("engine", False), ("compiled engine", True)):
            began = time.perf_counter()
            made = executor(loaded, max(all_slots), compile=compile)
            if compile:
                print(f"{name}: compiled in {time.perf_counter() - began:.1f} s")
            for slots in all_slots:
                contestant = f"{label}, {slots} slots"
                contestants[contestant] = timed(
                    lambda those, made=made, slots=slots: engine(made, those, slots)
                )
                ours[slots].append(contestant)
        contestants["generate, batches of 8"] = timed(lambda those: padded_generate(loaded, those, 8))
        contestants["generate_batch"] = timed(lambda those: generate_batch(loaded, those))
        for slots in all_slots:
            theirs[slots] += ["generate, batches of 8", "generate_batch"]
            if python:
                contestants[f"vLLM, {slots} slots"] = stack.enter_context(vllm(python, folder, slots))
                theirs[slots].append(f"vLLM, {slots} slots")
        outputs, seconds = _rounds(contestants, requests, num_rounds, name)
    mean_prompt = np.mean([request.num_prompt_tokens for request in requests])
    print(
        f"{name}: {len(requests)} requests, {num_tokens} output tokens, prompts of mean {mean_prompt:.1f}; "
        f"{torch.get_num_threads()} threads; medians of {num_rounds} interleaved rounds (least to most)"
    )
    reference = outputs[f"engine, {all_slots[0]} slots"]
    for contestant, times in seconds.items():
        rates = [num_tokens / time for time in times]
        same = sum(a == b for a, b in zip(outputs[contestant], reference, strict=True))
        print(
            f"  {contestant:26} {statistics.median(rates):7.0f} tokens/s ({min(rates):.0f} to "
            f"{max(rates):.0f}); {same} of {len(requests)} outputs equal the engine's"
        )
    for slots in all_slots:
        for mine in ours[slots]:
            for other in theirs[slots]:
                ratios = [b / a for a, b in zip(seconds[mine], seconds[other], strict=True)]
                middle = statistics.median(seconds[other]) / statistics.median(seconds[mine])
                print(f"  {mine} / {other}: {middle:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")


def _rounds(
    contestants: Mapping[str, Contestant], requests: Sequence[Request], num_rounds: int, name: str
) -> tuple[dict[str, Tokens], dict[str, list[float]]]:
    outputs: dict[str, Tokens] = {}
    seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    with tqdm(total=(num_rounds + 1) * len(contestants), desc=name, file=sys.stderr) as bar:
        for serve_all in contestants.values():
            serve_all(requests[:8])
            bar.update()
        for _ in range(num_rounds):
            for contestant, serve_all in contestants.items():
                outputs[contestant], taken = serve_all(requests)
                seconds[contestant].append(taken)
                bar.update()
    return outputs, seconds


def compare_to_forward(num_requests: int, num_rounds: int) -> None:
    """Print the engine's total time over the time inside the model's forward, in the same steps."""
    loaded, requests = prepare("tiny", num_requests)
    for label, compile in (("engine", False), ("compiled engine", True)):
        made = executor(loaded, 64, compile=compile)
        run_model = made._run_model
        inside: list[float] = []

        def timed_run(*arguments: object, run_model=run_model, inside=inside) -> torch.Tensor:
            began = time.perf_counter()
            logits = run_model(*arguments)
            inside.append(time.perf_counter() - began)
            return logits

        made._run_model = timed_run
        for slots in (8, 64):
            ratios = []
            for _ in range(num_rounds):
                inside.clear()
                began = time.perf_counter()
                engine(made, requests, slots)
                ratios.append((time.perf_counter() - began) / sum(inside))
            print(
                f"{label} at {slots} slots: {statistics.median(ratios):.3f}x ({min(ratios):.3f} to "
                f"{max(ratios):.3f}) the time inside the model's forward, {len(inside)} steps of "
                f"{sum(inside) / len(inside) * 1e3:.2f} ms"
            )
