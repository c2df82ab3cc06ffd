"""The kernels that move keys and values, in Triton's interpreter, against plain indexing."""

import math

import pytest
import torch
from kernel_cases import BITS, FLOAT8, POOLS, Case, make_pool
from torch import Tensor

from cbresearch.kernels import kv_cache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FINITE = {dtype: torch.finfo(dtype).max for dtype in FLOAT8}


def bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers, in which NaN equals itself."""
    return tensor.contiguous().view(BITS[tensor.element_size()])


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(bits(one), bits(other))


def every_pattern(dtype: torch.dtype, heads: int, head_dim: int) -> Tensor:
    """Return `[num_tokens, heads, head_dim]` with every bit pattern of a 16-bit format."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, heads, head_dim)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_token_is_written_into_its_slot_and_nowhere_else(pool, dtype, block_size):
    case = Case([], [], block_size, num_kv_heads=3, head_dim=20, dtype=dtype, pool=pool)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 3, 20, generator=generator).to(dtype) for _ in "kv")
    slots = torch.randperm(12 * block_size, generator=generator)[:9]
    slots[4] = -1
    caches = [make_pool(case, 12) for _ in "kv"]
    expected = [make_pool(case, 12) for _ in "kv"]
    for new, cache in zip((k, v), expected, strict=True):
        kept = slots >= 0
        cache[slots[kept] // block_size, slots[kept] % block_size] = new[kept]
    # A token's keys may be a part of a wider row, as a fused projection gives them.
    kv_cache.write(torch.cat((k, v), 2)[..., :20], v, *caches, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert_same_bits(cache, wanted)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_every_number_is_quantised_as_torch_does(dtype, source):
    new = every_pattern(source, 8, 512)
    cache = torch.empty(1, len(new), 8, 512, dtype=dtype)
    other = torch.empty_like(cache)
    kv_cache.write(new, new, cache, other, torch.arange(len(new)))
    wanted = new.float().clamp(-FINITE[dtype], FINITE[dtype]).to(dtype)
    # NaN has many patterns; what counts is that it stays NaN.
    nan = new.float().isnan()
    for written in (cache[0], other[0]):
        assert written.float()[nan].isnan().all()
        assert torch.equal(written.view(torch.uint8)[~nan], wanted.view(torch.uint8)[~nan])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float8_pattern_is_read_as_torch_does(dtype):
    cache = torch.arange(256).to(torch.uint8).view(dtype).view(1, 16, 1, 16)
    read = kv_cache.gather(cache, torch.tensor([0], dtype=torch.int32), 16)
    torch.testing.assert_close(read, cache[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("num_scales", [1, 3])
def test_scales_divide_on_the_way_in_and_multiply_on_the_way_out(dtype, num_scales):
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(5, 3, 16, generator=generator) for _ in "kv")
    k_scale, v_scale = (torch.rand(num_scales, generator=generator) + 0.01 for _ in "kv")
    caches = [torch.full((2, 4, 3, 16), math.nan).to(dtype) for _ in "kv"]
    # The second block first.
    slots = torch.tensor([4, 5, 6, 7, 0])
    kv_cache.write(k, v, *caches, slots, k_scale=k_scale, v_scale=v_scale)
    table = torch.tensor([1, 0], dtype=torch.int32)
    for new, cache, scale in ((k, caches[0], k_scale), (v, caches[1], v_scale)):
        stored = (new / scale.view(-1, 1)).clamp(-FINITE[dtype], FINITE[dtype]).to(dtype).float()
        read = kv_cache.gather(cache, table, 5, scale=scale, dtype=torch.float32)
        assert torch.equal(read, stored * scale.view(-1, 1))


@pytest.mark.parametrize("dtype", (*DTYPES, *FLOAT8))
@pytest.mark.parametrize("pool", POOLS)
def test_blocks_are_copied_bit_by_bit(pool, dtype):
    case = Case([], [], 3, num_kv_heads=3, head_dim=20, dtype=dtype, pool=pool)
    source, target = make_pool(case, 6), make_pool(case, 5, 0.0)
    random = torch.randint(0, 256, (6, 3, 3, 20 * dtype.itemsize), dtype=torch.uint8)
    source.copy_(random.view(dtype))
    before = source.clone()
    pairs = torch.tensor([[5, 0], [2, 4], [0, 1]])
    kv_cache.swap_blocks(source, target, pairs)
    assert_same_bits(source, before)
    assert_same_bits(target[[0, 4, 1]], source[[5, 2, 0]])
    assert (target[[2, 3]].float() == 0).all()
    kv_cache.copy_blocks(source, torch.tensor([[5, 3], [5, 1]]))
    assert_same_bits(source[[3, 1]], before[[5, 5]])
    assert_same_bits(source[[0, 2, 4, 5]], before[[0, 2, 4, 5]])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40])
def test_a_sequence_is_gathered_in_order(pool, length):
    case = Case([], [], 16, num_kv_heads=2, head_dim=80, dtype=torch.bfloat16, pool=pool)
    cache = make_pool(case, 5)
    table = torch.tensor([3, 0, 4], dtype=torch.int32)
    new = torch.randn(48, 2, 80).bfloat16()
    for position in range(length):
        cache[table[position // 16], position % 16] = new[position]
    read = kv_cache.gather(cache, table, length)
    assert read.is_contiguous()
    assert_same_bits(read, new[:length])


def test_nothing_to_move_is_no_error():
    cache = torch.zeros(2, 4, 1, 16)
    nothing = torch.empty(0, 1, 16)
    kv_cache.write(nothing, nothing, cache, cache, torch.empty(0, dtype=torch.int64))
    kv_cache.copy_blocks(cache, torch.empty(0, 2, dtype=torch.int64))
    assert not cache.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(2, 1, 16)}, r"^k must be \[3, 1, 16\]"),
        ({"v": torch.ones(3, 1, 32)[..., ::2]}, "^v must be .* last stride of 1"),
        ({"k": torch.ones(3, 1, 16).half()}, "^k is torch.float16, and the cache torch.float32"),
        ({"k_cache": torch.ones(2, 4, 16)}, "^k_cache must be"),
        ({"v_cache": torch.ones(2, 4, 1, 16).half()}, "^v_cache must have the dtype"),
        ({"slot_mapping": torch.ones(3)}, "^slot_mapping must be"),
        ({"slot_mapping": torch.ones(3, dtype=torch.int64, device="meta")}, "^slot_mapping is on meta"),
        ({"k_scale": torch.ones(1)}, "^k_scale is for a float8 cache"),
        ({"cache_dtype": torch.float8_e5m2, "v_scale": torch.ones(2)}, "^v_scale must be .* 1 or 1 elements"),
    ],
)
def test_a_bad_argument_of_write_is_named(changes, message):
    dtype = changes.get("cache_dtype", torch.float32)
    arguments = {
        "k": torch.ones(3, 1, 16),
        "v": torch.ones(3, 1, 16),
        "k_cache": torch.zeros(2, 4, 1, 16).to(dtype),
        "v_cache": torch.zeros(2, 4, 1, 16).to(dtype),
        "slot_mapping": torch.arange(3),
        **{name: value for name, value in changes.items() if name != "cache_dtype"},
    }
    cache = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match=message):
        kv_cache.write(**arguments)
    assert_same_bits(cache, arguments["k_cache"])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 2]], "^block_pairs names a target block"),
        ([[-1, 1]], "^block_pairs names a source block"),
        ([[0, 1], [1, 1]], "^block_pairs writes one block twice"),
        ([0, 1], r"^block_pairs must be \[num_pairs, 2\]"),
    ],
)
def test_a_bad_pair_of_blocks_is_named(pairs, message):
    pool = torch.zeros(2, 4, 1, 16)
    with pytest.raises(ValueError, match=message):
        kv_cache.swap_blocks(pool, pool.clone(), torch.tensor(pairs))


def test_a_block_that_is_read_and_written_at_once_is_refused():
    with pytest.raises(ValueError, match="block_pairs reads a block that it also writes"):
        kv_cache.copy_blocks(torch.zeros(3, 4, 1, 16), torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 9}, "^length is 9, and block_table covers 0 to 8"),
        ({"block_table": torch.tensor([0, 1])}, "^block_table must be contiguous int32"),
        ({"dtype": torch.float16}, "^dtype is torch.float16, and the cache torch.float32"),
        ({"scale": torch.ones(1)}, "^scale is for a float8 cache"),
    ],
)
def test_a_bad_argument_of_gather_is_named(arguments, message):
    table = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        kv_cache.gather(torch.zeros(2, 4, 1, 16), **{"block_table": table, "length": 3, **arguments})
