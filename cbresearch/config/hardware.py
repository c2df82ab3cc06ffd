"""The numbers of a machine."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hold the numbers of a machine that step times depend on.

    Attributes:
        name: What it is called.
        peak_flops: FLOP/s of its matrix products in the model's data type.
        bandwidth: Bytes/s of its memory.
        memory_bytes: Bytes of its memory, or None if unknown.
        link_bandwidth: Bytes/s to and from the host's memory, one way; None where there is no other memory.

    Raises:
        ValueError: A number is not positive.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int | None = None
    link_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("peak_flops", "bandwidth", "memory_bytes", "link_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"Hardware: {name} is {value!r}; it must be a positive number")

    @classmethod
    def measure(cls, clock: Callable[[], float] = perf_counter, num_rounds: int = 5) -> "Hardware":
        """Measure this machine's float32 matrix products and memory by numpy, the best of some rounds.

        Args:
            clock: Seconds.
            num_rounds: How often each is tried.
        """
        import numpy as np

        size = 1024
        left = np.ones((size, size), dtype=np.float32)
        product = np.empty_like(left)
        # Larger than any cache, and read and written at once.
        source = np.ones(2**25, dtype=np.float32)
        target = np.empty_like(source)
        seconds: dict[str, list[float]] = {"product": [], "copy": []}
        for _ in range(num_rounds):
            began = clock()
            np.matmul(left, left, out=product)
            multiplied = clock()
            np.copyto(target, source)
            copied = clock()
            seconds["product"].append(multiplied - began)
            seconds["copy"].append(copied - multiplied)
        return cls(
            "this machine",
            peak_flops=2 * size**3 / min(seconds["product"]),
            bandwidth=2 * source.nbytes / min(seconds["copy"]),
        )
