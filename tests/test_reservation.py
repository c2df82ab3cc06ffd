"""Contiguous reservations against a pool that is a plain list of owners."""

import random
from inspect import signature
from itertools import count

import pytest
from cbresearch.blocks import BlockManager
from cbresearch.reservation import BuddyAllocator, ReservationManager, next_power_of_two, reserved_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbresearch.config import RESERVATIONS, CacheConfig
from cbresearch.request import Request

IDS = ("a", "b", "c", "d", "e")
MAX_LEN = 40
identities = st.sampled_from(IDS)


class ListPool:
    """A pool as a list with each block's owner, searched from end to end."""

    def __init__(self, num_blocks: int) -> None:
        self.owners: list[str | None] = [None] * num_blocks

    def run_size(self, num_blocks: int) -> int:
        return next(2**order for order in count() if 2**order >= num_blocks)

    def is_free(self, address: int, size: int) -> bool:
        run = self.owners[address : address + size]
        return len(run) == size and not any(run)

    def fits(self, num_blocks: int) -> bool:
        size = self.run_size(num_blocks)
        return any(self.is_free(address, size) for address in range(0, len(self.owners), size))

    def place(self, num_blocks: int) -> int:
        """Return where the rule puts a run: in the smallest whole free run, of equal ones the lowest."""
        size = self.run_size(num_blocks)
        while True:
            for address in range(0, len(self.owners), size):
                twice = address - address % (2 * size)
                if self.is_free(address, size) and not self.is_free(twice, 2 * size):
                    return address
            size *= 2

    def take(self, owner: str, address: int, num_blocks: int) -> None:
        size = self.run_size(num_blocks)
        assert self.is_free(address, size)
        self.owners[address : address + size] = [owner] * size

    def free(self, owner: str) -> None:
        self.owners = [None if other == owner else other for other in self.owners]


class ReservationsAgainstAList(RuleBasedStateMachine):
    """Drive a pool at random beside a list that says who holds which block."""

    @initialize(
        num_blocks=st.integers(1, 70), block_size=st.sampled_from((1, 3)), kind=st.sampled_from(RESERVATIONS)
    )
    def create(self, num_blocks, block_size, kind):
        self.pool = ReservationManager(CacheConfig(num_blocks, block_size, reservation=kind), MAX_LEN)
        self.model = ListPool(num_blocks)
        self.block_size, self.kind = block_size, kind
        self.needed: dict[str, int] = {}
        self.tables: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, int] = {}

    @rule(request_id=identities, prompt=st.integers(1, 20), output=st.integers(1, 20))
    def expect(self, request_id, prompt, output):
        if request_id in self.tables:
            return
        request = Request(request_id, prompt, output)
        needed = len(range(0, reserved_tokens(request, self.kind, MAX_LEN), self.block_size))
        run = self.pool.expect(request)
        assert run == self.model.run_size(needed)
        whole = ListPool(len(self.model.owners)).fits(needed)
        assert (run <= self.pool.num_blocks) == whole
        if whole:
            self.needed[request_id] = needed
            self.tokens[request_id] = prompt + output - 1

    @rule(request_id=identities, part=st.floats(0, 1))
    def allocate(self, request_id, part):
        if request_id not in self.needed:
            with pytest.raises(ValueError, match=f"{request_id!r} wants room"):
                self.pool.allocate(request_id, 1)
            return
        needed, num_tokens = self.needed[request_id], int(part * self.tokens[request_id])
        if request_id in self.tables:
            assert self.pool.can_allocate(request_id, num_tokens)
            assert self.pool.allocate(request_id, num_tokens) == ()
            return
        fits = self.model.fits(needed)
        assert self.pool.can_allocate(request_id, num_tokens) == fits
        added = self.pool.allocate(request_id, num_tokens)
        if not fits:
            assert added is None
            return
        start = self.model.place(needed)
        assert added == tuple(range(start, start + needed))
        self.model.take(request_id, start, needed)
        self.tables[request_id] = added

    @rule(request_id=identities)
    def free_twice(self, request_id):
        if self.tables.pop(request_id, ()):
            self.pool.free(request_id)
            self.model.free(request_id)
        with pytest.raises(ValueError, match=f"{request_id!r} holds no blocks"):
            self.pool.free(request_id)

    @invariant()
    def pool_equals_model(self):
        self.pool.check()
        assert {name: self.pool.table(name) for name in IDS} == {
            name: self.tables.get(name, ()) for name in IDS
        }
        assert self.pool.num_free_blocks == self.model.owners.count(None)
        assert self.pool.num_held_blocks == sum(map(len, self.tables.values()))
        assert (
            self.pool.num_free_blocks + self.pool.num_held_blocks + self.pool.num_unusable_blocks
            == self.pool.num_blocks
            == len(self.model.owners)
        )

    def teardown(self):
        for request_id in self.tables:
            self.pool.free(request_id)
        self.pool.check()
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert free_runs(self.pool._buddies) == free_runs(BuddyAllocator(self.pool.num_blocks))


