"""A step time from a model's arithmetic and bytes, and a machine's peaks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cbresearch.checks import count, real
from cbresearch.config import Hardware
from cbresearch.model_shape import ModelShape
from cbresearch.step import Plan, Scheduled

CARDS: Mapping[str, Hardware] = MappingProxyType(
    {
        card.name: card
        for card in (
            # Dense bfloat16 peaks and memory of the vendors' data sheets; PCIe one way.
            Hardware("a100-80gb", 312e12, 2.04e12, 80 * 10**9, 32e9),
            Hardware("h100-sxm", 989e12, 3.35e12, 80 * 10**9, 64e9),
            Hardware("h200-sxm", 989e12, 4.8e12, 141 * 10**9, 64e9),
            Hardware("l4", 121e12, 0.3e12, 24 * 10**9, 32e9),
        )
    }
)
"""A few public cards by name."""


def num_query_key_pairs(entries: Iterable[Scheduled]) -> int:
    """Return the (query, key) pairs that causal attention computes: a query sees the tokens up to its own."""
    sizes = ((entry.start, entry.num_tokens) for entry in entries)
    return sum(number * start + number * (number + 1) // 2 for start, number in sizes)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least seconds of a step on a machine, by the efficiencies with which its peaks are reached.

    Linear layers take max(2Nn/C, Nβ/W) for n tokens. Attention takes the larger of its FLOP over C and its
    bytes over W: each row reads the keys and values of its context once, and each query attends to the
    tokens up to its own. What is copied or swapped is charged for its bytes.

    Source: Williams et al., CACM 2009; the terms as in `formulas.decode_step_seconds`, here for a plan with
    prompts in it.

    Attributes:
        shape: The model, with one data type for weights and cache; windows count as whole contexts.
        hardware: The machine.
        overhead: Seconds of a step beside the device's work: launches, scheduling, sampling.
        flops_efficiency: Share of the peak arithmetic that is reached.
        bandwidth_efficiency: Share of the peak bandwidth that is reached.
        block_size: Tokens in a KV block, for what a transfer moves.

    Raises:
        ValueError: An efficiency is not above 0 and at most 1, the overhead is negative or not finite, or
            the model caches latents.
    """

    shape: ModelShape
    hardware: Hardware
    overhead: float = 0.0
    flops_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("flops_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0 and at most 1")
        real("overhead", self.overhead, unit="seconds")
        count("block_size", self.block_size)
        if self.shape.latent_dim is not None:
            raise ValueError("the roofline counts keys and values; this model caches latents")

    def __call__(self, plan: Plan) -> float:
        """Return the seconds that the plan takes.

        Raises:
            ValueError: The plan swaps, and the hardware's `link_bandwidth` is unknown.
        """
        num_pairs = num_query_key_pairs(plan.scheduled) + sum(row.context_length for row in plan.padding)
        seconds = self._seconds(plan.num_tokens, plan.num_context_tokens, num_pairs)
        return seconds + self._transfer_seconds(plan) if plan.transfers else seconds

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the seconds of a step of decodes without transfers, for policies that look ahead."""
        return self._seconds(num_tokens, num_context_tokens, num_context_tokens)

    def durations(self, num_tokens: int, num_context_tokens: range) -> list[float]:
        """Return the seconds of consecutive steps of decodes, exactly as their plans cost.

        Args:
            num_tokens: Tokens that each of them computes.
            num_context_tokens: Context tokens of each.
        """
        return [self._seconds(num_tokens, number, number) for number in num_context_tokens]

    def _seconds(self, num_tokens: int, num_context_tokens: int, num_pairs: int) -> float:
        shape = self.shape
        flops = self.hardware.peak_flops * self.flops_efficiency
        bandwidth = self.hardware.bandwidth * self.bandwidth_efficiency
        if not num_tokens:
            return self.overhead
        weights = shape.num_parameters
        linear = max(2 * weights * num_tokens / flops, weights * shape.dtype_bytes / bandwidth)
        key_and_value_dim = shape.head_dim + (shape.value_head_dim or shape.head_dim)
        per_pair = 2 * shape.num_layers * shape.num_heads * key_and_value_dim
        context_bytes = num_context_tokens * shape.kv_bytes_per_token
        return self.overhead + linear + max(per_pair * num_pairs / flops, context_bytes / bandwidth)

    def _transfer_seconds(self, plan: Plan) -> float:
        block_bytes = self.shape.kv_bytes_per_token * self.block_size
        num_copied = plan.num_transfers("copy")
        num_swapped = len(plan.transfers) - num_copied
        # A copy reads and writes the same memory.
        seconds = 2 * num_copied * block_bytes / (self.hardware.bandwidth * self.bandwidth_efficiency)
        if num_swapped:
            if self.hardware.link_bandwidth is None:
                raise ValueError(
                    f"the plan swaps {num_swapped} blocks, and the link_bandwidth of "
                    f"{self.hardware.name!r} is unknown; give it"
                )
            seconds += num_swapped * block_bytes / self.hardware.link_bandwidth
        return seconds
