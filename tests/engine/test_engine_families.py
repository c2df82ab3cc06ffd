"""Model families that differ in what they cache and what they attend to, against `model.generate` alone."""

import math
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import survey_families
import torch
from conftest import generate_alone
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from cbresearch import models, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.formulas import kv_bytes_per_token
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

NUM_SCHEDULES = 6
NUM_TOKENS = 14
VOCAB_SIZE = 97
WINDOW = 8

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    # Larger than usual, so that attention is not uniform and outputs depend on what is attended to.
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SIZES = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A model, and what its layers attend to: None for the whole context, or a window."""

    config: PreTrainedConfig
    windows: tuple[int | None, ...] = (None, None)


FAMILIES = {
    "llama": Family(LlamaConfig(**SIZES)),
    "gpt2": Family(GPT2Config(**COMMON, n_embd=32, n_head=4, n_positions=128)),
    "qwen2": Family(Qwen2Config(**SIZES)),
    "qwen2, second layer windowed": Family(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        (None, WINDOW),
    ),
    # Its attention is told of the window by a mask alone.
    "qwen2-moe, second layer windowed": Family(
        Qwen2MoeConfig(
            **SIZES,
            **EXPERTS,
            num_experts=4,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
        (None, WINDOW),
    ),
    "qwen3": Family(Qwen3Config(**SIZES, head_dim=12)),
    "mistral, windowed": Family(MistralConfig(**SIZES, sliding_window=WINDOW), (WINDOW, WINDOW)),
    "phi3, windowed": Family(Phi3Config(**SIZES, sliding_window=WINDOW), (WINDOW, WINDOW)),
    "olmo2": Family(Olmo2Config(**SIZES)),
    "gemma2, soft caps": Family(
        Gemma2Config(
            **SIZES,
            head_dim=12,
            sliding_window=WINDOW,
            query_pre_attn_scalar=1,
            attn_logit_softcapping=0.5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        (WINDOW, None),
    ),
    "gemma3, first layer windowed": Family(
        Gemma3TextConfig(
            **SIZES,
            head_dim=12,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        (WINDOW, None),
    ),
    "gpt-oss, sinks": Family(
        GptOssConfig(
            **SIZES,
            head_dim=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        (WINDOW, None),
    ),
    "deepseek-v3, latents": Family(DeepseekV3Config(**LATENT, q_lora_rank=16)),
    "deepseek-v2, latents": Family(DeepseekV2Config(**LATENT, q_lora_rank=None)),
}


@cache
def loaded(name):
    """Return a family's model with random weights. Its own attention is the eager one, which applies all."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name].config, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks)
    model.generation_config.eos_token_id = None
    return models.wrap(name, model)


