"""The shape of a model, read off its config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cbresearch.config.checks import require_positive

# What transformers configs call one thing, the most common name first. In models that have an encoder too,
# the common name is the encoder's.
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
_DECODER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "emb_dim")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_head", "dim_head")
_MAX_MODEL_LEN = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "decoder")

_FULL_KINDS = {"full_attention", "attention", "hybrid"}
_SLIDING_KINDS = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
_KINDS_WITHOUT_KV = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"}
# Any of these says that some layers are recurrent or convolutions.
_RECURRENT = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "attn_layer_period",
    "attn_layer_indices",
    "full_attention_interval",
    "full_attn_idxs",
    "hybrid_override_pattern",
    "linear_attn_config",
    "block_types",
)
# One whole layer in so many, where the config.json leaves the pattern to the class.
_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
# Fields for some of the layers, and what the others go by.
_OF_SOME_LAYERS = {
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_kv_lora_rank": "kv_lora_rank",
}
# Index keys of sparse attention, and layers that run several times with a cache for each.
_BESIDE = ("index_head_dim", "n_recurrent_loops", "loop_num_passes")
# Models whose code, not whose config, says that they cache something else than keys and values, or different
# numbers of them.
_OTHER_CACHES = {"mimo_v2_flash", "reformer", "xlstm"}
_DIFFERING = "the model's config has {!r}: its layers differ in what they cache, and one shape is not enough"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold the numbers of a decoder-only model that memory and FLOP formulas need.

    Attributes:
        num_layers: Decoder layers that hold a KV cache, windowed ones included.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; equal to `num_heads` for multi-head attention, 1 for multi-query.
        head_dim: Elements of one head's key vector, and of its value vector unless that differs.
        num_parameters: Weights of the model, embeddings included.
        dtype_bytes: Bytes of one element of weights and cache.
        max_model_len: Largest context length in tokens.
        vocab_size: Number of token ids.
        value_head_dim: Elements of one head's value vector where it differs from the key's, or None.
        latent_dim: Elements of the one vector per token and layer that multi-head latent attention caches in
            place of keys and values (DeepSeek-V2: compressed KV and rotary key, 512 + 64), or None.
        sliding_window: Tokens that the windowed layers attend to at most, or None if no layer is windowed.
        num_sliding_layers: Layers that are windowed.

    Raises:
        ValueError: A number is out of range, the query heads do not divide among the KV heads, or there are
            windowed layers without a window or a window without layers.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    dtype_bytes: int = 4
    max_model_len: int | None = None
    vocab_size: int | None = None
    value_head_dim: int | None = None
    latent_dim: int | None = None
    sliding_window: int | None = None
    num_sliding_layers: int = 0

    def __post_init__(self) -> None:
        require_positive(self, *(name for name in self.__slots__ if name != "num_sliding_layers"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelShape: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )
        if self.num_sliding_layers:
            require_positive(self, "num_sliding_layers")
        if self.num_sliding_layers > self.num_layers or bool(self.num_sliding_layers) != bool(
            self.sliding_window
        ):
            raise ValueError(
                f"ModelShape: num_sliding_layers is {self.num_sliding_layers!r} of {self.num_layers} layers "
                f"with a sliding_window of {self.sliding_window}"
            )

    @classmethod
    def from_config(cls, config: Any, *, num_parameters: int, dtype_bytes: int) -> "ModelShape":
        """Read a shape off a transformers config, or off a mapping such as a `config.json`.

        Layers without a KV cache (recurrent, convolution, no attention at all, or layers that read an earlier
        layer's cache) are not counted, and neither is the state of fixed size that some of them hold.
        Chunked attention (Llama 4) counts as a window of the chunk's size, which it holds at most.

        Raises:
            ValueError: The config lacks a field that the shape needs, or describes a model whose cache is no
                such shape: an encoder-decoder, layers that differ in heads or sizes, no attention, or index
                keys beside the latents. A `config.json` that leaves its class's defaults out, or that does
                not say which layers are recurrent, needs `transformers.AutoConfig`.
        """
        return cls(num_parameters=num_parameters, dtype_bytes=dtype_bytes, **_read_shape(_decoder(config)))


def _decoder(config: Any) -> Callable[[str], Any]:
    """Return the look-up of a config's fields, in the part that describes the text decoder."""
    if not isinstance(config, Mapping):
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        if getattr(config, "is_heterogeneous", False):
            raise ValueError(_DIFFERING.format("per_layer_config"))
        return lambda name: getattr(config, name, None)
    for name in _TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            config = config[name]
    fields: Mapping[str, Any] = config
    return fields.get


def _first(read: Callable[[str], Any], names: tuple[str, ...]) -> Any:
    """Return what the first of several names for one thing says, or None."""
    return next((value for name in names if (value := read(name)) is not None), None)


def _needed(read: Callable[[str], Any], names: tuple[str, ...]) -> Any:
    value = _first(read, names)
    if value is None and _first(read, _RECURRENT) is not None:
        raise ValueError(
            f"the model's config has no {names[0]!r} but a recurrent state, which stands in for a KV cache; "
            "a model with attention in every layer is needed"
        )
    if value is None:
        raise ValueError(
            f"the model's config has no {names[0]!r}; a decoder-only model is needed, and if its class has "
            "a default for it, load the config with transformers.AutoConfig"
        )
    return value


def _read_shape(read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the fields of a ModelShape, without weights, from a look-up of config fields."""
    if read("is_encoder_decoder"):
        raise ValueError(
            "the model's config has is_encoder_decoder set: such a model keeps the KV of its encoder as "
            "well; a decoder-only model is needed"
        )
    num_heads = _first(read, _DECODER_HEADS) or _needed(read, _NUM_HEADS)
    num_layers, window, num_sliding = _read_layers(read)
    _refuse_differing(read, num_layers, num_sliding)
    longest = _first(read, _MAX_MODEL_LEN)
    shape: dict[str, Any] = {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "max_model_len": None if longest == -1 else longest,  # XLNet's -1 is no limit
        "vocab_size": read("vocab_size"),
        "sliding_window": window,
        "num_sliding_layers": num_sliding,
    }
    if (compressed := read("kv_lora_rank")) is not None:
        # Multi-head latent attention; head_dim, where such a config has it, is the rotary part alone.
        rotary = _needed(read, ("qk_rope_head_dim",))
        return {
            **shape,
            "num_kv_heads": num_heads,
            "head_dim": _needed(read, ("qk_nope_head_dim",)) + rotary,
            "value_head_dim": _needed(read, ("v_head_dim",)),
            "latent_dim": compressed + rotary,
        }
    attention = read("attn_config")
    groups = attention.get("kv_n_heads") if isinstance(attention, Mapping) else None
    num_kv_heads = _first(read, _NUM_KV_HEADS) or groups or num_heads
    if read("multi_query") and not read("new_decoder_architecture"):
        # Falcon and GPT-BigCode say so by a switch, and Falcon's number of KV heads is then without effect.
        num_kv_heads = 1
    head_dim = _first(read, _HEAD_DIM) or _needed(read, _HIDDEN_SIZE) // num_heads
    value_head_dim = read("v_head_dim")
    return {
        **shape,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": None if value_head_dim == head_dim else value_head_dim,
    }


def _read_layers(read: Callable[[str], Any]) -> tuple[int, int | None, int]:
    """Return the layers that keep KV, the window in tokens, and how many of these layers are windowed."""
    kinds = _layer_kinds(read)
    if unknown := sorted(set(kinds) - _FULL_KINDS - _SLIDING_KINDS - _KINDS_WITHOUT_KV):
        raise ValueError(f"the model's config has layers of the kinds {unknown}, whose cache is unknown")
    # The last layers of some models read the cache of an earlier one.
    kinds = kinds[: len(kinds) - (read("num_kv_shared_layers") or 0)]
    num_layers = sum(kind not in _KINDS_WITHOUT_KV for kind in kinds)
    # These hold keys and values of an image, not of tokens.
    num_layers -= len(read("cross_attention_layers") or ())
    if num_layers < 1:
        raise ValueError("the model's config has no layer that keeps KV; a model with attention is needed")
    num_sliding = sum(kind in _SLIDING_KINDS for kind in kinds)
    window = _first(read, _WINDOW)
    if num_sliding and window is None:
        raise ValueError(f"the model's config has {num_sliding} windowed layers, but no 'sliding_window'")
    return num_layers, window if num_sliding else None, num_sliding


def _layer_kinds(read: Callable[[str], Any]) -> list[str]:
    """Return each layer's kind, from the list of kinds or from older fields that imply it."""
    kinds = _first(read, ("layer_types", "layers_block_type"))
    if kinds is not None:
        return list(kinds)
    for name in _RECURRENT:
        if read(name) is not None:
            raise ValueError(
                f"the model's config has {name!r}, so layers without KV, but no 'layer_types' to say which; "
                "load it with transformers.AutoConfig"
            )
    num_layers = _first(read, _DECODER_LAYERS) or _needed(read, _NUM_LAYERS)
    kinds = ["full_attention"] * num_layers
    if _first(read, _WINDOW) is None or read("use_sliding_window") is False:
        return kinds
    pattern = read("sliding_window_pattern")
    period = (
        len(pattern) if isinstance(pattern, str) else pattern or _WINDOW_PERIODS.get(read("model_type"), 0)
    )
    # Qwen2 leaves the first layers whole; others have a whole layer at the end of each period, or none.
    start = read("max_window_layers") or 0
    for layer in range(start, num_layers):
        if not period or (layer + 1) % period:
            kinds[layer] = "sliding_attention"
    return kinds


def _refuse_differing(read: Callable[[str], Any], num_layers: int, num_sliding: int) -> None:
    """Refuse models whose layers do not all keep the same KV, or keep something beside it."""
    if (model_type := read("model_type")) in _OTHER_CACHES:
        raise ValueError(f"a {model_type} model does not cache the same keys and values in every layer")
    # On a config object per_layer_config is there for every model, as a list.
    if isinstance(read("per_layer_config"), Mapping) or read("block_configs"):
        raise ValueError(
            _DIFFERING.format("per_layer_config" if read("per_layer_config") else "block_configs")
        )
    for name, common in _OF_SOME_LAYERS.items():
        if read(name) not in (None, read(common)) and 0 < num_sliding < num_layers:
            raise ValueError(_DIFFERING.format(name))
    for name in _BESIDE:
        if read(name) is not None:
            raise ValueError(
                f"the model's config has {name!r}: it caches more than keys and values of its layers"
            )
