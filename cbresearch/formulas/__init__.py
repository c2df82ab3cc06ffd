"""Closed forms for what static and continuous batching should give; `metrics` measures the same quantities.

`batching` counts steps, slots and seconds, `memory` bytes, `preemption` what making room costs, `roofline`
arithmetic, `sharing` what prompts have in common. Forms without a paper are derived where they stand. Every
function raises ValueError, naming the argument and its value, if the value is out of range or the sample is
empty.
"""

from cbresearch.formulas.batching import (
    continuous_seconds,
    continuous_steps,
    expected_max,
    expected_max_exponential,
    expected_max_geometric,
    expected_max_uniform,
    finite_speed_up,
    graham_bounds,
    mean_occupancy_static,
    occupancy_by_littles_law,
    speed_up,
    speed_up_with_step_cost,
    static_seconds,
    static_steps,
    static_utilization,
    throughput_decode,
)
from cbresearch.formulas.checks import Lengths
from cbresearch.formulas.memory import (
    MemoryShares,
    contiguous_memory_shares,
    fragmentation,
    kv_bytes_per_request,
    kv_bytes_per_token,
    max_window_blocks,
    mean_reserved_tokens,
    num_kv_blocks,
    num_requests_that_fit,
    paged_fragmentation,
    time_mean_held_tokens,
    weight_bytes,
)
from cbresearch.formulas.preemption import (
    overshoot_tokens,
    recompute_seconds,
    spread_held_tokens,
    swap_crossover_block_size,
    swap_crossover_tokens,
    swap_seconds,
)
from cbresearch.formulas.roofline import (
    flop_utilization,
    flops_per_token,
)
from cbresearch.formulas.sharing import (
    popularity_hits,
    prefix_hit_rate,
    prefix_hit_tokens,
    reuse_depths,
    sample_blocks,
    sample_copies,
    sample_prefill_tokens,
)

__all__ = [
    "Lengths",
    "MemoryShares",
    "contiguous_memory_shares",
    "continuous_seconds",
    "continuous_steps",
    "expected_max",
    "expected_max_exponential",
    "expected_max_geometric",
    "expected_max_uniform",
    "finite_speed_up",
    "flop_utilization",
    "flops_per_token",
    "fragmentation",
    "graham_bounds",
    "kv_bytes_per_request",
    "kv_bytes_per_token",
    "max_window_blocks",
    "mean_occupancy_static",
    "mean_reserved_tokens",
    "num_kv_blocks",
    "num_requests_that_fit",
    "occupancy_by_littles_law",
    "overshoot_tokens",
    "paged_fragmentation",
    "popularity_hits",
    "prefix_hit_rate",
    "prefix_hit_tokens",
    "recompute_seconds",
    "reuse_depths",
    "sample_blocks",
    "sample_copies",
    "sample_prefill_tokens",
    "speed_up",
    "speed_up_with_step_cost",
    "spread_held_tokens",
    "static_seconds",
    "static_steps",
    "static_utilization",
    "swap_crossover_block_size",
    "swap_crossover_tokens",
    "swap_seconds",
    "throughput_decode",
    "time_mean_held_tokens",
    "weight_bytes",
]
