"""The shape of a model, read off its transformers config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cbresearch.checks import check_numbers

# Names of one field in the config.json files of different families, the most common first; a config object
# maps its family's names itself (`attribute_map`). Where there is an encoder, the common name is its own.
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
_STATES = ("state_size", "ssm_state_size", "mamba_d_state", "linear_attn_config", "block_types")
_PATTERNS = ("full_attention_interval", "full_attn_idxs", "hybrid_override_pattern")
_RECURRENT = (*_STATES, "attn_layer_period", "attn_layer_indices", *_PATTERNS)
# One whole layer in so many, where the config.json leaves the pattern to the class.
_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
# Fields for some of the layers: the field of the others has the same name without "global" or "swa".
_OF_GLOBAL_LAYERS = ("global_head_dim", "num_global_key_value_heads")
_OF_SLIDING_LAYERS = ("swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads", "swa_kv_lora_rank")
# Index keys of sparse attention, and layers that run several times with a cache for each.
_BESIDE = ("index_head_dim", "n_recurrent_loops", "loop_num_passes")
# Models whose code, not whose config, says that they cache something else than keys and values, or different
# numbers of them.
_OTHER_CACHES = {"mimo_v2_flash", "reformer", "xlstm"}
_DIFFERING = "the model's config has {!r}: its layers differ in what they cache, and one shape is not enough"

Look = Callable[[str], Any]
"""Returns a config's field by name, or None."""


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
        check_numbers(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelShape: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )
        has_window = self.sliding_window is not None
        if self.num_sliding_layers > self.num_layers or bool(self.num_sliding_layers) != has_window:
            raise ValueError(
                f"ModelShape: num_sliding_layers is {self.num_sliding_layers!r} of {self.num_layers} layers "
                f"with a sliding_window of {self.sliding_window}"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes that all layers cache of one token."""
        per_head = self.head_dim + (self.value_head_dim or self.head_dim)
        return self.num_layers * (self.latent_dim or self.num_kv_heads * per_head) * self.dtype_bytes

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
        fields = _shape_fields(_text_decoder(config))
        return cls(num_parameters=num_parameters, dtype_bytes=dtype_bytes, **fields)


def _text_decoder(config: Any) -> Look:
    """Return the look-up of the fields in the part of a config that describes the text decoder."""
    if isinstance(config, Mapping):
        for name in _TEXT_PARTS:
            config = config[name] if isinstance(config.get(name), Mapping) else config
        get: Look = config.get
        return get
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(_DIFFERING.format("per_layer_config"))
    return lambda name: getattr(config, name, None)


def _first(look: Look, names: tuple[str, ...]) -> Any:
    """Return the first of several names' fields that is there, or None."""
    return next((value for name in names if (value := look(name)) is not None), None)


def _needed(look: Look, names: tuple[str, ...]) -> Any:
    value = _first(look, names)
    if value is None and _first(look, _RECURRENT) is not None:
        has = "but a recurrent state, which stands in for a KV cache"
        raise ValueError(f"the model's config has no {names[0]!r} {has}; attention in every layer is needed")
    if value is None:
        remedy = "if its class has a default for it, load the config with transformers.AutoConfig"
        raise ValueError(f"the model's config has no {names[0]!r}; a decoder-only model is needed; {remedy}")
    return value


def _shape_fields(look: Look) -> dict[str, Any]:
    """Return the fields of a ModelShape, without weights."""
    if look("is_encoder_decoder"):
        reason = "such a model keeps the KV of its encoder as well; a decoder-only model is needed"
        raise ValueError(f"the model's config has is_encoder_decoder set: {reason}")
    num_heads = _first(look, _DECODER_HEADS) or _needed(look, _NUM_HEADS)
    kinds = _kinds_with_kv(look)
    num_sliding, window = sum(kind in _SLIDING_KINDS for kind in kinds), _first(look, _WINDOW)
    if num_sliding and window is None:
        raise ValueError(f"the model's config has {num_sliding} windowed layers, but no 'sliding_window'")
    _reject_differing(look, 0 < num_sliding < len(kinds))
    longest = _first(look, _MAX_MODEL_LEN)
    shape: dict[str, Any] = {
        "num_layers": len(kinds),
        "num_heads": num_heads,
        "max_model_len": None if longest == -1 else longest,  # XLNet's -1 is no limit
        "vocab_size": look("vocab_size"),
        "sliding_window": window if num_sliding else None,
        "num_sliding_layers": num_sliding,
    }
    if (compressed := look("kv_lora_rank")) is not None:
        # Multi-head latent attention; head_dim, where such a config has it, is the rotary part alone.
        rotary = _needed(look, ("qk_rope_head_dim",))
        head_dim = _needed(look, ("qk_nope_head_dim",)) + rotary
        shape |= {"num_kv_heads": num_heads, "head_dim": head_dim, "latent_dim": compressed + rotary}
        return shape | {"value_head_dim": _needed(look, ("v_head_dim",))}
    attention = look("attn_config")
    groups = attention.get("kv_n_heads") if isinstance(attention, Mapping) else None
    num_kv_heads = _first(look, _NUM_KV_HEADS) or groups or num_heads
    if look("multi_query") and not look("new_decoder_architecture"):
        # Falcon and GPT-BigCode say so by a switch, and Falcon's number of KV heads is then without effect.
        num_kv_heads = 1
    head_dim = _first(look, _HEAD_DIM) or _needed(look, _HIDDEN_SIZE) // num_heads
    value_head_dim = None if look("v_head_dim") == head_dim else look("v_head_dim")
    return shape | {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}


def _kinds_with_kv(look: Look) -> list[str]:
    """Return the kinds of the layers that keep KV of tokens."""
    kinds = _layer_kinds(look)
    if unknown := sorted(set(kinds) - _FULL_KINDS - _SLIDING_KINDS - _KINDS_WITHOUT_KV):
        raise ValueError(f"the model's config has layers of the kinds {unknown}, whose cache is unknown")
    # Cross-attention layers hold KV of an image, and the last layers of some models read an earlier one's.
    own = range(len(kinds) - (look("num_kv_shared_layers") or 0))
    without_kv = {*(look("cross_attention_layers") or ())}
    kinds = [kinds[at] for at in own if at not in without_kv and kinds[at] not in _KINDS_WITHOUT_KV]
    if not kinds:
        raise ValueError("the model's config has no layer that keeps KV; a model with attention is needed")
    return kinds


def _layer_kinds(look: Look) -> list[str]:
    """Return each layer's kind, from the list of kinds or from older fields that imply it."""
    if (kinds := _first(look, ("layer_types", "layers_block_type"))) is not None:
        return list(kinds)
    if recurrent := [name for name in _RECURRENT if look(name) is not None]:
        remedy = "no 'layer_types' to say which; load it with transformers.AutoConfig"
        raise ValueError(f"the model's config has {recurrent[0]!r}, so layers without KV, but {remedy}")
    num_layers = _first(look, _DECODER_LAYERS) or _needed(look, _NUM_LAYERS)
    if _first(look, _WINDOW) is None or look("use_sliding_window") is False:
        return ["full_attention"] * num_layers
    pattern = look("sliding_window_pattern") or _WINDOW_PERIODS.get(look("model_type"), 0)
    period = len(pattern) if isinstance(pattern, str) else pattern
    # Qwen2 leaves the first layers whole; others have a whole layer at the end of each period, or none.
    start = look("max_window_layers") or 0
    return [
        "full_attention" if layer < start or (period and (layer + 1) % period == 0) else "sliding_attention"
        for layer in range(num_layers)
    ]


def _reject_differing(look: Look, is_mixed: bool) -> None:
    """Reject models whose layers do not all keep the same KV, or keep something beside it."""
    if (model_type := look("model_type")) in _OTHER_CACHES:
        raise ValueError(f"a {model_type} model does not cache the same keys and values in every layer")
    # On a config object per_layer_config is there for every model, as a list.
    differing = ["per_layer_config"] if isinstance(look("per_layer_config"), Mapping) else []
    differing += ["block_configs"] if look("block_configs") else []
    for name in (*_OF_GLOBAL_LAYERS, *_OF_SLIDING_LAYERS) if is_mixed else ():
        others = look(name.replace("global_", "").removeprefix("swa_"))
        differing += [name] if look(name) not in (None, others) else []
    if differing:
        raise ValueError(_DIFFERING.format(differing[0]))
    if beside := [name for name in _BESIDE if look(name) is not None]:
        raise ValueError(f"the model's config has {beside[0]!r}: it caches more than keys and values")