TestReservationsAgainstAList = ReservationsAgainstAList.TestCase
TestReservationsAgainstAList.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


def free_runs(buddies: BuddyAllocator) -> list[set[int]]:
    return [set(runs.free) for runs in buddies._free]


def manager(num_blocks: int, reservation: str, block_size: int = 1, max_model_len: int | None = None):
    return ReservationManager(CacheConfig(num_blocks, block_size, reservation=reservation), max_model_len)


@given(num_blocks=st.integers(1, 64), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_run_is_rejected_exactly_when_no_free_blocks_at_a_multiple_of_its_size_make_it_up(num_blocks, seed):
    rng = random.Random(seed)
    buddies, model, held = BuddyAllocator(num_blocks), ListPool(num_blocks), {}
    for name in map(str, range(60)):
        for size in range(1, num_blocks + 2):
            assert buddies.fits(size) == model.fits(size)
        if held and rng.random() < 0.5:
            gone = rng.choice(sorted(held))
            buddies.release(held.pop(gone))
            model.free(gone)
        else:
            size = rng.randint(1, max(1, num_blocks // 3))
            address = buddies.allocate(size)
            assert (address is not None) == model.fits(size)
            if address is not None:
                model.take(name, address, size)
                held[name] = address
        buddies.check()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 16, 100, 15_700])
def test_a_pool_begins_as_the_powers_of_two_in_its_size_the_largest_first(num_blocks):
    runs = sorted(
        (address, 2**order)
        for order, addresses in enumerate(free_runs(BuddyAllocator(num_blocks)))
        for address in addresses
    )
    sizes = [size for _, size in runs]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sum(sizes) == num_blocks
    assert [address for address, _ in runs] == [sum(sizes[:place]) for place in range(len(sizes))]


def test_runs_freed_in_any_order_merge_to_the_whole_pool_again():
    rng = random.Random(7)
    whole = free_runs(BuddyAllocator(1000))
    for _ in range(50):
        buddies = BuddyAllocator(1000)
        addresses = []
        while (address := buddies.allocate(rng.randint(1, 60))) is not None:
            addresses.append(address)
        rng.shuffle(addresses)
        for address in addresses:
            buddies.release(address)
        buddies.check()
        assert free_runs(buddies) == whole


def test_half_the_pool_free_in_single_blocks_holds_no_run_of_two():
    pool = manager(16, "oracle")
    for place in range(16):
        pool.expect(Request(str(place), 1, 1))
        assert pool.allocate(str(place), 1) == (place,)
    for place in range(0, 16, 2):
        pool.free(str(place))
    pool.expect(Request("pair", 1, 2))
    assert pool.num_free_blocks == 8
    assert not pool.can_allocate("pair", 1)
    assert pool.allocate("pair", 1) is None
    pool.free("5")
    assert pool.allocate("pair", 1) == (4, 5)
    pool.check()


def test_the_smallest_run_that_is_large_enough_is_split_and_of_equal_ones_the_lowest_is_taken():
    buddies = BuddyAllocator(8 + 4 + 2)
    assert [buddies.allocate(size) for size in (1, 4, 1, 1, 1, 8)] == [12, 8, 13, 0, 1, None]
    buddies.release(12)
    buddies.release(0)
    assert [buddies.allocate(1) for _ in range(3)] == [0, 12, 2]


def test_the_same_operations_take_the_same_blocks_whatever_the_ids_are_called():
    def addresses(names):
        rng, pool, taken, inside = random.Random(3), manager(500, "pow2"), [], []
        for name in names:
            pool.expect(Request(name, rng.randint(1, 30), rng.randint(1, 30)))
            while (added := pool.allocate(name, 1)) is None:
                pool.free(inside.pop(rng.randrange(len(inside))))
            inside.append(name)
            taken.append(added)
        return taken

    assert addresses([f"a{place}" for place in range(300)]) == addresses(
        [str(hash(place) * 7) for place in range(300)]
    )


def test_a_long_life_leaves_nothing_behind_in_the_allocator():
    buddies, rng = BuddyAllocator(64), random.Random(0)
    held = []
    for _ in range(20_000):
        address = buddies.allocate(rng.choice((1, 2, 4, 8)))
        if address is None:
            buddies.release(held.pop(rng.randrange(len(held))))
        else:
            held.append(address)
    # A run of a size can begin at so many places; no queue is longer.
    assert all(len(runs.heap) <= 64 >> order for order, runs in enumerate(buddies._free))
    buddies.check()


@pytest.mark.parametrize(
    ("reservation", "output", "slots"),
    [
        ("max", 25, 2048),
        ("pow2", 25, 100 + 32),
        ("pow2", 32, 100 + 32),
        ("pow2", 33, 100 + 64),
        ("pow2", 1, 100 + 1),
        ("pow2", 1025, 2048),
        ("oracle", 25, 124),
        ("oracle", 1, 100),
    ],
)
def test_the_papers_reservations(reservation, output, slots):
    """vLLM, SOSP'23, section 6.1: for a true output of 25 tokens, Orca (Pow2) reserves 32 positions."""
    assert reserved_tokens(Request("a", 100, output), reservation, 2048) == slots
    # The same where the answer ends before max_tokens.
    known = Request("a", 100, 1900, output_length=output)
    assert reserved_tokens(known, reservation, 2048) == slots
    assert reserved_tokens(Request("a", 100, output, output_length=1900), reservation, 2048) == slots


@pytest.mark.parametrize("reservation", RESERVATIONS)
@given(prompt=st.integers(1, 300), output=st.integers(1, 300), limit=st.none() | st.integers(1, 700))
@settings(deadline=None, derandomize=True)
def test_no_reservation_is_too_short_for_what_the_request_can_come_to_hold(
    reservation, prompt, output, limit
):
    if reservation == "max" and limit is None:
        return
    reserved = reserved_tokens(Request("a", prompt, output), reservation, limit)
    assert reserved >= prompt + output - 1
    if limit is not None and prompt + output <= limit:
        assert reserved <= limit


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)]
)
def test_next_power_of_two(number, power):
    assert next_power_of_two(number) == power


