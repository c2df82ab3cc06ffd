"""Products and attention in C++, and models on them, compiled or not, against float64 and `generate`."""

import logging
import math
import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import generate_alone
from helpers.attention_cases import dense, random_chunks, serve_tokens, shape
from helpers.engine_runs import run
from torch._dynamo.utils import counters
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from cbresearch import models, policies
from cbresearch.attention import PagedCache
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.cpu import forward
from cbresearch.cpu.library import find_compiler, library, native_linear, pack
from cbresearch.engine import ModelExecutor
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler

NUM_BATCHES = 40


def compiler_is_missing():
    try:
        find_compiler()
    except ValueError:
        return True
    return False


needs_compiler = pytest.mark.skipif(compiler_is_missing(), reason="no C++ compiler is found")


@needs_compiler
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "values of another size", "heads of 32"])
def test_native_attention_equals_a_loop_over_queries_and_is_bit_equal_in_any_company(kind):
    for seed in range(NUM_BATCHES):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        window = rng.choice([None, 1, 3, 16, 200])
        lengths = rng.integers(1, 40, size=int(rng.integers(1, 5)))
        if seed % 20 == 0:
            lengths[0] = 300
        key_dim = 32 if kind == "heads of 32" else 6
        value_dim = int(rng.choice([3, 9, 17])) if kind == "values of another size" else key_dim
        tokens = [
            [torch.randn(n, heads, size) for heads, size in ((4, key_dim), (2, key_dim), (2, value_dim))]
            for n in lengths
        ]
        softcap = 0.7 if kind == "softcap" else None
        sinks = torch.randn(4) if kind == "sinks" else None
        options = {"softcap": softcap, "s_aux": sinks, "form": forward.CpuStep.of}
        sizes = {"head_dim": key_dim, "value_head_dim": value_dim}

        def served(which, chunks, block_size, options=options, window=window, sizes=sizes):
            cache = PagedCache(shape(**sizes), CacheConfig(1200, block_size), fill=math.nan)
            return serve_tokens(cache, which, window, chunks, freed=window, **options)

        chunks = random_chunks(rng, lengths, int(rng.choice([2, 12, 300])))
        library().cbresearch_use_threads(1 + seed % 3)
        ours = served(tokens, chunks, int(rng.choice([1, 3, 16])))
        library().cbresearch_use_threads(1)
        for sequence, output in zip(tokens, ours, strict=True):
            queries, keys, values = (every.double() for every in sequence)
            want = [
                dense(
                    queries[n],
                    keys[: n + 1],
                    values[: n + 1],
                    window,
                    softcap,
                    None if sinks is None else sinks.double(),
                )
                for n in range(len(queries))
            ]
            torch.testing.assert_close(output.double(), torch.stack(want), rtol=0, atol=2e-6)
            (alone,) = served([sequence], [[len(queries)]], 16)
            assert torch.equal(output, alone)


@needs_compiler
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1, 1), (7, 31), (64, 33), (300, 128), (257, 2000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_native_product_is_near_float64_and_bit_equal_in_any_company(num_inputs, num_outputs, has_bias):
    torch.manual_seed(num_inputs)
    weight, x = torch.randn(num_outputs, num_inputs), torch.randn(1, 137, num_inputs)
    bias = torch.randn(num_outputs) if has_bias else None
    panels = pack(weight)
    whole = native_linear(x, panels, bias, num_outputs)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), want, rtol=0, atol=1e-6 * num_inputs)
    for num_rows in range(1, 18):
        some = native_linear(x[:, 20 : 20 + num_rows], panels, bias, num_outputs)
        assert torch.equal(some, whole[:, 20 : 20 + num_rows])
    assert torch.equal(native_linear(x[:, ::3], panels, bias, num_outputs), whole[:, ::3])


@needs_compiler
def test_products_on_several_threads_and_of_several_engines_at_once_are_bit_equal():
    torch.manual_seed(0)
    weight, x = torch.randn(3000, 200), torch.randn(9, 200)
    library().cbresearch_use_threads(1)
    panels = pack(weight)
    want = native_linear(x, panels, None, 3000)
    problems = []

    def multiply():
        for _ in range(300):
            if not torch.equal(native_linear(x, panels, None, 3000), want):
                problems.append("differs")

    try:
        for number in (2, 5):
            library().cbresearch_use_threads(number)
            engines = [threading.Thread(target=multiply) for _ in range(3)]
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.join()
    finally:
        library().cbresearch_use_threads(1)
    assert not problems


