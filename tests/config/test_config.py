"""Limits and shapes are checked where they are made, and are frozen."""

from dataclasses import FrozenInstanceError

import pytest

from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig

NOT_A_LIMIT = [0, -1, True, False, 2.0, 0.5, float("nan"), "8", None]
SHAPE = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "num_parameters": 1000}
LLAMA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 256,
    "max_position_embeddings": 512,
    "vocab_size": 99,
}

VALID = {
    CacheConfig: {"num_blocks": 4, "block_size": 2},
    SchedulerConfig: {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16},
    ModelShape: {**SHAPE, "dtype_bytes": 2, "max_model_len": 64, "vocab_size": 99},
}
OPTIONAL = {"max_model_len", "vocab_size"}


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (config, name, value)
        for config, fields in VALID.items()
        for name in fields
        for value in NOT_A_LIMIT
        if not (value is None and name in OPTIONAL)
    ],
)
def test_config_rejects_a_limit_that_is_no_positive_integer(config, name, value):
    with pytest.raises(
        ValueError, match=f"{config.__name__}: {name} is .*integer of at least 1"
    ) as rejection:
        config(**{**VALID[config], name: value})
    assert repr(value) in str(rejection.value)


@pytest.mark.parametrize(("config", "fields"), VALID.items())
def test_config_takes_limits_of_one_and_is_frozen(config, fields):
    smallest = config(**dict.fromkeys(fields, 1))
    for name in fields:
        assert getattr(smallest, name) == 1
        with pytest.raises(FrozenInstanceError):
            setattr(smallest, name, 2)


@pytest.mark.parametrize(("config", "name"), [(SchedulerConfig, "max_model_len"), (ModelShape, "vocab_size")])
def test_config_takes_none_for_an_optional_limit(config, name):
    assert getattr(config(**{**VALID[config], name: None}), name) is None


def test_cache_config_counts_the_tokens_of_its_pool():
    assert CacheConfig(num_blocks=7, block_size=3).num_tokens == 21


def test_model_shape_divides_query_heads_among_kv_heads():
    with pytest.raises(ValueError, match="8 query heads do not divide among 3 KV heads"):
        ModelShape(**{**SHAPE, "num_kv_heads": 3})


def test_model_shape_is_read_off_a_config():
    shape = ModelShape.from_config(LLAMA, num_parameters=5, dtype_bytes=2)
    assert shape == ModelShape(4, 8, 2, 16, 5, dtype_bytes=2, max_model_len=512, vocab_size=99)


@pytest.mark.parametrize("absent", ["missing", None])
def test_model_shape_without_grouped_heads_splits_the_hidden_size(absent):
    config = {**LLAMA, "num_key_value_heads": absent, "head_dim": absent}
    if absent == "missing":
        del config["num_key_value_heads"], config["head_dim"]
    shape = ModelShape.from_config(config, num_parameters=5, dtype_bytes=2)
    assert (shape.num_kv_heads, shape.head_dim) == (8, 32)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads"])
def test_model_shape_rejects_a_config_that_lacks_a_field(field):
    config = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ValueError, match=f"no '{field}'"):
        ModelShape.from_config(config, num_parameters=5, dtype_bytes=2)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CacheConfig, "prefix_caching"),
        (CacheConfig, "cache_on_schedule"),
        (SchedulerConfig, "chunked_prefill"),
    ],
)
@pytest.mark.parametrize("value", ["no", "", 0, 1, None])
def test_config_rejects_a_flag_that_is_neither_true_nor_false(config, name, value):
    with pytest.raises(ValueError, match=f"{config.__name__}: {name} is {value!r}; it must be True or False"):
        config(**{**VALID[config], name: value})