def test_seven_requests_that_reserve_2048_slots_fit_the_papers_15_700_slots():
    pool = manager(15_700, "max", max_model_len=2048)
    for place in range(8):
        assert pool.expect(Request(str(place), 161, 338)) == 2048
        assert pool.can_allocate(str(place), 161) == (place < 7)
        assert (pool.allocate(str(place), 161) is None) == (place == 7)
    assert pool.num_held_blocks == 7 * 2048
    assert pool.num_unusable_blocks == 0
    assert pool.num_free_blocks == 15_700 - 7 * 2048


def test_a_reservation_is_counted_in_blocks_and_the_rounding_apart():
    pool = manager(64, "oracle", block_size=16)
    # 100 + 30 - 1 tokens are 9 blocks, in a run of 16.
    assert pool.expect(Request("a", 100, 30)) == 16
    assert pool.allocate("a", 100) == tuple(range(9))
    assert pool.table("a") == tuple(range(9))
    assert (pool.num_held_blocks, pool.num_unusable_blocks, pool.num_free_blocks) == (9, 7, 48)
    assert pool.blocks_for(129) == 9
    # The whole run was taken at the start.
    assert pool.allocate("a", 129) == ()
    with pytest.raises(ValueError, match="reserved 9 blocks of 16"):
        pool.allocate("a", 9 * 16 + 1)
    pool.free("a")
    assert (pool.num_held_blocks, pool.num_unusable_blocks, pool.num_free_blocks) == (0, 0, 64)


def test_what_the_longest_run_cannot_hold_is_told_by_a_number_over_the_pools():
    pool = manager(100, "oracle")
    # 64 + 32 + 4 blocks: 64 is the longest run, though 100 are free.
    assert pool.expect(Request("fits", 60, 5)) == 64
    assert pool.expect(Request("too long", 60, 6)) == 128 > pool.num_blocks
    assert set(pool._reserved) == {"fits"}


