"""Tiny models of the families whose attention the Triton kernels know: plain, windows, soft caps, sinks."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from cbresearch import models

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
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "soft cap": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 6, "query_pre_attn_scalar": 24}),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def build(family):
    model_class, config_class, options = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = models.wrap(family, model_class(config_class(**SIZES, **options)).float())
    loaded.model.generation_config.eos_token_id = None
    return models.wrap(family, loaded.model)
