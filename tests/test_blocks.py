"""The pool's bookkeeping against a plain model of it, and the proofs of `check()` against broken pools."""

import pytest
from cbresearch.blocks import BlockManager
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbresearch.config import CacheConfig

IDS = ("a", "b", "c", "d")
identities = st.sampled_from(IDS)


def num_blocks_by_counting(num_tokens: int, block_size: int) -> int:
    """Count the places where a block begins."""
    return len(range(0, num_tokens, block_size))


class PoolAgainstModel(RuleBasedStateMachine):
    """Drive a pool at random beside a dictionary that says who holds what."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from((1, 3, 16)))
    def create(self, num_blocks, block_size):
        self.pool = BlockManager(CacheConfig(num_blocks, block_size))
        self.everything = set(range(num_blocks))
        self.block_size = block_size
        self.held: dict[str, tuple[int, ...]] = {}

    @property
    def free(self):
        return self.everything.difference(*self.held.values())

    @rule(request_id=identities, num_tokens=st.integers(0, 60))
    def allocate(self, request_id, num_tokens):
        before = self.held.get(request_id, ())
        missing = max(0, num_blocks_by_counting(num_tokens, self.block_size) - len(before))
        fits = missing <= len(self.free)
        assert self.pool.can_allocate(request_id, num_tokens) == fits
        added = self.pool.allocate(request_id, num_tokens)
        if not fits:
            assert added is None
            return
        assert added is not None
        assert len(added) == len(set(added)) == missing
        assert set(added) <= self.free
        if before or added:
            self.held[request_id] = before + added

    @rule(request_id=identities)
    def grow_by_a_block(self, request_id):
        self.allocate(request_id, (len(self.held.get(request_id, ())) + 1) * self.block_size)

    @rule(request_id=identities)
    def free_twice(self, request_id):
        if self.held.pop(request_id, ()):
            self.pool.free(request_id)
        with pytest.raises(ValueError, match=f"{request_id!r} holds no blocks"):
            self.pool.free(request_id)

    @invariant()
    def pool_equals_model(self):
        self.pool.check()
        assert {request_id: self.pool.table(request_id) for request_id in IDS} == {
            request_id: self.held.get(request_id, ()) for request_id in IDS
        }
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.num_held_blocks == len(self.everything) - len(self.free)
        assert self.pool.num_blocks == len(self.everything)

    def teardown(self):
        for request_id in self.held:
            self.pool.free(request_id)
        self.pool.check()
        assert self.pool.num_free_blocks == self.pool.num_blocks


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_tokens_need_a_block_for_every_block_size_begun(block_size):
    pool = BlockManager(CacheConfig(1, block_size))
    for num_tokens in range(4 * block_size + 2):
        assert pool.blocks_for(num_tokens) == num_blocks_by_counting(num_tokens, block_size)


def test_an_allocation_that_fails_at_its_last_block_takes_none():
    pool = BlockManager(CacheConfig(num_blocks=3, block_size=2))
    (first,) = pool.allocate("a", 2)
    assert pool.allocate("a", 8) is None
    assert pool.allocate("b", 5) is None
    assert pool.table("a") == (first,)
    assert pool.table("b") == ()
    assert pool.num_free_blocks == 2
    with pytest.raises(ValueError, match="'b' holds no blocks"):
        pool.free("b")
    pool.check()


def test_blocks_once_freed_serve_again_up_to_the_last_one():
    pool = BlockManager(CacheConfig(num_blocks=5, block_size=3))
    for _ in range(3):
        assert set(pool.allocate("a", 15)) == set(range(5))
        assert pool.allocate("b", 1) is None
        pool.free("a")
    assert pool.num_free_blocks == 5


def test_a_table_keeps_the_order_in_which_its_blocks_were_added():
    pool = BlockManager(CacheConfig(num_blocks=6, block_size=1))
    parts = [pool.allocate("a", 2), pool.allocate("b", 1), pool.allocate("a", 5)]
    assert pool.table("a") == parts[0] + parts[2]
    assert pool.table("b") == parts[1]


def test_a_table_that_was_handed_out_cannot_change_the_pool():
    pool = BlockManager(CacheConfig(num_blocks=4, block_size=1))
    pool.allocate("a", 2)
    table = pool.table("a")
    pool.allocate("a", 3)
    assert len(table) == 2
    assert isinstance(table, tuple)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.append(pool.table("a")[0]),
        lambda pool: pool._tables["a"].pop(),
        lambda pool: pool._tables["a"].append(pool.table("a")[0]),
        lambda pool: pool._tables["a"].append(pool.table("b")[0]),
        lambda pool: pool._tables.__setitem__("c", []),
        lambda pool: pool._tables.pop("b"),
        lambda pool: pool._ref_counts.__setitem__(pool._free[0], 1),
        lambda pool: pool._ref_counts.__setitem__(pool.table("a")[0], 2),
    ],
    ids=[
        "a block is lost",
        "a block is free twice",
        "a block is free and held",
        "a table is cut short",
        "a table names a block twice",
        "two tables share a block that is counted once",
        "a table is empty",
        "a table is lost",
        "a free block is counted as held",
        "a held block is counted twice",
    ],
)
def test_check_notices_that(damage):
    pool = BlockManager(CacheConfig(num_blocks=6, block_size=2))
    pool.allocate("a", 4)
    pool.allocate("b", 2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_a_block_whose_count_is_zero_is_not_released_again():
    pool = BlockManager(CacheConfig(num_blocks=2, block_size=1))
    (block,) = pool.allocate("a", 1)
    pool._ref_counts[block] = 0
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.free("a")
