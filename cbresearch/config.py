"""Frozen configurations, validated when they are built: limits and a machine."""

from dataclasses import dataclass

from cbresearch.checks import check_numbers
from cbresearch.model_shape import ModelShape as ModelShape  # noqa: PLC0414

RESERVATIONS = ("max", "pow2", "oracle")
PREEMPTIONS = ("recompute", "swap")


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
        cache_on_schedule: Count a prefix as cached as soon as a step is planned that computes it, as vLLM v1
            does, so that other requests of the same step may share it; else only once it is computed.

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
    cache_on_schedule: bool = False

    def __post_init__(self) -> None:
        # More than any server has, and lists of which a computer can hold.
        check_numbers(self, block_size=(1, 10**9), num_blocks=(1, 10**7), num_host_blocks=(0, 10**7))
        if self.reservation is None:
            return
        if self.reservation not in RESERVATIONS:
            raise ValueError(
                f"CacheConfig: reservation is {self.reservation!r}; choose one of {RESERVATIONS}, or None "
                "for paging"
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
        preemption: What policies do with the KV of a preempted request, unless they decide otherwise:
            "recompute" throws it away, "swap" moves it to the host tier while that has room.
        max_preemptions: Preemptions of a request after which no waiting request displaces it any more, and
            it makes room for others only if all of them have been preempted as often.
        chunked_prefill: Whether a prompt may be computed over several steps. If not, a request is rejected
            that could need more than one step's token budget for it.

    Raises:
        ValueError: A limit is out of range, or the preemption is unknown.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    preemption: str = "recompute"
    max_preemptions: int = 8
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, max_num_seqs=(1, 10**6), max_num_batched_tokens=(1, 10**9))
        if self.preemption not in PREEMPTIONS:
            raise ValueError(
                f"SchedulerConfig: preemption is {self.preemption!r}; choose one of {PREEMPTIONS}"
            )


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limit the requests that wait for their first seat; beyond it an engine rejects new ones.

    Attributes:
        max_num_requests: Number of requests, or None for no limit.
        max_num_tokens: Prompt tokens of these requests together, or None for no limit.

    Raises:
        ValueError: A limit is below 1.
    """

    max_num_requests: int | None = None
    max_num_tokens: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hold the numbers of a machine that step times depend on.

    Attributes:
        name: What the machine is called.
        peak_flops: FLOP/s of its matrix products in the model's data type.
        bandwidth: Bytes/s of its memory.
        memory_bytes: Bytes of its memory, or None if unknown.
        link_bandwidth: Bytes/s of its PCIe or NVLink link to the host's memory, one way; None without one.

    Raises:
        ValueError: A number is not positive.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int | None = None
    link_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
