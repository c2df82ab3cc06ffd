"""Ragged paged batches for the kernel tests: made from a seed, and poisoned wherever nothing was written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbresearch.kernels import reference
from cbresearch.kernels.layout import lay_out
from cbresearch.kernels.paged_attention import paged_attention

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

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
        dtype: Of the queries.
        cache_dtype: Of the cache, if it is another.
        per_head: Whether a float8 cache has a scale per head.
        pool: A name in `POOLS`.
        split_keys: Keys of one split; None leaves the sequences whole.
        query_scale: Standard deviation of the queries.
        options: `window`, `softcap`, and the names of per-head options that are on: `alibi`, `sinks`.
        seed: Of all random numbers.
    """

    lengths: Sequence[int]
    queries: Sequence[int]
    block_size: int = 16
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    per_head: bool = False
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
    pool = torch.full([shape[axis] for axis in order], value).to(case.cache_dtype or case.dtype)
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
    scales = {}
    if case.cache_dtype in FLOAT8:
        size = case.num_kv_heads if case.per_head else 1
        scales = {name: torch.rand(size, generator=generator) + 0.5 for name in ("k_scale", "v_scale")}
    first = 0
    for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        positions = torch.arange(length)
        blocks = tables[row].long()[positions // case.block_size]
        for cache in caches:
            # Float8 tensors take no index assignment, their bytes do.
            new = normal(length, case.num_kv_heads, case.head_dim).to(cache.dtype)
            if cache.dtype in FLOAT8:
                cache, new = cache.view(torch.uint8), new.view(torch.uint8)
            cache[blocks, positions % case.block_size] = new
    q = (normal(sum(case.queries), case.num_heads, case.head_dim) * case.query_scale).to(case.dtype)
    options = dict(case.options)
    if "alibi" in options:
        options["alibi"] = 2.0 ** (-8 * torch.arange(1, case.num_heads + 1) / case.num_heads)
    if "sinks" in options:
        options["sinks"] = normal(case.num_heads)
    cu = torch.tensor(np.cumsum([0, *case.queries]), dtype=torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Batch((q, *caches, tables, lengths, cu), {**options, **scales})


def layout_of(case: Case, **others: Any):
    """Lay out a case."""
    return lay_out(
        case.lengths,
        np.cumsum([0, *case.queries]),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        cache_dtype=case.cache_dtype,
        window=case.options.get("window"),
        split_keys=case.split_keys or 2**30,
        **others,
    )


def run(case: Case, batch: Batch | None = None) -> Tensor:
    """Run the kernel on a case into an output full of NaN."""
    batch = batch or make(case)
    out = torch.full_like(batch.tensors[0], math.nan)
    paged_attention(*batch.tensors, **batch.options, layout=layout_of(case), out=out)
    return out


def oracle(case: Case, batch: Batch | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute a case in plain PyTorch."""
    batch = batch or make(case)
    return reference.paged_attention(*batch.tensors, **batch.options, dtype=dtype)


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
    kind = rng.choice(["float32", "float16", "e4m3", "e5m2"], p=[0.6, 0.15, 0.15, 0.1])
    dtype = torch.float16 if kind == "float16" else torch.float32
    cache_dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(kind)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["window"] = int(rng.choice([1, 4, 16, 33]))
    if rng.random() < 0.25:
        options["softcap"] = float(rng.choice([5.0, 50.0]))
    for name in ("alibi", "sinks"):
        if rng.random() < 0.25:
            options[name] = True
    return Case(
        lengths,
        queries,
        block_size,
        num_kv_heads,
        group,
        head_dim=int(rng.choice([16, 64, 80, 96, 112, 128])),
        dtype=dtype,
        cache_dtype=cache_dtype,
        per_head=bool(rng.random() < 0.5),
        pool=str(rng.choice(list(POOLS))),
        split_keys=int(rng.choice([16, 32, 64])) if rng.random() < 0.4 else None,
        query_scale=float(rng.choice([1.0, 1.0, 8.0])),
        options=options,
        seed=seed,
    )
