"""Frozen configurations: limits of the cache and the scheduler, and the shape of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OPTIONAL = ("max_model_len", "vocab_size")


def _require_positive(owner: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{owner}: {name} is {value!r}; it must be an integer of at least 1")


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
        _require_positive("CacheConfig", num_blocks=self.num_blocks, block_size=self.block_size)

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
        _require_positive(
            "SchedulerConfig",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )


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
        _require_positive("ModelShape", **{name: getattr(self, name) for name in self.__slots__})
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelShape: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, num_parameters: int, dtype_bytes: int) -> "ModelShape":
        """Read a shape off a transformers config given as a mapping (`config.to_dict()`).

        Raises:
            ValueError: The config lacks a field that the shape needs.
        """
        try:
            num_heads = config["num_attention_heads"]
            return cls(
                num_layers=config["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
                num_parameters=num_parameters,
                dtype_bytes=dtype_bytes,
                max_model_len=config.get("max_position_embeddings"),
                vocab_size=config.get("vocab_size"),
            )
        except KeyError as missing:
            raise ValueError(f"the model's config has no {missing}; a decoder-only model is needed") from None
