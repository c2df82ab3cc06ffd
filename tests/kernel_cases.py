"""Ragged paged batches for the kernel tests: made from a seed, and poisoned wherever nothing was written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbresearch.kernels import WorkPlan, paged_attention, plan_work, reference_attention

# How a pool may lie in memory: the order of the axes [num_blocks, block_size, num_kv_heads, head_dim].
POOLS = {"token major": (0, 1, 2, 3), "head major": (0, 2, 1, 3), "heads outermost": (2, 0, 1, 3)}


@dataclass(frozen=True)
class Case:
    """One ragged batch and the options of one call.

    Attributes:
        lengths: Tokens of each sequence.
        queries: Of which the last are queries.
        block_size: Tokens of a block.
        num_kv_heads: KV heads.
        group: Query heads of each.
        head_dim: Elements of a head.
        dtype: Of queries, keys and values.
        pool: A name in `POOLS`.
        split_keys: Keys of one split; None leaves the sequences whole.
        query_scale: Standard deviation of the queries.
        options: `window`, `softcap`, and `sinks` if they are on.
        seed: Of all random numbers.
    """

    lengths: Sequence[int]
    queries: Sequence[int]
    block_size: int = 16
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    pool: str = "token major"
    split_keys: int | None = None
    query_scale: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads


@dataclass(frozen=True)
class Batch:
    """The tensors of a case: positional arguments of `paged_attention`, and those by name."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]


def make_pool(case: Case, num_blocks: int, value: float = math.nan) -> Tensor:
    """Return a pool full of one value, laid out in memory as the case says."""
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    order = POOLS[case.pool]
    pool = torch.full([shape[axis] for axis in order], value).to(case.dtype)
    return pool.permute([order.index(axis) for axis in range(4)])


def make(case: Case) -> Batch:
    """Draw the tensors of a case; blocks are permuted, and whatever no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    counts = [-(-length // case.block_size) for length in case.lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=generator)
    # An entry that no length covers points far outside the pool.
    tables = torch.full((len(counts), max([*counts, 1]) + 1), 2**30, dtype=torch.int32)
    caches = [make_pool(case, num_blocks) for _ in "kv"]
    first = 0
    for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        positions = torch.arange(length)
        blocks = tables[row].long()[positions // case.block_size]
        for cache in caches:
            new = normal(length, case.num_kv_heads, case.head_dim)
            cache[blocks, positions % case.block_size] = new.to(case.dtype)
    q = (normal(sum(case.queries), case.num_heads, case.head_dim) * case.query_scale).to(case.dtype)
    options = dict(case.options)
    if "sinks" in options:
        options["sinks"] = normal(case.num_heads)
    cu = torch.tensor(np.cumsum([0, *case.queries]), dtype=torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Batch((q, *caches, tables, lengths, cu), options)


def plan_of(case: Case) -> WorkPlan:
    """Plan a case."""
    return plan_work(
        case.lengths,
        np.cumsum([0, *case.queries]),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        window=case.options.get("window"),
        split_keys=case.split_keys or 2**30,
    )


def run(case: Case, batch: Batch | None = None) -> Tensor:
    """Run the kernel on a case into an output full of NaN."""
    batch = batch or make(case)
    out = torch.full_like(batch.tensors[0], math.nan)
    paged_attention(*batch.tensors, **batch.options, plan=plan_of(case), out=out)
    return out


def oracle(case: Case, batch: Batch | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute a case in plain PyTorch."""
    batch = batch or make(case)
    return reference_attention(*batch.tensors, **batch.options, dtype=dtype)


def random_case(seed: int) -> Case:
    """Draw a case over all options."""
    rng = np.random.default_rng(seed)
    # Big tiles and blocks make a case slow, so one size at a time is large.
    block_size = int(rng.choice([1, 3, 8, 16, 48, 256], p=[0.15, 0.2, 0.2, 0.3, 0.1, 0.05]))
    group = int(rng.choice([1, 3, 5, 7, 17, 48]))
    num_kv_heads = 1 if group > 7 else int(rng.integers(1, 3))
    edges = [0, 1, block_size - 1, block_size, block_size + 1]
    num_seqs = int(rng.integers(1, 4))
    lengths = [
        int(rng.choice(edges)) if rng.random() < 0.5 else int(rng.integers(1, 80)) for _ in range(num_seqs)
    ]
    most = max(1, 60 // group)
    queries = [1 if rng.random() < 0.5 else int(rng.integers(0, min(length, most) + 1)) for length in lengths]
    if not sum(queries):
        queries[0] = 1
    dtype = torch.float16 if rng.random() < 0.25 else torch.float32
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["window"] = int(rng.choice([1, 4, 16, 33]))
    if rng.random() < 0.25:
        options["softcap"] = float(rng.choice([5.0, 50.0]))
    if rng.random() < 0.25:
        options["sinks"] = True
    return Case(
        lengths,
        queries,
        block_size,
        num_kv_heads,
        group,
        head_dim=int(rng.choice([16, 64, 80, 96, 112, 128])),
        dtype=dtype,
        pool=str(rng.choice(list(POOLS))),
        split_keys=int(rng.choice([16, 32, 64])) if rng.random() < 0.4 else None,
        query_scale=float(rng.choice([1.0, 1.0, 8.0])),
        options=options,
        seed=seed,
    )
