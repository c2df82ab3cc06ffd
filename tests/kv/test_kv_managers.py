"""Both KV managers are what the scheduler asks for; that `kv.build` returns either proves it to mypy."""

from inspect import signature

import pytest

from cbresearch import kv
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.kv import BlockManager, ContiguousKV, KVManager
from cbresearch.request import Request, RequestState

MEMBERS = [name for name in vars(KVManager) if not name.startswith("_")]
CONFIGS = {
    "paged": CacheConfig(8, 4),
    "everything that pages can do": CacheConfig(8, 4, True, 8, 12, cache_on_schedule=True),
    "contiguous": CacheConfig(8, 4, reservation="oracle"),
}


@pytest.mark.parametrize("manager", [BlockManager, ContiguousKV])
def test_kv_managers_have_every_member_of_the_protocol_with_its_parameters(manager):
    assert len(MEMBERS) > 20
    built = manager(CONFIGS["contiguous" if manager is ContiguousKV else "paged"], 64)
    for name in MEMBERS:
        asked, given = getattr(KVManager, name), getattr(built, name)
        if callable(asked):
            assert list(signature(given).parameters) == list(signature(asked).parameters)[1:], name


@pytest.mark.parametrize("name", CONFIGS)
def test_kv_managers_serve_a_request_by_the_protocol_alone(name):
    config = CONFIGS[name]
    pool: KVManager = kv.build(config, SchedulerConfig(), recomputes_last=False)
    request = Request("a", tuple(range(9)), 4)
    assert pool.max_blocks_needed(request) <= pool.num_blocks == 8
    state = RequestState(request, 0)
    assert pool.num_cached_tokens(state) == 0
    assert pool.admit(state, None)
    assert pool.allocate("a", 9) is not None
    added = pool.table("a")
    assert pool.table("a") and pool.allocate("a", 9) == ()
    state.num_computed_tokens = 9
    pool.update(state, 0)
    state.num_tokens = 10
    assert pool.capacities(["a"])[0] >= 12
    assert pool.num_held_blocks == len(added)
    assert pool.num_private_blocks("a") == len(added) + pool.num_unusable_blocks
    is_swapped = pool.swap_out(state)
    assert is_swapped == (config.num_host_blocks > 0)
    if is_swapped:
        assert pool.num_held_host_blocks == len(pool.host_table("a")) == 3
        assert pool.table("a") == ()
        assert pool.swap_in(state)
        # The two full blocks are still cached on the device.
        assert [transfer.kind for transfer in pool.take_transfers()] == ["swap_out"] * 3 + ["swap_in"]
    assert pool.num_free_blocks + pool.num_held_blocks + pool.num_unusable_blocks == pool.num_blocks
    pool.check()
    pool.free("a")
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        pool.free("a")
    pool.check()
    assert pool.num_free_blocks == 8
    assert set(pool.take_events().freed) >= set(added)
    assert not any(pool.take_events())