@cache
def answers(name):
    """Return prompts, some of which begin alike, and the tokens that `generate` gives for each alone."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, VOCAB_SIZE, size=size).tolist()) for size in (1, 2, 7, 8, 9, 17, 33, 40)]
    prompts += [prompts[7][:24], prompts[7][:20] + prompts[4]]
    return [(prompt, generate_alone(loaded(name).model, prompt, NUM_TOKENS)) for prompt in prompts]


def random_schedule(seed, name):
    """Return requests with what is expected of them, limits and a pool in which few of them fit at once."""
    rng = np.random.default_rng(seed)
    requests, expected = [], {}
    for place in range(int(rng.integers(4, 9))):
        prompt, tokens = answers(name)[int(rng.integers(len(answers(name))))]
        max_tokens = int(rng.integers(1, NUM_TOKENS + 1))
        requests.append(Request(f"r{place}", prompt, max_tokens))
        expected[f"r{place}"] = tokens[:max_tokens]
    block_size = int(rng.choice([1, 2, 3, 16]))
    budget = int(rng.choice([3, 11, 2048]))
    most = max(len(request.prompt) + request.max_tokens - 1 for request in requests)
    window = max(FAMILIES[name].windows) if None not in FAMILIES[name].windows and rng.integers(4) else None
    if window is not None:
        # Blocks behind the window are freed, so that a request needs fewer than it has tokens.
        most = min(most, window - 1 + budget + block_size)
    cache = CacheConfig(
        -(-most // block_size) + int(rng.choice([0, 1, 3])),
        block_size,
        prefix_caching=bool(rng.integers(2)),
        num_host_blocks=60 * (seed % 2),
        sliding_window=window,
    )
    limits = SchedulerConfig(int(rng.integers(3, 7)), budget, preemption=("recompute", "swap")[seed % 2])
    return requests, expected, limits, cache


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_of_generate_alone_in_pools_that_preempt(name, top_two_gap):
    num_preemptions = num_swapped = 0
    for seed in range(NUM_SCHEDULES):
        requests, expected, limits, cache = random_schedule(seed, name)
        scheduler = Scheduler(policies.get("fcfs"), limits, cache)
        # In C++ where it is there and can, and in PyTorch.
        backend = "torch" if seed % 4 > 1 else None
        executor = ModelExecutor(loaded(name), limits, cache, backend=backend, fill=math.nan)
        trace = serve(requests, scheduler, executor, on_step=lambda _, check=scheduler.check: check())
        for request in requests:
            want, got = expected[request.id], trace.outputs[request.id]
            place = next((n for n in range(len(want)) if got[n] != want[n]), None)
            assert place is None, (
                f"{request.id} of schedule {seed} under {limits}, {cache} differs from generate at token "
                f"{place}; the two best logits there are "
                f"{top_two_gap(loaded(name).model, (*request.prompt, *want[:place])):.3g} apart"
            )
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
        num_swapped += sum(len(step.plan.swapped) for step in trace.steps)
    assert num_preemptions > 0
    assert num_swapped > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pools_of_every_family_occupy_the_bytes_that_the_formula_says(name):
    cache = CacheConfig(5, 3, num_host_blocks=4)
    pool = ModelExecutor(loaded(name), SchedulerConfig(), cache).cache
    assert pool.num_bytes == kv_bytes_per_token(loaded(name).shape) * cache.num_tokens
    assert pool.num_host_bytes * 5 == pool.num_bytes * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_every_family_depend_on_the_first_token_that_they_can_see(name):
    # Two windowed layers together reach back over two windows.
    reach = 40 if None in FAMILIES[name].windows else 2 * WINDOW - 1
    prompt = answers(name)[7][0]
    assert len(prompt) == 40
    with torch.inference_mode():
        logits = [
            loaded(name)
            .model(torch.tensor([[*prompt[:-reach], token, *prompt[len(prompt) - reach + 1 :]]]))
            .logits[0, -1]
            for token in (5, 6)
        ]
    assert (logits[0] - logits[1]).abs().max() > 1e-4


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_the_shape_counts_the_windowed_layers_of_every_family(name, family):
    windows = [window for window in family.windows if window is not None]
    shape = loaded(name).shape
    assert (shape.sliding_window, shape.num_sliding_layers) == (WINDOW if windows else None, len(windows))


def test_blocks_are_freed_only_behind_what_every_layer_attends_to():
    def build(name, window):
        return ModelExecutor(loaded(name), SchedulerConfig(), CacheConfig(20, sliding_window=window))

    build("mistral, windowed", WINDOW)
    build("mistral, windowed", WINDOW + 3)
    with pytest.raises(ValueError, match=f"sliding_window is 7, but the layers .* attend to {WINDOW} tokens"):
        build("mistral, windowed", 7)
    with pytest.raises(ValueError, match=r"sliding_window is 8, but 1 of 2 layers .* attend to the whole"):
        build("gemma3, first layer windowed", WINDOW)
    with pytest.raises(ValueError, match=r"sliding_window is 8, but 2 of 2 layers"):
        build("llama", WINDOW)


def test_a_model_whose_last_layers_read_the_cache_of_an_earlier_one_is_rejected():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_kv_shared_layers=1))
    with pytest.raises(ValueError, match="has 2 layers, of which 1 keep a KV cache"):
        models.wrap("shared", model)


SURVEYED = {
    "doge": r"refused: .*DogeAttention asks for a mask or bias of its own",
    "diffllama": r"refused: .*differ from those of its own forward",
    # Its window is known to the cache of `generate` alone.
    "moshi": r"refused: .*differ from those of its own forward",
    "jetmoe": r"refused: .*JetMoeAttention hands over keys and values of \(34, 4, 16\)",
    "openai-gpt": r"refused: .*layers \[0, 1, 2\] do not attend through the paged cache",
    "stablelm": r"refused: .*StableLmAttention was called without a step",
    "falcon, alibi": r"refused: .*'falcon', whose layers compute their attention themselves",
    "lfm2, convolutions": r"refused: .*layers of the kinds \['conv'\]",
    "roberta, decoder": r"refused: .*differ from those of its own forward",
    "mixtral": "equal",
    "qwen2_moe, windowed": "equal",
    "gpt_bigcode, mha": "equal",
    "bert, decoder": "equal",
    "deepseek_v2, no q rank": "equal",
}


@pytest.mark.parametrize(("name", "outcome"), SURVEYED.items())
def test_a_family_is_served_as_alone_or_refused_with_the_reason(name, outcome):
    kind, needed = next(case[1:] for case in survey_families.cases([name]) if case[0] == name)
    assert re.match(outcome, survey_families.survey(survey_families.small_config(kind, needed)))


def refuse(model, match, backend=None):
    executor = ModelExecutor(models.wrap("odd", model), SchedulerConfig(), CacheConfig(9), backend=backend)
    with pytest.raises(
        ValueError, match=rf"model 'odd' of the family .* cannot be served: .*{match}"
    ) as caught:
        executor.warm_up()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [8, 63, 120, None])
def test_a_window_that_only_a_mask_knows_is_found_out(window):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 2, "tie_word_embeddings": True, "max_position_embeddings": 160}
    model = AutoModelForCausalLM.from_config(PhimoeConfig(**sizes, sliding_window=window))
    if window is None:
        ModelExecutor(models.wrap("whole", model), SchedulerConfig(), CacheConfig(9)).warm_up()
    else:
        refuse(model, "logits in a batch differ")


@pytest.mark.parametrize("backend", ["torch", None])
def test_keys_of_other_heads_than_the_config_says_never_reach_the_pool(backend):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    config.num_key_value_heads = 1
    refuse(model, r"hands over keys and values of \(34, 2, 16\).* say \(34, 1, 16\)", backend)


def test_a_forward_that_fails_is_said_with_the_cause_in_one_line(monkeypatch):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))

    def fail(*_, **__):
        raise KeyError("no\nsuch thing")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    refuse(model, "its forward fails on two short sequences: KeyError: ")


def test_a_model_that_gives_the_logits_of_all_places_is_found_out(monkeypatch):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    forward = type(model).forward

    def ignoring(self, *args, logits_to_keep=0, **others):
        return forward(self, *args, **others)

    monkeypatch.setattr(type(model), "forward", ignoring)
    refuse(model, "logits in a batch differ")


def write_first(value):
    return lambda module, given, logits: torch.cat(
        (torch.full_like(logits[..., :2], value), logits[..., 2:]), -1
    )


def add(first, others):
    return lambda module, given, logits: logits + torch.tensor([first, *[others] * (VOCAB_SIZE - 1)])


LOGIT_HOOKS = [
    *(write_first(value) for value in (0.0, -1e9, torch.finfo(torch.float32).min, -math.inf)),
    *(add(*offsets) for offsets in ((1e5, 1e5), (1e5, 0.0), (-1e5, 0.0), (-math.inf, 0.0))),
    lambda module, given, logits: torch.cat((logits[..., :30], torch.full_like(logits[..., 30:], -1e9)), -1),
    lambda module, given, logits: logits - torch.cat((torch.zeros(30), torch.full((VOCAB_SIZE - 30,), 1e9))),
]


@pytest.mark.parametrize("hook", LOGIT_HOOKS)
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_mask_or_an_offset_on_the_logits_hides_no_difference_and_is_none(hook, is_wrong):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.lm_head.register_forward_hook(hook)
    if is_wrong:
        model.model.layers[0].mlp.register_forward_hook(lambda _, given, out: out - out.mean(1, keepdim=True))
        refuse(model, "logits in a batch differ")
    else:
        ModelExecutor(models.wrap("masked", model), SchedulerConfig(), CacheConfig(9)).warm_up()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "num_blocks", "longest"), [(1, 1, 128), (5, 3, 3), (300, 1, 1)])
def test_the_comparison_needs_no_room_in_the_pool_and_takes_any_model_length(
    dtype, block_size, num_blocks, longest
):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": longest})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    cache = CacheConfig(num_blocks, block_size)
    executor = ModelExecutor(models.wrap("m", model), SchedulerConfig(2), cache, fill=math.nan)
    executor.warm_up()