@needs_compiler
@pytest.mark.parametrize("compile", [False, True])
def test_tokens_equal_generate_alone_under_schedules_that_preempt(compile, tiny, alone):
    answers = [*alone[:12], *alone[20:]]
    requests = [Request(f"r{n}", answer.prompt, 12) for n, answer in enumerate(answers)]
    want = {f"r{n}": answer.continuation[:12] for n, answer in enumerate(answers)}
    before = tiny.model.config._attn_implementation
    # Just enough for the longest request and a bit.
    cache = CacheConfig(26, 3, prefix_caching=True)
    executor = ModelExecutor(
        tiny, SchedulerConfig(8, 64), cache, backend="native", compile=compile, fill=math.nan
    )
    executor.warm_up()
    graphs = counters["stats"]["unique_graphs"]
    num_preemptions = num_cached = 0
    several = product(("static", "fcfs", "sjf", "vllm_v1"), (SchedulerConfig(5, 7), SchedulerConfig(8, 64)))
    # In one seat all policies do alike.
    for policy, limits in (("fcfs", SchedulerConfig(1, 7)), *several):
        trace = run(tiny, requests, policy, limits, cache, executor)
        assert trace.outputs == want, (policy, limits)
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
        num_cached += sum(record.num_cached_tokens for record in trace.requests)
    assert num_preemptions > 0, "no request was preempted"
    assert num_cached > 0, "nothing was found cached"
    assert counters["stats"]["unique_graphs"] == graphs, "some number of tokens was compiled for by itself"
    assert tiny.model.config._attn_implementation == before
    assert generate_alone(tiny.model, alone[3].prompt, 24) == alone[3].continuation


SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "sliding_window": 6,
    "pad_token_id": 0,
}
FAMILIES = {
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, query_pre_attn_scalar=24)),
    "sinks": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)),
}


