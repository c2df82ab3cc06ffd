"""The contiguous KV manager against a pool that is a plain list of owners."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbresearch.config import RESERVATIONS, CacheConfig
from cbresearch.kv import BuddyAllocator, ContiguousKV, reserved_tokens
from cbresearch.kv.contiguous import next_power_of_two
from cbresearch.request import Request, RequestState

IDS = ("a", "b", "c", "d", "e")
MAX_LEN = 40
identities = st.sampled_from(IDS)


def join(pool, request, num_tokens=None):
    """Let a request that waits join with so many tokens, by default its prompt; return whether it could."""
    state = RequestState(request, 0)
    state.num_tokens = state.num_tokens if num_tokens is None else num_tokens
    return pool.admit(state, None)


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
    """Drive a pool at random beside a list of the owner of each block."""

    @initialize(
        num_blocks=st.integers(1, 70), block_size=st.sampled_from((1, 3)), kind=st.sampled_from(RESERVATIONS)
    )
    def create(self, num_blocks, block_size, kind):
        self.pool = ContiguousKV(CacheConfig(num_blocks, block_size, reservation=kind), MAX_LEN)
        self.model = ListPool(num_blocks)
        self.block_size, self.kind = block_size, kind
        self.needed: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, int] = {}

    @rule(request_id=identities, prompt=st.integers(1, 20), output=st.integers(1, 20))
    def reserve(self, request_id, prompt, output):
        if request_id in self.tables:
            return
        request = Request(request_id, prompt, output)
        needed = len(range(0, reserved_tokens(request, self.kind, MAX_LEN), self.block_size))
        run = self.pool.max_blocks_needed(request)
        assert run == self.model.run_size(needed)
        whole = ListPool(len(self.model.owners)).fits(needed)
        assert (run <= self.pool.num_blocks) == whole
        if whole:
            self.needed[request_id], self.requests[request_id] = needed, request
            self.tokens[request_id] = prompt + output - 1

    @rule(request_id=identities, part=st.floats(0, 1))
    def allocate(self, request_id, part):
        if request_id not in self.tables:
            with pytest.raises(ValueError, match=f"{request_id!r} wants room"):
                self.pool.allocate(request_id, 1)
        if request_id not in self.needed:
            return
        needed, num_tokens = self.needed[request_id], int(part * self.tokens[request_id])
        if request_id in self.tables:
            assert self.pool.allocate(request_id, num_tokens) == ()
            return
        fits = self.model.fits(needed)
        start = self.model.place(needed) if fits else 0
        assert join(self.pool, self.requests[request_id], num_tokens) == fits
        if not fits:
            return
        assert self.pool.allocate(request_id, num_tokens) == ()
        self.model.take(request_id, start, needed)
        self.tables[request_id] = tuple(range(start, start + needed))

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


TestReservationsAgainstAList = ReservationsAgainstAList.TestCase
TestReservationsAgainstAList.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)


def manager(num_blocks: int, reservation: str, block_size: int = 1, max_model_len: int | None = None):
    return ContiguousKV(CacheConfig(num_blocks, block_size, reservation=reservation), max_model_len)


@given(num_blocks=st.integers(1, 64), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_buddy_allocator_rejects_a_run_only_if_no_free_blocks_at_a_multiple_of_its_size_make_it_up(
    num_blocks, seed
):
    rng = random.Random(seed)
    buddies, model, held = BuddyAllocator(num_blocks), ListPool(num_blocks), {}
    for name in map(str, range(60)):
        if held and rng.random() < 0.5:
            gone = rng.choice(sorted(held))
            buddies.release(held.pop(gone))
            model.free(gone)
        else:
            size = rng.randint(1, max(1, num_blocks // 3) if rng.random() < 0.8 else num_blocks + 1)
            address = buddies.allocate(size)
            assert (address is not None) == model.fits(size)
            if address is not None:
                model.take(name, address, size)
                held[name] = address
        buddies.check()


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 16, 100, 15_700])
def test_buddy_allocator_begins_as_the_powers_of_two_in_its_size_the_largest_first(num_blocks):
    sizes = [2**order for order in reversed(range(num_blocks.bit_length())) if num_blocks >> order & 1]
    buddies = BuddyAllocator(num_blocks)
    assert [buddies.allocate(size) for size in sizes] == [sum(sizes[:place]) for place in range(len(sizes))]
    assert buddies.num_free_blocks == 0


def test_buddy_allocator_merges_runs_freed_in_any_order_to_the_whole_pool():
    rng = random.Random(7)
    for _ in range(50):
        buddies = BuddyAllocator(1000)
        addresses = []
        while (address := buddies.allocate(rng.randint(1, 60))) is not None:
            addresses.append(address)
        rng.shuffle(addresses)
        for address in addresses:
            buddies.release(address)
        buddies.check()
        # The runs of 1,000 blocks: 512 and what is left.
        assert [buddies.allocate(size) for size in (512, 256, 128, 64, 32, 8)] == [0, 512, 768, 896, 960, 992]


def test_contiguous_kv_finds_no_run_of_two_in_free_single_blocks():
    pool = manager(16, "oracle")
    for place in range(16):
        assert join(pool, Request(str(place), 1, 1))
        assert pool.table(str(place)) == (place,)
    for place in range(0, 16, 2):
        pool.free(str(place))
    assert pool.num_free_blocks == 8
    assert not join(pool, Request("pair", 1, 2))
    assert not pool.table("pair") and pool.num_free_blocks == 8
    pool.free("5")
    assert join(pool, Request("pair", 1, 2))
    assert pool.table("pair") == (4, 5)
    pool.check()


def test_buddy_allocator_splits_the_smallest_run_that_is_large_enough_the_lowest_of_equal_ones():
    buddies = BuddyAllocator(8 + 4 + 2)
    assert [buddies.allocate(size) for size in (1, 4, 1, 1, 1, 8)] == [12, 8, 13, 0, 1, None]
    buddies.release(12)
    buddies.release(0)
    assert [buddies.allocate(1) for _ in range(3)] == [0, 12, 2]


def test_contiguous_kv_takes_the_same_blocks_whatever_the_request_ids():
    def addresses(names):
        rng, pool, taken, inside = random.Random(3), manager(500, "pow2"), [], []
        for name in names:
            request = Request(name, rng.randint(1, 30), rng.randint(1, 30))
            while not join(pool, request):
                pool.free(inside.pop(rng.randrange(len(inside))))
            inside.append(name)
            taken.append(pool.table(name))
        return taken

    assert addresses([f"a{place}" for place in range(300)]) == addresses(
        [str(hash(place) * 7) for place in range(300)]
    )


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
def test_reserved_tokens_are_those_of_the_paper(reservation, output, slots):
    """vLLM, SOSP'23, section 6.1: for a true output of 25 tokens, Orca (Pow2) reserves 32 positions."""
    assert reserved_tokens(Request("a", 100, output), reservation, 2048) == slots
    # The same where the answer ends before max_tokens.
    known = Request("a", 100, 1900, output_length=output)
    assert reserved_tokens(known, reservation, 2048) == slots
    assert reserved_tokens(Request("a", 100, output, output_length=1900), reservation, 2048) == slots


