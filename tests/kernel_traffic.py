"""Count the bytes that the attention kernel loads and stores, tensor by tensor, in Triton's interpreter.

TRITON_INTERPRET=1 python tests/kernel_traffic.py      a table, as ratios to the least possible
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
from kernel_cases import Case, make, plan_of
from triton.runtime.interpreter import interpreter_builder

from cbresearch.kernels import paged_attention


@contextmanager
def counting(tensors: dict[str, torch.Tensor]) -> Iterator[pd.Series]:
    """Count the bytes of each access between a tensor's first and last element, by the tensor's name."""
    counts = pd.Series(0, index=list(tensors))
    ranges = {}
    for name, tensor in tensors.items():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        ranges[name] = (begin, begin + (last + 1) * tensor.element_size(), tensor.element_size())

    def count(pointers, mask) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        for name, (begin, end, itemsize) in ranges.items():
            inside = (addresses >= np.uint64(begin)) & (addresses < np.uint64(end))
            counts[name] += int(inside.sum()) * itemsize

    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def counted_load(pointers, mask, *others):
        count(pointers, mask)
        return load(pointers, mask, *others)

    def counted_store(pointers, value, mask, *others):
        count(pointers, mask)
        return store(pointers, value, mask, *others)

    # On the one builder that all kernels share; loads and stores without a mask end in these two as well.
    interpreter_builder.create_masked_load = counted_load
    interpreter_builder.create_masked_store = counted_store
    try:
        yield counts
    finally:
        del interpreter_builder.create_masked_load, interpreter_builder.create_masked_store


def count_bytes(case: Case) -> pd.Series:
    """Run a case and count, by tensor."""
    batch = make(case)
    q, k_cache, v_cache, tables, *_ = batch.tensors
    out = torch.full_like(q, math.nan)
    plan = plan_of(case)
    named = {"q": q, "k": k_cache, "v": v_cache, "out": out, "table": tables, "items": plan.works[0].items}
    with counting(named) as counts:
        paged_attention(*batch.tensors, **batch.options, plan=plan, out=out)
    return counts


def least_bytes(case: Case) -> pd.Series:
    """Return the least possible: once each key and value that some query sees, each query and each result."""
    window = case.options.get("window") or math.inf
    keys = sum(
        min(length, queries + window - 1) if queries else 0
        for length, queries in zip(case.lengths, case.queries, strict=True)
    )
    itemsize = case.dtype.itemsize
    per_head = case.head_dim * itemsize
    kv = int(keys) * case.num_kv_heads * case.head_dim * itemsize
    rows = sum(case.queries) * case.num_heads * per_head
    return pd.Series({"q": rows, "k": kv, "v": kv, "out": rows})


def table() -> pd.DataFrame:
    """Return the ratios of some decodes and of a prefill to the least possible."""
    rows = {}
    for group in (1, 4, 7, 8, 48):
        rows[f"decode of 100, 33, 1; group {group}"] = Case(
            [100, 33, 1], [1, 1, 1], num_kv_heads=2, group=group
        )
    chunks = Case([40, 33, 100], [40, 1, 17], num_kv_heads=2, group=4)
    rows["chunks of 40, 1, 17 over 40, 33, 100; group 4"] = chunks
    ratios = {}
    for name, case in rows.items():
        counted, least = count_bytes(case), least_bytes(case)
        both = ["k", "v"]
        ratios[name] = {
            **(counted / least)[["k", "v", "q", "out"]].round(2),
            "K and V": round(counted[both].sum() / least[both].sum(), 2),
        }
    return pd.DataFrame(ratios).T


if __name__ == "__main__":
    print("Bytes that the kernel loads and stores, over the least possible:")
    print(table().to_string(float_format="{:.2f}".format))
