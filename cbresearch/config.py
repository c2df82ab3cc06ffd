"""Frozen configurations: limits of the cache and the scheduler, and the shape of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

_OPTIONAL = ("max_model_len", "vocab_size", "sliding_window", "value_head_dim", "latent_dim")

RESERVATIONS = ("max", "pow2", "oracle")
PREEMPTIONS = ("recompute", "swap")


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
        num_host_blocks: Blocks of the second tier, in the host's memory, to which preempted requests are
            swapped out; 0 for none.
        sliding_window: Tokens that every layer attends to at most, the query's own included: blocks that
            fell out of it are freed. None where some layer sees the whole context.
        reservation: None for paging; "max", "pow2" or "oracle" for a baseline that reserves each request a
            contiguous run of blocks when it joins, for the longest context that is allowed, for its output
            rounded up to a power of two, or for its true output (vLLM, SOSP'23, section 6.1).

    Raises:
        ValueError: A number is out of range, or contiguous runs are asked for along with what only pages
            can do.
    """

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = False
    num_host_blocks: int = 0
    sliding_window: int | None = None
    reservation: str | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "num_blocks", "block_size", "sliding_window")
        if self.num_host_blocks:
            _require_positive(self, "num_host_blocks")
        if self.reservation is None:
            return
        if self.reservation not in RESERVATIONS:
            raise ValueError(
                f"CacheConfig: reservation is {self.reservation!r}; choose one of {RESERVATIONS}, or None for "
                "paging"
            )
        if self.prefix_caching or self.num_host_blocks or self.sliding_window is not None:
            raise ValueError(
                f"CacheConfig: reservation {self.reservation!r} holds contiguous runs, which are not shared, "
                "swapped or freed in part; turn off prefix_caching, num_host_blocks and sliding_window"
            )

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
        preemption: What policies do with the KV of a request that has to make room, unless they decide
            otherwise: "recompute" throws it away, "swap" moves it to the host tier while that has room.

    Raises:
        ValueError: A limit is below 1, or the preemption is unknown.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    preemption: str = "recompute"

    def __post_init__(self) -> None:
        _require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(
                f"SchedulerConfig: preemption is {self.preemption!r}; choose one of {PREEMPTIONS}"
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
        value_head_dim: Elements of one head's value vector where it differs from the key's, or None.
        latent_dim: Elements of the one vector per token and layer that multi-head latent attention caches in
            place of keys and values (DeepSeek-V2: compressed KV and rotary key, 512 + 64), or None.
        sliding_window: Tokens that the windowed layers attend to at most, or None if no layer is windowed.
        num_sliding_layers: Layers that are windowed.

    Raises:
        ValueError: A number is out of range, or the query heads do not divide among the KV heads.
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
        _require_positive(self, *(name for name in self.__slots__ if name != "num_sliding_layers"))
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