@needs_compiler
def test_two_compiled_models_in_one_process_are_not_taken_for_each_other():
    prompt = tuple(range(3, 20))
    made = []
    for num_layers in (1, 2, 1):
        torch.manual_seed(len(made))
        config = LlamaConfig(**{**SIZES, "num_hidden_layers": num_layers, "sliding_window": None})
        config.eos_token_id = None
        loaded = models.wrap(f"model {len(made)}", LlamaForCausalLM(config))
        limits, cache = SchedulerConfig(2, 64), CacheConfig(20, 4)
        executor = ModelExecutor(loaded, limits, cache, compile=True, fill=math.nan)
        made.append((loaded, limits, cache, executor))
    # All of them before any is asked, and the first one again after the others.
    for loaded, limits, cache, executor in (*made, made[0]):
        trace = run(loaded, [Request("r", prompt, 8)], "fcfs", limits, cache, executor)
        assert trace.outputs["r"] == generate_alone(loaded.model, prompt, 8), loaded.name


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_two_engines_in_one_process_do_not_meet(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = models.wrap(family, FAMILIES[family]().float())
    loaded = replace(loaded, eos_token_ids=frozenset())
    limits, cache = SchedulerConfig(3, 11), CacheConfig(30, 4)
    made = {
        backend: [ModelExecutor(loaded, limits, cache, backend=backend, fill=math.nan) for _ in range(2)]
        for backend in ("torch", "native")
    }
    rng = np.random.default_rng(3)
    streams = [
        [Request(f"r{n}", tuple(rng.integers(3, 97, 9).tolist()), 7) for n in range(4)] for _ in range(2)
    ]
    outputs = {}
    for backend, executors in made.items():
        schedulers = [Scheduler(policies.get("fcfs"), limits, cache) for _ in executors]
        tokens = outputs[backend] = [{} for _ in executors]
        for scheduler, requests in zip(schedulers, streams, strict=True):
            for request in requests:
                scheduler.submit(request)
        # Step by step in turn, so that whatever the two shared would show.
        for now in range(60):
            for scheduler, executor, got in zip(schedulers, executors, tokens, strict=True):
                plan = scheduler.schedule(now)
                if not plan.scheduled:
                    continue
                result = executor.execute(plan)
                scheduler.commit(plan, result, now)
                for request_id, token in result.tokens.items():
                    got.setdefault(request_id, []).append(token)
        assert all(len(answer) == 7 for got in tokens for answer in got.values())
    assert outputs["native"] == outputs["torch"]
    assert outputs["native"][0] != outputs["native"][1]


@needs_compiler
def test_the_model_itself_is_untouched_and_its_weights_are_shared_and_read_anew(alone):
    loaded = models.load("tiny")
    loaded.model.generation_config.eos_token_id = None
    limits, cache = SchedulerConfig(2), CacheConfig(20)
    executor = ModelExecutor(loaded, limits, cache, fill=math.nan)
    assert executor.cache.backend == "native"
    copied = executor._run_model._model
    kinds = {type(module) for module in copied.modules()}
    assert forward.NativeLinear in kinds
    assert forward.NativeLinear not in {type(module) for module in loaded.model.modules()}
    for own, other in zip(loaded.model.parameters(), copied.parameters(), strict=True):
        assert own is other
    requests = [Request("r", alone[3].prompt, 8)]
    before = run(loaded, requests, "fcfs", limits, cache, executor).outputs["r"]
    with torch.no_grad():
        loaded.model.lm_head.weight.copy_(loaded.model.lm_head.weight.flip(0))
    after = run(loaded, requests, "fcfs", limits, cache, executor).outputs["r"]
    assert before == alone[3].continuation[:8]
    assert after == generate_alone(loaded.model, alone[3].prompt, 8) != before


@needs_compiler
def test_threads_of_pytorch_are_as_before_after_a_step(tiny, alone):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        limits, cache = SchedulerConfig(4, 64), CacheConfig(40)
        requests = [Request(f"r{n}", answer.prompt, 6) for n, answer in enumerate(alone[:8])]
        trace = run(tiny, requests, "fcfs", limits, cache)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert trace.outputs == {f"r{n}": answer.continuation[:6] for n, answer in enumerate(alone[:8])}


@pytest.mark.parametrize(
    ("changes", "device", "dtype"),
    [
        ({}, "cuda", torch.float32),
        ({}, "cpu", torch.bfloat16),
        ({"latent_dim": 5}, "cpu", torch.float32),
    ],
)
def test_what_the_native_backend_cannot_serve_is_rejected_if_asked_for_and_else_left_to_pytorch(
    changes, device, dtype
):
    arguments = shape(**changes), torch.device(device), dtype
    with pytest.raises(ValueError, match="'native' and compiled models are for float32 on a CPU"):
        forward.is_native("native", *arguments)
    assert not forward.is_native(None, *arguments)
    assert not forward.is_native("torch", shape(), torch.device("cpu"), torch.float32)


@pytest.fixture
def fresh_library():
    """Let the C++ code be looked for again, in the test and behind it."""
    library.cache_clear()
    forward.can_build.cache_clear()
    yield
    library.cache_clear()
    forward.can_build.cache_clear()


def test_without_a_compiler_a_model_runs_in_pytorch_and_says_so_once(
    fresh_library, monkeypatch, caplog, tiny, alone
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    limits, cache = SchedulerConfig(2), CacheConfig(20)
    with caplog.at_level(logging.WARNING):
        executors = [ModelExecutor(tiny, limits, cache, fill=math.nan) for _ in range(3)]
    assert [executor.cache.backend for executor in executors] == ["torch"] * 3
    (record,) = caplog.records
    assert "no C++ compiler is found (CXX is 'no-such-compiler')" in record.getMessage()
    trace = run(tiny, [Request("r", alone[3].prompt, 4)], "fcfs", limits, cache, executors[0])
    assert trace.outputs["r"] == alone[3].continuation[:4]
    for options in ({"backend": "native"}, {"compile": True}):
        with pytest.raises(ValueError, match=r"no C\+\+ compiler is found .*; install one, or use"):
            ModelExecutor(tiny, limits, cache, **options)


def test_a_compiler_that_fails_and_a_folder_that_cannot_be_are_named(fresh_library, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ValueError, match="the C\\+\\+ compiler 'false' fails"):
        library()
    monkeypatch.delenv("CXX")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CBRESEARCH_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(ValueError, match=r"file/folder.* name another folder by CBRESEARCH_CACHE"):
        library()


@needs_compiler
def test_the_library_is_built_once_for_all_processes_even_if_two_begin_together(
    fresh_library, monkeypatch, tmp_path
):
    monkeypatch.setenv("CBRESEARCH_CACHE", str(tmp_path / "cache"))
    builders = [threading.Thread(target=library.__wrapped__) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    (built,) = (tmp_path / "cache").iterdir()
    before = built.stat().st_mtime_ns
    library.__wrapped__()
    assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()] == [before]
