"""What the kernels load and store, counted in Triton's interpreter, and the addresses that they compute."""

import math
import mmap

import pytest
import torch
from kernel_cases import Case, make, plan_of
from kernel_traffic import count_bytes, least_bytes
from triton.runtime.interpreter import GridExecutor

from cbresearch.kernels import paged_attention, write_kv


@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 17, 48])
@pytest.mark.parametrize("split_keys", [None, 64])
def test_a_decode_loads_every_key_and_value_once_at_any_group_size(group, split_keys):
    case = Case([40, 1, 100], [1, 1, 1], num_kv_heads=1, group=group, split_keys=split_keys)
    ratios = count_bytes(case) / least_bytes(case)
    assert ratios["k"] == ratios["v"] == 1
    assert ratios["q"] == (1 if split_keys is None else pytest.approx(4 / 3))
    assert ratios["out"] == 1


@pytest.mark.parametrize("window", [1, 16, 33])
def test_a_windowed_decode_loads_the_window_alone(window):
    case = Case([40, 1, 100], [1, 1, 1], num_kv_heads=2, group=4, options={"window": window})
    ratios = count_bytes(case) / least_bytes(case)
    assert ratios["k"] == ratios["v"] == ratios["q"] == ratios["out"] == 1


def test_prefill_chunks_load_at_most_twice_the_least():
    case = Case([40, 33, 100], [40, 1, 17], block_size=16, num_kv_heads=2, group=4, head_dim=64)
    assert [work.is_wide for work in plan_of(case).works] == [False, True]
    loaded, least = count_bytes(case), least_bytes(case)
    ratios = loaded / least
    # The chunk of 40 queries takes two tiles of 32, of which the first needs 32 keys.
    assert ratios["k"] == ratios["v"] == pytest.approx((32 + 40 + 33 + 100) / 173)
    assert ratios["q"] == ratios["out"] == 1
    assert sum(loaded[name] for name in "kv") / sum(least[name] for name in "kv") <= 2


def test_a_prefill_reads_nothing_behind_its_sequence():
    # The interior is computed without masks, so a wrong bound would read on behind the sequence.
    for length in (64, 104, 127, 128, 129):
        case = Case([length], [40], block_size=256, group=1, head_dim=16)
        assert count_bytes(case)["k"] == length * 16 * 4


def far_apart(tensor: torch.Tensor, axis: int, distance: int) -> torch.Tensor:
    """Return a copy with a stride of `distance` along `axis`, which takes memory only where it is written."""
    inner = torch.empty(tensor.shape).select(axis, 0).contiguous().stride()
    # Python names this flag since 3.12.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    size = tensor.shape[axis] * distance * tensor.element_size()
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    flat = torch.frombuffer(region, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, (*inner[:axis], distance, *inner[axis:])).copy_(tensor)


@pytest.fixture
def no_copy_back(monkeypatch):
    # The interpreter copies every storage onto itself, which would touch the whole address range.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_and_heads_beyond_two_billion_elements_are_found(queries, axis, block_size, no_copy_back):
    # Blocks of 64 hold whole tiles, whose block is looked up once; in blocks of 16 each key looks up its own.
    case = Case([150], [queries], block_size, num_kv_heads=3, group=1, head_dim=16)
    q, k_cache, v_cache, tables, *rest = make(case).tensors
    far = [far_apart(cache, axis, 2**30) for cache in (k_cache, v_cache)]
    farthest = tables[0, : -(-150 // block_size)].max() if axis == 0 else 2
    assert farthest * far[0].stride(axis) >= 2**31
    assert torch.equal(
        paged_attention(q, *far, tables, *rest), paged_attention(q, k_cache, v_cache, tables, *rest)
    )


def test_tokens_and_table_rows_beyond_two_billion_elements_are_found(no_copy_back):
    case = Case([40, 33, 20], [1, 1, 20], group=1, head_dim=16, split_keys=16)
    batch = make(case)
    q, k_cache, v_cache, tables, *rest = batch.tensors
    # 22 tokens: the last lies 2**31 elements from the first.
    out = far_apart(torch.full_like(q, math.nan), 0, 2**27)
    far = (far_apart(q, 0, 2**27), k_cache, v_cache, far_apart(tables, 0, 2**31 - 16))
    paged_attention(*far, *rest, out=out, plan=plan_of(case))
    assert torch.equal(out, paged_attention(*batch.tensors, plan=plan_of(case)))


def test_write_kv_reaches_blocks_beyond_two_billion_elements(no_copy_back):
    k_cache, v_cache = (far_apart(torch.full((4, 16, 2, 16), math.nan), 0, 2**30) for _ in "kv")
    k, v = torch.randn(2, 20, 2, 16).unbind(0)
    slots = torch.cat((torch.arange(48, 64), torch.arange(32, 36)))
    write_kv(k, v, k_cache, v_cache, slots)
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(torch.cat((cache[3], cache[2, :4])), new)


def test_the_count_sees_every_access():
    case = Case([5], [1], group=1, head_dim=16)
    counted = count_bytes(case)
    assert counted["k"] == 5 * 16 * 4 and counted["q"] == counted["out"] == 16 * 4
    # One entry for each key; of the item's 8 fields, those of partial results and sinks are not needed.
    assert counted["table"] == 5 * 4 and counted["items"] == 7 * 4
