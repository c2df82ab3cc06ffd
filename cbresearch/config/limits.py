"""Limits of the cache, the scheduler and the queue."""

from dataclasses import dataclass

from cbresearch.config.checks import require_positive

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
        cache_on_schedule: Whether a prefix counts as cached as soon as a step is planned that computes it, so
            that requests of that very step may share it, as in vLLM v1; else once it is computed.

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
        require_positive(self, "num_blocks", "block_size", "sliding_window")
        if self.num_host_blocks:
            require_positive(self, "num_host_blocks")
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
        preemption: What policies do with the KV of a request that has to make room, unless they decide
            otherwise: "recompute" throws it away, "swap" moves it to the host tier while that has room.

        max_preemptions: Preemptions of a request after which no newcomer displaces it any more, and it makes
            room for others only if all of them have been preempted as often.
        chunked_prefill: Whether a prompt may be computed over several steps. If not, nobody is accepted who
            could need more than one step's token budget for it.

    Raises:
        ValueError: A limit is below 1, or the preemption is unknown.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    preemption: str = "recompute"
    max_preemptions: int = 8
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_preemptions")
        if self.preemption not in PREEMPTIONS:
            raise ValueError(
                f"SchedulerConfig: preemption is {self.preemption!r}; choose one of {PREEMPTIONS}"
            )


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limit what may wait for its first seat; beyond it an engine refuses newcomers.

    Attributes:
        max_num_requests: Requests, or None for no limit.
        max_num_tokens: Their prompt tokens together, or None for no limit.

    Raises:
        ValueError: A limit is below 1.
    """

    max_num_requests: int | None = None
    max_num_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "max_num_requests", "max_num_tokens")
