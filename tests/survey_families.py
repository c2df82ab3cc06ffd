"""Serve tiny random models of transformers' causal families, and compare with each model alone.

Every type of `MODEL_FOR_CAUSAL_LM_MAPPING` is built small, and the main families in several variants. Six
prompts are served in a pool where few fit, so that requests are preempted, and each answer is compared with
`model.generate` on that prompt alone: in float64 in PyTorch, where there are no near ties, and in float32 by
what the engine takes by default, where a token whose two best logits are within 1e-4 may differ.

    python tests/survey_families.py [NAME ...]

One row a model: equal, refused (with the reason), wrong, or a raw error. A type whose small config does not
build or whose own `generate` fails is not counted.
"""

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from conftest import generate_alone
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from cbresearch import models
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.policies import get as get_policy
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

VOCAB_SIZE = 99
NUM_TOKENS = 8
PROMPT_LENGTHS = (1, 5, 9, 17, 26, 40)

SMALL = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_inner", "n_inner"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_intermediate_size", "dim_ff", "dff"), 24),
    **dict.fromkeys(("intermediate_size_mlp", "mlp_intermediate_size", "ffn_dim_per_expert"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("head_dim", "kv_channels", "d_head", "attention_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("encoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"), 3),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "local_attention"), 8),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "swa_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "index_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "vocab_size_per_layer_input": VOCAB_SIZE,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}  # fmt: skip
"""What makes a config small, by the name of the field."""

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        **{"factor": 4.0, "original_max_position_embeddings": 64},
    },
    "half": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "llama": {
        "mha": {"num_key_value_heads": 4},
        "mqa": {"num_key_value_heads": 1},
        "tied, biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "heads of 12": {"head_dim": 12},
        **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
    },
    "mistral": {"whole": {"sliding_window": None}, "tied": {"tie_word_embeddings": True}},
    "qwen2": {
        "windowed": {"use_sliding_window": True, "max_window_layers": 1},
        "window of 70": {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 70},
        "tied": {"tie_word_embeddings": True},
    },
    "qwen3": {"windowed": {"use_sliding_window": True, "max_window_layers": 1}},
    "qwen2_moe": {
        "windowed": {"use_sliding_window": True, "max_window_layers": 1},
        "dense first": {"mlp_only_layers": [0]},
    },
    "qwen3_moe": {"windowed": {"use_sliding_window": True, "max_window_layers": 1}},
    "mixtral": {"whole": {"sliding_window": None}, "top 1": {"num_experts_per_tok": 1}},
    "gemma2": {
        "other kinds": {"layer_types": KINDS},
        "small caps": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3_text": {
        "other kinds": {"layer_types": KINDS},
        "bidirectional": {"use_bidirectional_attention": True},
    },
    "phi3": {"whole": {"sliding_window": None}, "rope longrope": {"rope_parameters": ROPES["longrope"]}},
    "phi": {"grouped": {"num_key_value_heads": 2}, "normed": {"qk_layernorm": True}},
    "gpt2": {
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "untied": {"tie_word_embeddings": False},
    },
    "gpt_neox": {"sequential": {"use_parallel_residual": False}},
    "gpt_oss": {"other kinds": {"layer_types": KINDS}},
    "gpt_bigcode": {"mha": {"multi_query": False, "num_key_value_heads": 4}},
    "falcon": {
        "alibi": {"alibi": True},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "mha": {"multi_query": False, "num_kv_heads": 4},
    },
    "lfm2": {"convolutions": {"layer_types": ["conv", "full_attention", "conv"]}},
    "starcoder2": {"whole": {"sliding_window": None}},
    "olmo3": {"other kinds": {"layer_types": KINDS}},
    "cohere2": {"other kinds": {"layer_types": KINDS}},
    "exaone4": {"windowed": {"layer_types": KINDS, "sliding_window": 8}},
    "smollm3": {
        "no rope": {"no_rope_layers": [1, 0, 1]},
        "windowed": {"use_sliding_window": True, "layer_types": KINDS},
    },
    "deepseek_v2": {"no q rank": {"q_lora_rank": None}},
    "deepseek_v3": {"no q rank": {"q_lora_rank": None}},
    "llama4_text": {
        "tempered": {"attn_temperature_tuning": True, "floor_scale": 8, "no_rope_layers": [1, 0, 1]},
        "chunks of 70": {"attention_chunk_size": 70},
    },
    "granite": {"scaled": {"attention_multiplier": 0.5, "logits_scaling": 4.0, "residual_multiplier": 0.5}},
    "stablelm": {"normed": {"qk_layernorm": True}, "parallel": {"use_parallel_residual": True}},
    "opt": {"post norm": {"do_layer_norm_before": False}},
    "bert": {"decoder": {"is_decoder": True}},
    "roberta": {"decoder": {"is_decoder": True, "pad_token_id": 1}},
    "electra": {"decoder": {"is_decoder": True}},
    "mpt": {"no alibi": {}},
    "jamba": {"attention alone": {"attn_layer_period": 1, "attn_layer_offset": 0}},
}  # fmt: skip
"""More models of a type, by name: what differs from its small config."""

LINEAR = ["linear_attention", "full_attention", "linear_attention"]
NEEDED: dict[str, dict[str, object]] = {
    **{name: {"num_hidden_layers": 4} for name in ("bailing_hybrid", "cohere_compass_text", "qwen3_5")},
    **{name: {"layer_types": LINEAR} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": KINDS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {"layer_types": LINEAR},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"is_decoder": True},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"], "mamba_ngroups": 1, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a type's small config needs so that it builds."""


def small_config(kind: type[PreTrainedConfig], needed: dict[str, object]) -> PreTrainedConfig:
    """Return a config of a kind that makes a small model, its parts made small too."""
    defaults = kind()
    # What a config maps to another field's name is set there.
    names = set(vars(defaults)) - set(kind.attribute_map)
    fields = {name: value for name, value in SMALL.items() if name in names}
    if getattr(defaults, "num_key_value_heads", None) == getattr(defaults, "num_attention_heads", 0):
        fields.pop("num_key_value_heads", None)
        fields |= {"num_key_value_heads": 4} if "num_key_value_heads" in names else {}
    for name, value in vars(defaults).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = small_config(type(value), {})
    return kind(**{**fields, **needed})


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model in float64 whose weights are so large that its answers depend on all it sees."""
    torch.manual_seed(1)
    # The others' kernels for experts know no float64.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, dtype=torch.float64)
            if weight.dim() > 1:
                weight.copy_(0.25 * noise)
            else:
                weight.add_(0.1 * noise)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.eval()


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(3, VOCAB_SIZE - 3, size=length).tolist()) for length in PROMPT_LENGTHS]


def served(loaded: models.LoadedModel) -> list[tuple[int, ...]]:
    """Return the answers out of a pool in which the requests do not fit at once."""
    limits, cache = SchedulerConfig(5, 19), CacheConfig(17, 3, prefix_caching=True)
    scheduler = Scheduler(get_policy("fcfs"), limits, cache)
    executor = ModelExecutor(loaded, limits, cache, fill=float("nan"))
    executor.warm_up()
    requests = [Request(str(place), prompt, NUM_TOKENS) for place, prompt in enumerate(prompts())]
    trace = serve(requests, scheduler, executor)
    assert sum(record.num_preemptions for record in trace.requests), "no request was preempted"
    if errors := [record.error for record in trace.requests if record.error]:
        raise RuntimeError(errors[0])
    return [trace.outputs[request.id] for request in requests]


def is_near_tie(model: PreTrainedModel, tokens: tuple[int, ...]) -> bool:
    with torch.inference_mode():
        best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1]) < 1e-4


def survey(config: PreTrainedConfig) -> str:
    """Return what comes of a model with such a config: one word, and behind a colon the reason."""
    try:
        model = build(config)
        expected = [generate_alone(model, prompt, NUM_TOKENS) for prompt in prompts()]
    except Exception as error:  # Whatever keeps transformers from running it alone is no news.
        return f"not run: {type(error).__name__}: {error}"
    outcome = "equal"
    for dtype in (torch.float64, torch.float32):
        try:
            answers = served(models.wrap("it", copy.deepcopy(model).to(dtype)))
        except ValueError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"raw error: {type(error).__name__}: {error}"
        for prompt, want, got in zip(prompts(), expected, answers, strict=True):
            place = next((n for n in range(NUM_TOKENS) if got[n] != want[n]), None)
            if place is None or (dtype == torch.float32 and is_near_tie(model, (*prompt, *want[:place]))):
                continue
            return f"wrong: in {dtype} behind {len(prompt)} + {place} tokens"
    return outcome


def cases(names: list[str]) -> Iterator[tuple[str, type[PreTrainedConfig], dict[str, object]]]:
    types = sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING})
    for model_type in types:
        for variant, changes in {"": {}, **VARIANTS.get(model_type, {})}.items():
            name = f"{model_type}, {variant}" if variant else model_type
            if not names or name in names or model_type in names:
                yield name, CONFIG_MAPPING[model_type], {**NEEDED.get(model_type, {}), **changes}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    outcomes: Counter[str] = Counter()
    for name, kind, needed in cases(names):
        try:
            config = small_config(kind, needed)
        except Exception as error:
            outcome = f"not run: config: {type(error).__name__}: {error}"
        else:
            outcome = survey(config)
        outcomes[outcome.split(":")[0]] += 1
        print(f"{name:32} {' '.join(outcome.split())[:300]}", flush=True)
    equal, refused, wrong, raw = (outcomes[word] for word in ("equal", "refused", "wrong", "raw error"))
    number = equal + refused + wrong + raw
    print(f"{number} models: {equal} equal, {refused} refused, {wrong} wrong, {raw} raw errors")
    return wrong + raw


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
