"""Frozen configurations: limits of the cache and the scheduler, and the shape of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

_OPTIONAL = ("max_model_len", "vocab_size")


def _require_positive(owner: object, *names: str) -> None:
    """Turn the named counts of a configuration into plain ints, whatever integer types they came as."""
    for name in names:
        value = getattr(owner, name)
        if value is None and name in _OPTIONAL:
            continue
        try:
            count = None if isinstance(value, bool) else index(value)
        except TypeError:
            count = None
        if count is None or count < 1:
            raise ValueError(
                f"{type(owner).__name__}: {name} is {value!r}; it must be an integer of at least 1"
            )
        object.__setattr__(owner, name, count)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Describe the KV pool.

    Attributes:
        num_blocks: Number of blocks in the pool.
        block_size: Tokens per block.
        prefix_caching: Keep full blocks for requests whose prompts begin alike.

    Raises:
        ValueError: A number is below 1.
    """

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "num_blocks", "block_size")

    @property
    def num_tokens(self) -> int:
        """Return the pool's capacity in tokens."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limit what one step may hold.

    Attributes:
        max_num_seqs: Number of seats: requests that may be in the batch at once.
        max_num_batched_tokens: Token budget of one step, prefill and decode together.
        max_model_len: Largest prompt + output of a request in tokens, or None for no limit.

    Raises:
        ValueError: A limit is below 1.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold the numbers of a decoder-only model that memory and FLOP formulas need.

    Attributes:
        num_layers: Decoder layers that hold a KV cache.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; equal to `num_heads` for multi-head attention, 1 for multi-query.
        head_dim: Elements of one head's key or value vector.
        num_parameters: Weights of the model, embeddings included.
        dtype_bytes: Bytes of one element of weights and cache.
        max_model_len: Largest context length in tokens.
        vocab_size: Number of token ids.

    Raises:
        ValueError: A number is below 1, or the query heads do not divide among the KV heads.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    dtype_bytes: int = 4
    max_model_len: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self, *self.__slots__)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelShape: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )

    @classmethod
    def from_config(cls, config: Any, *, num_parameters: int, dtype_bytes: int) -> "ModelShape":
        """Read a shape off a transformers config, or off a mapping such as a `config.json`.

        Raises:
            ValueError: The config lacks a field that the shape needs.
        """

        def read(name: str) -> Any:
            return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

        needed = {name: read(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
        for name, value in needed.items():
            if value is None:
                raise ValueError(f"the model's config has no {name!r}; a decoder-only model is needed")
        num_heads = needed["num_attention_heads"]
        return cls(
            num_layers=needed["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=read("num_key_value_heads") or num_heads,
            head_dim=read("head_dim") or needed["hidden_size"] // num_heads,
            num_parameters=num_parameters,
            dtype_bytes=dtype_bytes,
            max_model_len=read("max_position_embeddings"),
            vocab_size=read("vocab_size"),
        )
