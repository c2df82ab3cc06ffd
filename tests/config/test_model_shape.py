"""A model's shape, read off a config under whatever names, predicts the bytes of the cache that it fills."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cbresearch.config import ModelShape
from cbresearch.formulas import kv_bytes_per_request, kv_bytes_per_token

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, **HEADS}
UNGROUPED = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {
    **LLAMA,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "topk_group": 1,
    "n_group": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
BETWEEN = ["sliding_attention", "full_attention"] * 2

# model type: (its own fields, and what should be read: layers, windowed ones, KV heads, key and value size)
TINY = {
    "gpt2": ({"vocab_size": 50, "n_layer": 3, "n_head": 4, "n_embd": 32}, (3, 0, 4, 8, 8)),
    "gpt_bigcode": ({"vocab_size": 50, "n_layer": 3, "n_head": 4, "n_embd": 32}, (3, 0, 1, 8, 8)),
    "gptj": (
        {"vocab_size": 50, "n_layer": 3, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
        (3, 0, 4, 8, 8),
    ),
    "gpt_neo": (
        {
            "vocab_size": 50,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 32,
            "attention_types": [[["global", "local"], 1]],
        },
        (2, 0, 4, 8, 8),
    ),
    "gpt_neox": ({**UNGROUPED, "rotary_pct": 0.5}, (4, 0, 4, 8, 8)),
    "opt": ({**UNGROUPED, "ffn_dim": 48, "word_embed_proj_dim": 32}, (4, 0, 4, 8, 8)),
    "bloom": ({"vocab_size": 50, "hidden_size": 32, "n_layer": 3, "n_head": 4}, (3, 0, 4, 8, 8)),
    "mpt": ({"vocab_size": 50, "d_model": 32, "n_layers": 3, "n_heads": 4}, (3, 0, 4, 8, 8)),
    "falcon": (
        {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        (3, 0, 1, 8, 8),
    ),
    "dbrx": (
        {
            "vocab_size": 50,
            "d_model": 32,
            "n_layers": 3,
            "n_heads": 4,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
        },
        (3, 0, 2, 8, 8),
    ),
    "llama": (LLAMA, (4, 0, 2, 8, 8)),
    "phi": (LLAMA, (4, 0, 2, 8, 8)),
    "cohere": (LLAMA, (4, 0, 2, 8, 8)),
    "granite": (LLAMA, (4, 0, 2, 8, 8)),
    "olmo2": (LLAMA, (4, 0, 2, 8, 8)),
    "gemma": ({**LLAMA, "head_dim": 16}, (4, 0, 2, 16, 16)),
    "qwen3": ({**LLAMA, "head_dim": 16}, (4, 0, 2, 16, 16)),
    "mixtral": ({**LLAMA, **EXPERTS}, (4, 0, 2, 8, 8)),
    "qwen2": ({**LLAMA, "sliding_window": 4, "use_sliding_window": False}, (4, 0, 2, 8, 8)),
    "mistral": ({**LLAMA, "sliding_window": 4}, (4, 4, 2, 8, 8)),
    "gemma2": ({**LLAMA, "head_dim": 16, "sliding_window": 4}, (4, 2, 2, 16, 16)),
    "gemma3_text": (
        {**LLAMA, "head_dim": 16, "sliding_window": 4, "layer_types": BETWEEN},
        (4, 2, 2, 16, 16),
    ),
    "gpt_oss": ({**LLAMA, **EXPERTS, "head_dim": 16, "sliding_window": 4}, (4, 2, 2, 16, 16)),
    "gemma3n_text": (
        {
            **LLAMA,
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": BETWEEN,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 50,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        (2, 1, 2, 16, 16),
    ),
    "deepseek_v2": (LATENT, (4, 0, 4, 20, 10)),
    "deepseek_v3": (LATENT, (4, 0, 4, 20, 10)),
    "bamba": ({**LLAMA, **MAMBA, "attn_layer_indices": [1]}, (1, 0, 2, 8, 8)),
}


def read(config) -> ModelShape:
    return ModelShape.from_config(config, num_parameters=1, dtype_bytes=4)


def summary(shape: ModelShape) -> tuple[int, ...]:
    return (
        shape.num_layers,
        shape.num_sliding_layers,
        shape.num_kv_heads,
        shape.head_dim,
        shape.value_head_dim or shape.head_dim,
    )


def fill_cache(config, num_tokens: int) -> list:
    """Return the layers that hold keys after a forward of a random model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.ones(1, num_tokens, dtype=torch.long), use_cache=True)
    # Newer releases of transformers say cache, older ones past_key_values.
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


@pytest.mark.parametrize("model_type", TINY)
def test_model_shape_predicts_the_bytes_that_transformers_caches(model_type):
    fields, expected = TINY[model_type]
    # Some classes' padding token lies outside so small a vocabulary.
    config = CONFIG_MAPPING[model_type](pad_token_id=0, **fields)
    shape = read(config)
    assert summary(shape) == expected
    layers = fill_cache(config, num_tokens=3)
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    assert held == kv_bytes_per_request(shape, 3) == 3 * kv_bytes_per_token(shape)
    windows = [layer.sliding_window for layer in layers if layer.is_sliding]
    assert windows == [shape.sliding_window] * shape.num_sliding_layers


@pytest.mark.parametrize("model_type", [name for name in TINY if name != "bamba"])
def test_model_shape_reads_a_saved_config_like_the_object(model_type):
    config = CONFIG_MAPPING[model_type](**TINY[model_type][0])
    assert read(json.loads(config.to_json_string())) == read(config)


