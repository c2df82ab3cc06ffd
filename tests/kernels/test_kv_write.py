"""The kernel that writes keys and values into their slots, in the interpreter, against plain indexing."""

import pytest
import torch
from kernel_cases import POOLS, Case, make_pool

from cbresearch.kernels import write_kv

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """Compare the elements as integers, in which NaN equals itself."""
    assert one.dtype == other.dtype
    assert torch.equal(*(each.contiguous().view(BITS[one.dtype]) for each in (one, other)))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_writes_a_token_into_its_slot_and_nowhere_else(pool, dtype, block_size):
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
    write_kv(torch.cat((k, v), 2)[..., :20], v, *caches, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert_same_bits(cache, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_write_kv_keeps_every_bit_pattern(dtype):
    new = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 8, 512)
    caches = [torch.empty(1, len(new), 8, 512, dtype=dtype) for _ in "kv"]
    write_kv(new, new, *caches, torch.arange(len(new)))
    for cache in caches:
        assert_same_bits(cache[0], new)


def test_write_kv_takes_no_tokens():
    cache = torch.zeros(2, 4, 1, 16)
    nothing = torch.empty(0, 1, 16)
    write_kv(nothing, nothing, cache, cache, torch.empty(0, dtype=torch.int64))
    assert not cache.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.ones(2, 1, 16)}, r"^k must be \[3, num_kv_heads, head_dim\]"),
        ({"k": torch.ones(3, 1, 16).int()}, "^k is torch.int32, and must be float32 or float16 or bfloat16"),
        ({"v": torch.ones(3, 1, 32)[..., ::2]}, r"^v must be \[3, 1, 16\] with a last stride of 1"),
        ({"v": torch.ones(3, 1, 16).half()}, "^v is torch.float16, and must be float32"),
        ({"k_cache": torch.ones(2, 4, 16)}, r"^k_cache must be \[num_blocks, block_size, 1, 16\]"),
        ({"k_cache": torch.ones(2, 4, 1, 16).half()}, "^k_cache is torch.float16, and must be float32"),
        ({"v_cache": torch.ones(2, 3, 1, 16)}, r"^v_cache must be \[2, 4, 1, 16\]"),
        ({"slot_mapping": torch.ones(3)}, "^slot_mapping is torch.float32, and must be int64 or int32"),
        ({"slot_mapping": torch.ones(3, dtype=torch.int64, device="meta")}, "^slot_mapping is on meta"),
    ],
)
def test_write_kv_names_a_bad_argument_and_writes_nothing(changes, message):
    arguments = {
        "k": torch.ones(3, 1, 16),
        "v": torch.ones(3, 1, 16),
        "k_cache": torch.zeros(2, 4, 1, 16),
        "v_cache": torch.zeros(2, 4, 1, 16),
        "slot_mapping": torch.arange(3),
        **changes,
    }
    cache = arguments["v_cache"].clone()
    with pytest.raises(ValueError, match=message):
        write_kv(**arguments)
    assert torch.equal(cache, arguments["v_cache"])
