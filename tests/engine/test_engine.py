"""The answer never depends on the schedule: the engine against `model.generate` on each prompt alone."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import generate_alone
from helpers.engine_runs import POLICIES, assert_served_as_alone, least_pool, run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MptConfig,
    Qwen3NextConfig,
    T5Config,
)

from cbresearch import models
from cbresearch.config import RESERVATIONS, CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.experiments import compare
from cbresearch.formulas import kv_bytes_per_token
from cbresearch.request import Request, SamplingParams
from cbresearch.simulator import replay
from cbresearch.workloads import load, resolve_prompts

NUM_COMBINATIONS = 128
NUM_SHARDS = 4


def random_combination(seed, alone):
    """Draw requests, policy, limits and pool."""
    rng = np.random.default_rng(seed)
    expected, requests = {}, []
    for place in range(int(rng.integers(1, 8))):
        answer = alone[int(rng.integers(len(alone)))]
        max_tokens = int(rng.integers(1, len(answer.continuation) + 1))
        arrival = float(rng.choice([0.0, rng.random() * 0.2]))
        requests.append(Request(f"r{place}", answer.prompt, max_tokens, arrival=arrival))
        expected[f"r{place}"] = (answer.continuation[:max_tokens], answer.prompt)
    block_size = int(rng.choice([1, 3, 16]))
    spare = int(rng.choice([0, 0, 2, 1000]))
    return (
        requests,
        expected,
        POLICIES[int(rng.integers(len(POLICIES)))],
        SchedulerConfig(int(rng.integers(1, 9)), int(rng.choice([7, 64, 2048]))),
        CacheConfig(least_pool(requests, block_size) + spare, block_size, bool(rng.integers(2))),
    )


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_tokens_equal_generate_alone_under_random_schedules(shard, tiny, alone, top_two_gap):
    num_preemptions = num_cached = 0
    for seed in range(shard, NUM_COMBINATIONS, NUM_SHARDS):
        requests, expected, policy, limits, cache = random_combination(seed, alone)
        # In C++ where there is a compiler, and in PyTorch.
        trace = run(tiny, requests, policy, limits, cache, backend=None if seed % 3 else "torch")
        assert_served_as_alone(tiny, trace, expected, top_two_gap)
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
        num_cached += sum(record.num_cached_tokens for record in trace.requests)
    assert num_preemptions > 0, "no schedule of this shard preempts; draw smaller pools"
    assert num_cached > 0, "no schedule of this shard finds a prefix in the cache; draw more prompts alike"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("block_size", "budget"), [(1, 7), (1, 64), (3, 7), (3, 2048), (16, 64)])
def test_tokens_equal_generate_alone_in_a_pool_that_preempts(
    policy, block_size, budget, tiny, alone, top_two_gap
):
    requests = [Request(f"r{n}", answer.prompt, 12) for n, answer in enumerate(alone[4:10])]
    expected = {f"r{n}": (answer.continuation[:12], answer.prompt) for n, answer in enumerate(alone[4:10])}
    cache = CacheConfig(least_pool(requests, block_size) + 1, block_size)
    trace = run(tiny, requests, policy, SchedulerConfig(6, budget), cache)
    assert_served_as_alone(tiny, trace, expected, top_two_gap)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spare", [0, 1000])
def test_the_simulator_repeats_a_real_run_step_for_step(policy, spare, tiny, alone):
    requests = [
        Request(f"r{n}", answer.prompt, 5 + 3 * (n % 7), arrival=0.01 * n) for n, answer in enumerate(alone)
    ]
    # The model rejects the one, and does not care what the other says of its length.
    requests[2:2] = [Request("too long", (5,) * 2048, 1), Request("r0", (5,), 1)]
    requests[6] = replace(requests[6], output_length=1)
    # Outputs that end early, so that the simulator has to be told where.
    loaded = replace(tiny, eos_token_ids=frozenset(answer.continuation[6] for answer in alone[::3]))
    trace = run(
        loaded, requests, policy, SchedulerConfig(5, 40), CacheConfig(least_pool(requests, 4) + spare, 4)
    )
    again = replay(trace, requests, policy)
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    assert again.requests == trace.requests
    assert [step.end for step in again.steps] == [step.end for step in trace.steps]
    assert any(record.finish_reason == "stop" for record in trace.requests)


def test_any_of_several_eos_tokens_ends_an_output_and_ignore_eos_ignores_all(tiny, alone):
    answer = alone[5]
    first, second = answer.continuation[3], answer.continuation[8]
    loaded = replace(tiny, eos_token_ids=frozenset({second, first}))
    cut = min(answer.continuation.index(first), answer.continuation.index(second)) + 1
    requests = [
        Request("stops", answer.prompt, 24),
        Request("goes on", answer.prompt, 24, sampling=SamplingParams(ignore_eos=True)),
    ]
    trace = run(loaded, requests, "fcfs", SchedulerConfig(), CacheConfig(100))
    assert trace.outputs == {"stops": answer.continuation[:cut], "goes on": answer.continuation}
    assert [record.finish_reason for record in trace.requests] == ["stop", "length"]


def test_padding_rows_are_computed_by_the_model(tiny, alone):
    requests = [Request("short", alone[0].prompt, 1), Request("long", alone[5].prompt, 9)]
    shapes = []
    hook = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        trace = run(tiny, requests, "static", SchedulerConfig(2), CacheConfig(100))
    finally:
        hook.remove()
    assert shapes == [step.plan.num_tokens for step in trace.steps]
    assert shapes[1:] == [2] * 8


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_a_contiguous_reservation_may_be_longer_than_its_request(reservation, tiny, alone):
    requests = [Request(f"r{n}", answer.prompt, 9) for n, answer in enumerate(alone[:6])]
    limits, cache = SchedulerConfig(3, 64, max_model_len=128), CacheConfig(64, 4, reservation=reservation)
    trace = run(tiny, requests, "fcfs", limits, cache)
    assert trace.outputs == {f"r{n}": answer.continuation[:9] for n, answer in enumerate(alone[:6])}


def test_the_model_is_left_as_it_was_found(tiny, alone):
    before = tiny.model.config._attn_implementation
    run(tiny, [Request("a", alone[3].prompt, 4)], "fcfs", SchedulerConfig(), CacheConfig(50))
    assert tiny.model.config._attn_implementation == before
    assert generate_alone(tiny.model, alone[3].prompt, 24) == alone[3].continuation


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_logits_equal_those_of_transformers(tied, num_heads, num_kv_heads):
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=40 * num_heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=40,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    loaded = models.wrap("two layers", LlamaForCausalLM(config).double())
    prompts = [tuple(range(3, 3 + length)) for length in (1, 5, 9, 30)]
    limits, cache = SchedulerConfig(4, 13), CacheConfig(40, 3)
    logits = []
    hook = loaded.model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    trace = run(loaded, [Request(str(n), p, 6) for n, p in enumerate(prompts)], "fcfs", limits, cache)
    hook.remove()
    seen = {str(n): [] for n in range(len(prompts))}
    for step, values in zip(trace.steps, logits, strict=True):
        # Rows come in the executor's own order: single queries first, long contexts before short.
        entries = sorted(step.plan.scheduled, key=lambda entry: (entry.num_tokens > 1, -entry.start))
        samples = [entry for entry in entries if entry.samples]
        for entry, row in zip(samples, values, strict=False):
            seen[entry.request_id].append(row)
    for n, prompt in enumerate(prompts):
        tokens = trace.outputs[str(n)]
        with torch.inference_mode():
            whole = loaded.model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.stack(seen[str(n)]), whole[len(prompt) - 1 :], rtol=0, atol=1e-11)


def test_the_pool_occupies_the_bytes_that_the_formula_says(tiny):
    cache = CacheConfig(37, 5)
    executor = ModelExecutor(tiny, SchedulerConfig(), cache)
    assert executor.cache.num_bytes == kv_bytes_per_token(tiny.shape) * cache.num_tokens
    keys, values = executor.cache.block_views(0)
    assert keys.shape == values.shape == (37, 5, tiny.shape.num_kv_heads, tiny.shape.head_dim)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request("r", (5, 4096), 4), "token id 4096 is outside the vocabulary"),
        (Request("r", (5,) * 2000, 49), "2049 tokens, over the 2048"),
        (Request("r", "text", 4), "a model needs token ids"),
        (Request("r", 7, 4), "a model needs token ids"),
    ],
)
def test_what_the_model_cannot_serve_is_rejected_and_the_others_go_on(request_, problem, tiny, alone):
    others = [Request("before", alone[2].prompt, 3), request_, Request("after", alone[3].prompt, 3)]
    trace = run(tiny, others, "fcfs", SchedulerConfig(), CacheConfig(200))
    assert problem in trace.requests[1].error
    assert trace.outputs == {"before": alone[2].continuation[:3], "after": alone[3].continuation[:3]}


def test_a_prompt_of_exactly_the_models_length_runs(tiny):
    trace = run(tiny, [Request("r", (5,) * 2040, 8)], "fcfs", SchedulerConfig(2, 4096), CacheConfig(200))
    assert len(trace.outputs["r"]) == 8


def test_nan_weights_fail_the_request_with_its_name_and_step(alone):
    loaded = models.load("tiny")
    with torch.no_grad():
        loaded.model.model.layers[2].mlp.down_proj.weight.fill_(math.nan)
    trace = run(loaded, [Request("r", alone[3].prompt, 4)], "fcfs", SchedulerConfig(), CacheConfig(20))
    assert re.match(r"request 'r' failed in step 0, .* no logit is finite", trace.requests[0].error)
    assert (trace.requests[0].finish_reason, trace.outputs) == ("error", {"r": ()})


def test_tiny_is_the_same_model_every_time_and_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, second = models.load("tiny"), models.load("tiny")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert 3.5e6 < first.shape.num_parameters < 4.5e6


def test_outputs_of_tiny_depend_on_the_whole_prompt(tiny, alone):
    long = alone[9]
    changed = (7 if long.prompt[0] != 7 else 8, *long.prompt[1:])
    assert generate_alone(tiny.model, changed, 24) != long.continuation


@pytest.mark.parametrize(
    ("name", "hint"), [("tinny", "did you mean 'tiny'"), ("smollm", "smollm2-135m"), ("xyzzy", "there is")]
)
def test_an_unknown_model_is_rejected_with_near_misses(name, hint):
    with pytest.raises(ValueError, match=f"unknown model '{name}'.*{hint}"):
        models.load(name)


@pytest.mark.weights
def test_real_weights_give_the_tokens_of_generate_under_every_policy_block_size_and_budget(top_two_gap):
    try:
        loaded = models.load("smollm2-135m")
    except ValueError as missing:
        pytest.skip(str(missing))
    texts = [
        "The capital of France is",
        "Continuous batching means that",
        "2, 4, 6,",
        "Once upon a time, in a",
    ]
    tokenizer_ids = [tuple(loaded.encode(text))[-12:] for text in texts]
    expected = {}
    requests = []
    for n, prompt in enumerate(tokenizer_ids):
        max_tokens = (10, 3, 8, 6)[n]
        with torch.inference_mode():
            want = generate_alone(loaded.model, prompt, max_tokens)
        cut = next((k + 1 for k, token in enumerate(want) if token in loaded.eos_token_ids), max_tokens)
        requests.append(Request(f"r{n}", prompt, max_tokens))
        expected[f"r{n}"] = (want[:cut], prompt)
    num_preemptions = 0
    for n, policy in enumerate(("static", "fcfs", "prefill_first", "sjf")):
        for k in (n % 3, (n + 1) % 3):
            block_size, budget = (1, 3, 16)[k], (7, 64, 2048)[(n + k) % 3]
            spare = (0, 1, 100)[(n + 2 * k) % 3]
            cache = CacheConfig(
                least_pool(requests, block_size) + spare, block_size, prefix_caching=k != n % 3
            )
            trace = run(loaded, requests, policy, SchedulerConfig(3, budget), cache)
            assert_served_as_alone(loaded, trace, expected, top_two_gap)
            num_preemptions += sum(record.num_preemptions for record in trace.requests)
    assert num_preemptions > 0


@pytest.mark.weights
def test_real_weights_give_the_tokens_of_generate_on_every_preset_prompt(top_two_gap):
    try:
        loaded = models.load("smollm2-135m")
    except ValueError as missing:
        pytest.skip(str(missing))
    rng = np.random.default_rng(0)
    drawn = resolve_prompts(load("chat24", rng), loaded.encode, loaded.shape.vocab_size, rng)
    # `generate` takes long for each token.
    requests = [replace(request, max_tokens=min(12, request.max_tokens)) for request in drawn]
    assert len(requests) == 24
    trace = run(loaded, requests, "fcfs", SchedulerConfig(8), CacheConfig(100, prefix_caching=True))
    expected = {}
    for request in requests:
        want = generate_alone(loaded.model, request.prompt, request.max_tokens)
        ends = [n + 1 for n, token in enumerate(want) if token in loaded.eos_token_ids]
        cut = request.max_tokens if request.sampling.ignore_eos or not ends else ends[0]
        expected[request.id] = (want[:cut], request.prompt)
    assert_served_as_alone(loaded, trace, expected, top_two_gap)


def test_generation_config_lists_of_eos_tokens_are_read():
    model = models.load("tiny").model
    model.generation_config = GenerationConfig(eos_token_id=[5, 9])
    assert models.wrap("m", model).eos_token_ids == {5, 9}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (Gemma3TextConfig(use_bidirectional_attention=True), "attends to later tokens"),
        (BloomConfig(), "is of the family 'bloom', whose layers compute their attention themselves, ALiBi"),
        (MptConfig(d_model=32, n_layers=2, n_heads=2), "is of the family 'mpt'"),
        (FalconConfig(alibi=True), "is of the family 'falcon'"),
        (Qwen3NextConfig(), "layers of the kinds ['linear_attention']"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "'dynamic'",
        ),
    ],
)
def test_a_model_that_would_be_answered_wrongly_is_rejected(config, problem):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config.update({**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0})
    with pytest.raises(ValueError, match=re.escape(problem)):
        compare(models.wrap("m", AutoModelForCausalLM.from_config(config)), [Request("r", (5, 6), 2)], "fcfs")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (MambaConfig(hidden_size=32, state_size=8), "a recurrent state, which stands in for a KV cache"),
        (BertConfig(hidden_size=32, num_attention_heads=2), "attends to later tokens"),
        (T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2), "keeps the KV of its encoder"),
    ],
)
def test_a_model_that_is_no_causal_decoder_is_rejected_with_the_reason(config, problem):
    config.update({"vocab_size": 64, "num_hidden_layers": 2})
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises(ValueError, match=problem):
        models.wrap("m", kind.from_config(config))


def test_a_model_that_bypasses_the_attention_interface_is_rejected(tiny):
    limits, cache = SchedulerConfig(), CacheConfig(20)
    layer = tiny.model.model.layers[1]
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    try:
        with pytest.raises(ValueError, match=r"'tiny' .* layers \[1\] do not attend through the paged"):
            ModelExecutor(tiny, limits, cache).warm_up()
    finally:
        del layer.self_attn.forward
    ModelExecutor(tiny, limits, cache).warm_up()


def test_a_model_whose_config_uses_other_names_is_served():
    torch.manual_seed(5)
    loaded = models.wrap("gpt2", GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)))
    requests = [Request(str(n), tuple(range(3, 4 + 4 * n)), 6) for n in range(4)]
    trace = run(loaded, requests, "fcfs", SchedulerConfig(3, 7), CacheConfig(20, 3))
    for request in requests:
        assert trace.outputs[request.id] == generate_alone(loaded.model, request.prompt, 6)