def test_model_shape_rejects_a_saved_config_with_unnamed_recurrent_layers():
    saved = json.loads(CONFIG_MAPPING["bamba"](**TINY["bamba"][0]).to_json_string())
    with pytest.raises(ValueError, match=r"'mamba_d_state', so layers without KV.*AutoConfig"):
        read(saved)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_model_shape_holds_one_windowed_token_more_during_a_step(model_type):
    shape = read(config := CONFIG_MAPPING[model_type](**TINY[model_type][0]))
    held = sum(tensor.nbytes for layer in fill_cache(config, 11) for tensor in (layer.keys, layer.values))
    token = kv_bytes_per_token(shape) // shape.num_layers
    assert kv_bytes_per_request(shape, 11) == held + shape.num_sliding_layers * token


# As published in the models' own config.json files, the fields that matter.
PUBLISHED = {
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        ModelShape(12, 12, 12, 64, 1, 4, max_model_len=1024),
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "multi_query": True,
            "n_layer": 32,
            "n_head": 71,
            "new_decoder_architecture": False,
        },
        ModelShape(32, 71, 1, 64, 1, 4),
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "multi_query": True,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        ModelShape(60, 128, 8, 64, 1, 4),
    ),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048},
        ModelShape(32, 32, 32, 128, 1, 4, max_model_len=2048),
    ),
    "chatglm3-6b": (
        {
            "num_layers": 28,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_group_num": 2,
            "seq_length": 8192,
        },
        ModelShape(28, 32, 2, 128, 1, 4, max_model_len=8192),
    ),
    "qwen2.5-7b": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "max_window_layers": 28,
            "use_sliding_window": False,
        },
        ModelShape(28, 28, 4, 128, 1, 4),
    ),
    "gemma-2-9b": (
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "head_dim": 256,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        ModelShape(42, 16, 8, 256, 1, 4, sliding_window=4096, num_sliding_layers=21),
    ),
    "gemma-3-27b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "head_dim": 128,
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "sliding_window": 1024,
            },
        },
        ModelShape(62, 32, 16, 128, 1, 4, sliding_window=1024, num_sliding_layers=52),
    ),
    "exaone-4-32b": (
        {
            "hidden_size": 5120,
            "head_dim": 128,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        ModelShape(64, 40, 8, 128, 1, 4, sliding_window=4096, num_sliding_layers=48),
    ),
    "deepseek-v3": (
        {
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        ModelShape(61, 128, 128, 192, 1, 4, value_head_dim=128, latent_dim=576),
    ),
    "jamba, normalised": (
        {**LLAMA, "layers_block_type": ["mamba", "attention", "mamba", "attention"], "mamba_d_state": 16},
        ModelShape(2, 4, 2, 8, 1, 4, vocab_size=50),
    ),
    "bart as a decoder": (
        {
            "d_model": 64,
            "encoder_layers": 9,
            "num_hidden_layers": 9,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "num_attention_heads": 2,
            "decoder_attention_heads": 8,
            "is_encoder_decoder": False,
        },
        ModelShape(3, 8, 8, 8, 1, 4),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_shape_reads_published_configs(name):
    config, shape = PUBLISHED[name]
    assert read(config) == shape


def test_model_shape_of_qwen2_windows_the_layers_from_max_window_layers_on():
    fields = {**LLAMA, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}
    assert summary(read({"model_type": "qwen2", **fields})) == (4, 1, 2, 8, 8)
    assert read(CONFIG_MAPPING["qwen2"](**fields)).num_sliding_layers == 1


def test_model_shape_reads_the_text_decoder_of_a_multimodal_config():
    config = CONFIG_MAPPING["gemma3"]()
    assert read(config) == read(config.text_config) == read(config.to_dict())
    assert read(config).num_sliding_layers


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "no layer that keeps KV"),
        ({**LLAMA, "layer_types": ["indexed_attention"] * 4}, r"kinds \['indexed_attention'\]"),
        ({**LLAMA, "layer_types": BETWEEN}, "2 windowed layers, but no 'sliding_window'"),
        ({**LLAMA, "hybrid_override_pattern": "M*"}, "'hybrid_override_pattern', so layers without KV"),
        ({**LLAMA, "block_configs": [{}]}, "'block_configs': its layers differ"),
        ({**LLAMA, "per_layer_config": {"0": {}}}, "'per_layer_config': its layers differ"),
        (
            {**LLAMA, "sliding_window": 4, "layer_types": BETWEEN, "swa_num_key_value_heads": 4},
            "'swa_num_key_value_heads': its layers differ",
        ),
        ({**LATENT, "index_head_dim": 128}, "'index_head_dim': it caches more"),
        ({**LLAMA, "model_type": "xlstm"}, "xlstm"),
        ({**LATENT, "v_head_dim": None}, "no 'v_head_dim'"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "no 'hidden_size'.*AutoConfig"),
    ],
)
def test_model_shape_rejects_a_config_with_another_kind_of_cache(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(fields)


def test_model_shape_rejects_a_config_object_whose_layers_differ():
    with pytest.raises(ValueError, match="its layers differ"):
        read(CONFIG_MAPPING["gemma4_text"]())


@pytest.mark.parametrize(
    "fields",
    [
        {"num_sliding_layers": 2},
        {"sliding_window": 8},
        {"sliding_window": 8, "num_sliding_layers": 5},
        {"sliding_window": 8, "num_sliding_layers": -1},
    ],
)
def test_model_shape_has_a_window_if_and_only_if_layers_are_windowed(fields):
    with pytest.raises(ValueError, match="num_sliding_layers is"):
        replace(ModelShape(4, 8, 8, 16, 1), **fields)