@pytest.mark.parametrize("reservation", RESERVATIONS)
@given(prompt=st.integers(1, 300), output=st.integers(1, 300), limit=st.none() | st.integers(1, 700))
@settings(deadline=None, derandomize=True)
def test_reserved_tokens_hold_all_that_a_request_can_come_to_need(reservation, prompt, output, limit):
    if reservation == "max" and limit is None:
        return
    reserved = reserved_tokens(Request("a", prompt, output), reservation, limit)
    assert reserved >= prompt + output - 1
    if limit is not None and prompt + output <= limit:
        assert reserved <= limit


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)]
)
def test_next_power_of_two_by_hand(number, power):
    assert next_power_of_two(number) == power


def test_contiguous_kv_holds_seven_reservations_of_2048_in_the_papers_15_700_slots():
    pool = manager(15_700, "max", max_model_len=2048)
    for place in range(8):
        request = Request(str(place), 161, 338)
        assert pool.max_blocks_needed(request) == 2048
        assert join(pool, request) == (place < 7)
    assert pool.num_held_blocks == 7 * 2048
    assert pool.num_unusable_blocks == 0
    assert pool.num_free_blocks == 15_700 - 7 * 2048


def test_contiguous_kv_counts_reserved_blocks_and_the_rounding_apart():
    pool = manager(64, "oracle", block_size=16)
    # 100 + 30 - 1 tokens are 9 blocks, in a run of 16.
    request = Request("a", 100, 30)
    assert pool.max_blocks_needed(request) == 16
    with pytest.raises(ValueError, match="'a' wants room for 145 tokens but reserved 9 blocks of 16"):
        join(pool, request, 9 * 16 + 1)
    assert join(pool, request)
    assert pool.table("a") == tuple(range(9))
    assert (pool.num_held_blocks, pool.num_unusable_blocks, pool.num_free_blocks) == (9, 7, 48)
    assert pool.blocks_for(129) == 9
    # The whole run was taken at the start.
    assert pool.allocate("a", 129) == ()
    with pytest.raises(ValueError, match="reserved 9 blocks of 16"):
        pool.allocate("a", 9 * 16 + 1)
    pool.free("a")
    assert (pool.num_held_blocks, pool.num_unusable_blocks, pool.num_free_blocks) == (0, 0, 64)