def test_a_request_that_was_preempted_reserves_the_same_again():
    pool = manager(32, "pow2")
    pool.expect(Request("a", 5, 9))
    first = pool.allocate("a", 5)
    assert len(first) == 5 + 16
    pool.free("a")
    assert pool.swap_out("a", 5) is None
    assert pool.table("a") == ()
    assert pool.allocate("a", 11) == first


def test_a_second_free_of_the_same_run_raises():
    pool = manager(8, "oracle")
    pool.expect(Request("a", 3, 1))
    pool.allocate("a", 1)
    pool.free("a")
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        pool.free("a")
    with pytest.raises(ValueError, match="no run begins at block 0"):
        pool._buddies.release(0)
    pool.check()
    assert pool.num_free_blocks == 8


def test_it_is_asked_as_a_block_manager_is():
    names = [name for name in vars(ReservationManager) if not name.startswith("_")]
    assert len(names) > 20
    for name in names:
        paged, reserved = getattr(BlockManager, name), getattr(ReservationManager, name)
        if callable(paged):
            assert list(signature(paged).parameters) == list(signature(reserved).parameters), name


def test_nothing_is_cached_shared_copied_or_moved():
    pool = manager(8, "oracle")
    pool.expect(Request("a", (1, 2, 3), 2))
    assert pool.match((1, 2, 3)) == ()
    pool.share("a", ())
    pool.allocate("a", 3)
    pool.enter("a", (1, 2, 3), 3)
    assert pool.match((1, 2, 3)) == ()
    assert pool.make_writable("a", 0) == ()
    assert pool.forget("a", 2) == 0
    assert pool.host_table("a") == ()
    assert not pool.can_swap_in("a", 3)
    assert pool.swap_in("a") is None
    assert (pool.num_cached_blocks, pool.num_shared_blocks, pool.num_held_host_blocks) == (0, 0, 0)
    assert pool.table("a") == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="'b' cannot share blocks"):
        pool.share("b", (0,))


def test_reserving_the_maximum_needs_a_maximum():
    with pytest.raises(ValueError, match="max_model_len is None"):
        manager(8, "max")
    for reservation in ("pow2", "oracle"):
        manager(8, reservation)


def test_pages_are_not_reserved():
    with pytest.raises(ValueError, match="use a BlockManager"):
        ReservationManager(CacheConfig(8), 100)
    with pytest.raises(ValueError, match="'pow3' is not known"):
        reserved_tokens(Request("a", 1, 1), "pow3")


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._buddies._free[3].free.clear(),
        lambda pool: pool._buddies._free[0].add(8),
        lambda pool: pool._buddies._orders.pop(8),
        lambda pool: pool._buddies._orders.__setitem__(8, 3),
        lambda pool: pool._runs.pop("a"),
        lambda pool: pool._runs.__setitem__("c", pool._runs["a"]),
        lambda pool: pool._runs.__setitem__("a", range(8, 10)),
        lambda pool: setattr(pool, "_num_held", 4),
        lambda pool: setattr(pool._buddies, "num_free_blocks", 7),
        lambda pool: pool._buddies._free[2].heap.append(8),
        lambda pool: split_a_free_run(pool._buddies),
    ],
    ids=[
        "a free run is lost",
        "a block is free and held",
        "a held run is lost",
        "a run grew over the end",
        "a request's run is lost",
        "two requests hold one run",
        "a request's run is cut short",
        "held blocks are miscounted",
        "free blocks are miscounted",
        "a heap holds a run that is not free",
        "two free buddies are not merged",
    ],
)
def test_check_notices_that(damage):
    pool = manager(12, "oracle")
    for name in "ab":
        pool.expect(Request(name, 3, 1))
        pool.allocate(name, 3)
    pool.free("b")
    # Of 8 + 4 blocks, the request holds three of the four.
    assert pool.table("a") == (8, 9, 10)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def split_a_free_run(buddies: BuddyAllocator) -> None:
    order = max(order for order, runs in enumerate(buddies._free) if runs.free)
    address = buddies._free[order].take_lowest()
    for half in (address, address + (1 << order - 1)):
        buddies._free[order - 1].add(half)
