"""Offsets beyond 2**31 elements in both kernels: tensors that are mostly holes, in the interpreter."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import Case, make, oracle, plan_of, run

from cbresearch.kernels import paged_attention, plan_work, write_kv

# Beyond what 32 bits hold, by 2 places of the axis.
FAR = 2**31 + 2**10
CASE = Case([40, 33], [1, 20], block_size=16, num_kv_heads=3, group=2, head_dim=16, dtype=torch.float16)


def spread(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Copy a tensor into one in which the last place of an axis lies over 2**31 elements behind the first.

    The memory between is reserved and never touched, so that it is not there.
    """
    if tensor.shape[axis] == 1:
        pytest.skip("an axis of one place has no offset")
    stride = -(-FAR // (tensor.shape[axis] - 1))
    strides = [*tensor.stride()]
    strides[axis] = -(-stride // 16) * 16
    size = 1 + sum((length - 1) * each for length, each in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("split_keys", [None, 16])
@pytest.mark.parametrize("axis", [0, 1])
def test_queries_and_results_may_lie_far_apart(axis, split_keys):
    case = replace(CASE, split_keys=split_keys)
    q, *rest = make(case).tensors
    expected = run(case)
    out = spread(torch.zeros_like(q), axis)
    assert paged_attention(spread(q, axis), *rest, plan=plan_of(case), out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("block_size", [3, 64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_blocks_slots_and_heads_of_a_pool_may_lie_far_apart(axis, block_size):
    case = replace(CASE, lengths=[90, 33], block_size=block_size)
    batch = make(case)
    q, k_cache, v_cache, *rest = batch.tensors
    expected = run(case, batch)
    for caches in ((spread(k_cache, axis), v_cache), (k_cache, spread(v_cache, axis))):
        assert torch.equal(paged_attention(q, *caches, *rest, plan=plan_of(case)), expected)


def test_rows_of_block_tables_may_lie_far_apart():
    batch = make(CASE)
    q, k_cache, v_cache, tables, *rest = batch.tensors
    result = paged_attention(q, k_cache, v_cache, spread(tables, 0), *rest, plan=plan_of(CASE))
    assert torch.equal(result, run(CASE, batch))
    assert (result.double() - oracle(CASE, batch)).abs().max() < 1e-2


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_write_kv_reaches_slots_that_lie_far_apart(axis):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 3, 16, generator=generator).half() for _ in "kv")
    slots = torch.tensor([0, 7, 11, 3, -1])
    expected = [torch.zeros(3, 4, 3, 16, dtype=torch.float16) for _ in "kv"]
    caches = [spread(cache, axis) for cache in expected]
    write_kv(k, v, *expected, slots)
    write_kv(spread(k, min(axis, 1)), v, *caches, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("name", ["seq_lens", "cu_seqlens_q"])
def test_plan_work_rejects_numbers_that_the_kernels_cannot_count_to(name):
    lengths = {"seq_lens": [5], "cu_seqlens_q": [0, 1], name: [0, 2**31 + 1][-2 if name[0] == "c" else -1 :]}
    with pytest.raises(ValueError, match=f"^{name} holds 2147483649"):
        plan_work(**lengths, num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
