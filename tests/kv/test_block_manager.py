"""The block manager by itself: against a plain model, by hand, and the proofs of `check()` against damage."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbresearch.config import CacheConfig
from cbresearch.kv import NULL_BLOCK, BlockManager

IDS = ("a", "b", "c", "d")
identities = st.sampled_from(IDS)


def num_blocks_by_counting(num_tokens: int, block_size: int) -> int:
    """Count the places where a block begins."""
    return len(range(0, num_tokens, block_size))


class PoolAgainstModel(RuleBasedStateMachine):
    """Drive a pool at random beside a dictionary of the blocks that each request holds."""

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
def test_blocks_for_counts_a_block_for_every_block_size_begun(block_size):
    pool = BlockManager(CacheConfig(1, block_size))
    for num_tokens in range(4 * block_size + 2):
        assert pool.blocks_for(num_tokens) == num_blocks_by_counting(num_tokens, block_size)


def test_allocate_takes_no_block_if_the_last_one_is_missing():
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


def test_freed_blocks_can_all_be_allocated_again():
    pool = BlockManager(CacheConfig(num_blocks=5, block_size=3))
    for _ in range(3):
        assert set(pool.allocate("a", 15)) == set(range(5))
        assert pool.allocate("b", 1) is None
        pool.free("a")
    assert pool.num_free_blocks == 5


def test_table_keeps_the_order_in_which_blocks_were_added():
    pool = BlockManager(CacheConfig(num_blocks=6, block_size=1))
    parts = [pool.allocate("a", 2), pool.allocate("b", 1), pool.allocate("a", 5)]
    assert pool.table("a") == parts[0] + parts[2]
    assert pool.table("b") == parts[1]


def test_table_is_a_copy_that_cannot_change_the_pool():
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
def test_block_manager_check_notices_that(damage):
    pool = BlockManager(CacheConfig(num_blocks=6, block_size=2))
    pool.allocate("a", 4)
    pool.allocate("b", 2)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_free_rejects_a_block_whose_reference_count_is_zero():
    pool = BlockManager(CacheConfig(num_blocks=2, block_size=1))
    (block,) = pool.allocate("a", 1)
    pool._ref_counts[block] = 0
    with pytest.raises(ValueError, match=f"block {block} is free already"):
        pool.free("a")


# --- shared blocks


def pool_with_fork(num_tokens, num_shared=None, num_blocks=8, **options):
    pool = BlockManager(CacheConfig(num_blocks, 2, **options))
    pool.allocate("parent", num_tokens)
    pool.fork("child", pool.table("parent")[:num_shared])
    pool.check()
    return pool


def test_copy_on_write_copies_a_shared_block_for_the_first_writer_and_leaves_the_other_in_place():
    for writer, other in (("parent", "child"), ("child", "parent")):
        pool = pool_with_fork(3)
        before = pool.table(other)
        ((source, target),) = pool.copy_on_write(writer, 1)
        pool.check()
        assert pool.table(other) == before
        assert pool.table(writer) == (before[0], target)
        assert (source, target in before) == (before[1], False)
        # They no longer share it: the last one to refer to it writes in place.
        assert pool.copy_on_write(other, 1) == pool.copy_on_write(writer, 1) == ()
        assert pool.table(other) == before


def test_copy_on_write_copies_nothing_that_is_not_shared():
    pool = pool_with_fork(3, num_shared=1)
    assert pool.copy_on_write("parent", 1) == ()
    pool.free("child")
    assert pool.copy_on_write("parent", 0) == ()
    assert pool.num_held_blocks == 2


def test_copy_on_write_changes_nothing_if_no_block_is_free():
    pool = pool_with_fork(3, num_blocks=2)
    before = pool.table("parent")
    assert pool.copy_on_write("child", 1) is None
    pool.check()
    assert pool.table("parent") == pool.table("child") == before
    assert (pool.num_held_blocks, pool.num_shared_blocks) == (2, 2)


def test_shared_blocks_are_free_once_the_last_request_frees_them_and_a_second_free_raises():
    pool = pool_with_fork(4)
    pool.free("parent")
    assert pool.num_held_blocks == 2
    pool.free("child")
    assert pool.num_free_blocks == 8
    for name in ("parent", "child"):
        with pytest.raises(ValueError, match=f"{name!r} holds no blocks"):
            pool.free(name)
    pool.check()


def test_fork_rejects_a_request_that_holds_blocks():
    pool = pool_with_fork(4)
    with pytest.raises(ValueError, match="'child' holds blocks already"):
        pool.fork("child", pool.table("parent"))


# --- sliding window


def test_remove_skipped_blocks_gives_back_what_no_later_token_attends_to():
    # Window 4, blocks of 2: the token at position 9 sees 6 to 9.
    pool = BlockManager(CacheConfig(6, 2, sliding_window=4))
    table = pool.allocate("a", 9)
    assert pool.remove_skipped_blocks("a", 4) == 0
    assert pool.remove_skipped_blocks("a", 5) == 1
    assert pool.table("a") == (NULL_BLOCK, *table[1:])
    assert pool.remove_skipped_blocks("a", 9) == 3
    assert pool.table("a") == (NULL_BLOCK,) * 3 + table[3:]
    assert pool.remove_skipped_blocks("a", 9) == 3
    assert pool.num_free_blocks == 4
    pool.check()
    pool.free("a")
    assert pool.num_free_blocks == 6
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        pool.free("a")


def test_a_windowed_table_that_is_forked_copied_and_freed_gives_back_each_block_once():
    # A block that fell out of the window stands in neither table; what both still see is counted twice.
    pool = BlockManager(CacheConfig(6, 2, sliding_window=3))
    pool.allocate("a", 7)
    pool.remove_skipped_blocks("a", 6)
    pool.fork("b", pool.table("a"))
    assert pool.num_shared_blocks == 2
    assert len(pool.copy_on_write("b", 3)) == 1
    assert pool.allocate("a", 9) is not None
    pool.remove_skipped_blocks("a", 8)
    pool.remove_skipped_blocks("b", 7)
    pool.check()
    for name in ("a", "b"):
        pool.free(name)
        pool.check()
    assert pool.num_free_blocks == 6


# --- the host's pool


def snapshot(pool, names="ab"):
    return (
        {name: (pool.table(name), pool.host_table(name)) for name in names},
        pool.num_free_blocks,
        pool.num_cached_blocks,
        pool.num_held_host_blocks,
        pool.num_shared_blocks,
    )


def test_a_move_between_the_tiers_that_lacks_its_last_block_changes_neither_pool():
    pool = BlockManager(CacheConfig(4, 2, num_host_blocks=3))
    pool.allocate("a", 8)
    before = snapshot(pool)
    assert pool.move_to_host("a", 8) is None
    assert snapshot(pool) == before
    pool.check()
    assert len(pool.move_to_host("a", 6)) == 3
    assert pool.num_free_blocks == 4
    pool.allocate("b", 4)
    before = snapshot(pool)
    assert pool.move_to_device("a", 6) is None
    assert snapshot(pool) == before
    pool.check()
    pool.free("b")
    assert len(pool.move_to_device("a", 6)) == 3
    assert (pool.num_held_blocks, pool.num_held_host_blocks) == (3, 0)


def test_only_a_full_block_is_mirrored_on_both_tiers_while_a_fork_goes_on_writing():
    pool = pool_with_fork(3, num_host_blocks=4)
    full, partial = pool.table("parent")
    out = pool.move_to_host("child", 3)
    assert [source for source, _ in out] == [full, partial]
    # The parent may write on in its block: the child's content is safe on the host.
    assert pool.copy_on_write("parent", 1) == ()
    back = pool.move_to_device("child", 3)
    pool.check()
    # What is full is shared again, and what is not comes back to a block of its own.
    assert [source for source, _ in back] == [out[1][1]]
    assert pool.table("child")[0] == full
    assert pool.table("child")[1] not in (full, partial)


# --- block events


def test_take_events_tells_what_became_of_blocks_once_and_in_order():
    pool = BlockManager(CacheConfig(3, 2, prefix_caching=True, num_host_blocks=2))
    first = pool.allocate("a", 4)
    pool.cache_full_blocks("a", (1, 2, 3, 4), 4)
    assert pool.take_events().cached == first
    assert not any(pool.take_events())
    pool.move_to_host("a", 4)
    events = pool.take_events()
    # The tail first: it is evicted before the head, without which it could not be reached.
    assert events.freed == first[::-1]
    assert events.host_held == tuple(("a", block) for block in pool.host_table("a"))
    pool.allocate("b", 4)
    assert pool.take_events().evicted == first[1:]
    pool.free("a")
    assert len(pool.take_events().host_freed) == 2


def test_a_pool_without_prefix_caching_makes_no_block_findable():
    pool = BlockManager(CacheConfig(2, 2))
    pool.allocate("a", 4)
    pool.cache_full_blocks("a", (1, 2, 3, 4), 4)
    pool.free("a")
    assert pool.take_events().cached == ()
    pool.allocate("b", 4)
    pool.check()