def test_max_blocks_needed_exceeds_the_pool_if_no_run_can_be_long_enough():
    pool = manager(100, "oracle")
    # 64 + 32 + 4 blocks: 64 is the longest run, though 100 are free.
    assert pool.max_blocks_needed(Request("fits", 60, 5)) == 64
    assert pool.max_blocks_needed(Request("too long", 60, 6)) == 128 > pool.num_blocks
    assert not join(pool, Request("too long", 60, 6))
    assert join(pool, Request("fits", 60, 5), 64)


def test_a_preempted_request_reserves_the_same_run_again():
    pool = manager(32, "pow2")
    assert join(pool, Request("a", 5, 9))
    first = pool.table("a")
    assert len(first) == 5 + 16
    pool.free("a")
    assert pool.table("a") == ()
    assert join(pool, Request("a", 5, 9), 11)
    assert pool.table("a") == first


def test_contiguous_kv_raises_at_the_second_free_of_a_run():
    pool = manager(8, "oracle")
    join(pool, Request("a", 3, 1))
    pool.free("a")
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        pool.free("a")
    buddies = BuddyAllocator(8)
    buddies.release(buddies.allocate(3))
    with pytest.raises(ValueError, match="no run begins at block 0"):
        buddies.release(0)
    pool.check()
    assert pool.num_free_blocks == 8


def test_contiguous_kv_caches_shares_copies_and_swaps_nothing():
    pool = manager(8, "oracle")
    state = RequestState(Request("a", (1, 2, 3), 2), 0)
    assert pool.admit(state, None)
    pool.allocate("a", 3)
    state.num_computed_tokens = 3
    pool.update(state, 0)
    pool.cache_scheduled(state, 3)
    assert pool.num_cached_tokens(RequestState(Request("b", (1, 2, 3), 2), 1)) == 0
    assert pool.uncache(state, 0, ()) == []
    assert not pool.swap_out(state) and not pool.swap_in(state)
    assert pool.host_table("a") == ()
    assert (pool.num_cached_blocks, pool.num_shared_blocks, pool.num_held_host_blocks) == (0, 0, 0)
    assert pool.take_transfers() == ()
    assert pool.table("a") == (0, 1, 2, 3)


def test_a_run_never_grows_and_tells_what_it_can_hold():
    pool = manager(8, "oracle", block_size=2)
    join(pool, Request("a", 3, 4))
    assert pool.capacities(["a"]) == [6]
    assert pool.append_blocks([]) == []
    with pytest.raises(ValueError, match="does not grow"):
        pool.append_blocks(["a"])


def test_reservation_max_needs_max_model_len():
    with pytest.raises(ValueError, match="max_model_len is None"):
        manager(8, "max")
    for reservation in ("pow2", "oracle"):
        manager(8, reservation)


def test_contiguous_kv_rejects_a_paged_or_unknown_configuration():
    with pytest.raises(ValueError, match="use a BlockManager"):
        ContiguousKV(CacheConfig(8), 100)
    with pytest.raises(ValueError, match="'pow3' is not known"):
        reserved_tokens(Request("a", 1, 1), "pow3")


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._buddies._free[3].clear(),
        lambda pool: pool._buddies._free[0].add(8),
        lambda pool: pool._buddies.held_runs.pop(8),
        lambda pool: pool._buddies.held_runs.__setitem__(8, 3),
        lambda pool: pool._runs.pop("a"),
        lambda pool: pool._runs.__setitem__("c", pool._runs["a"]),
        lambda pool: pool._runs.__setitem__("a", range(8, 10)),
        lambda pool: setattr(pool, "num_unusable_blocks", 4),
        lambda pool: setattr(pool._buddies, "num_free_blocks", 7),
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
        "two free buddies are not merged",
    ],
)
def test_contiguous_kv_check_notices_that(damage):
    pool = manager(12, "oracle")
    for name in "ab":
        join(pool, Request(name, 3, 1))
    pool.free("b")
    # Of 8 + 4 blocks, the request holds three of the four.
    assert pool.table("a") == (8, 9, 10)
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def split_a_free_run(buddies: BuddyAllocator) -> None:
    order = max(order for order, runs in enumerate(buddies._free) if runs)
    address = buddies._free[order].pop()
    for half in (address, address + (1 << order - 1)):
        buddies._free[order - 1].add(half)
