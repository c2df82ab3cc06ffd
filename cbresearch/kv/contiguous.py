"""Contiguous baselines: a request reserves one run of blocks when it joins (vLLM, SOSP'23, section 6.1)."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from cbresearch.config import CacheConfig
from cbresearch.kv.interface import EventLog
from cbresearch.request import Request, RequestState
from cbresearch.step import BlockEvents, Transfer


def reserved_tokens(request: Request, reservation: str, max_model_len: int | None = None) -> int:
    """Return the slots that a request reserves, in tokens (vLLM, SOSP'23, section 6.1).

    | reservation | slots |
    |---|---|
    | "max" | `max_model_len` |
    | "pow2" | prompt + output rounded up to a power of two (25 to 32), not over `max_model_len` |
    | "oracle" | prompt + output - 1: the last token, known to be the last, needs no KV |

    The output is `output_length` where it is known, else `max_tokens`. No reservation is too short for it.

    Args:
        request: The request; its prompt's length is known.
        reservation: "max", "pow2" or "oracle".
        max_model_len: Longest context in tokens, or None for no limit.

    Raises:
        ValueError: The reservation is unknown, or "max" lacks a `max_model_len`.
    """
    output = request.max_tokens
    if request.output_length is not None:
        output = min(output, request.output_length)
    needed = request.num_prompt_tokens + output
    if reservation == "oracle":
        return needed - 1
    if reservation == "pow2":
        rounded = request.num_prompt_tokens + next_power_of_two(output)
        return rounded if max_model_len is None else max(needed, min(rounded, max_model_len))
    if reservation != "max":
        raise ValueError(f"reservation {reservation!r} is not known; choose max, pow2 or oracle")
    if max_model_len is None:
        raise ValueError(
            "reservation 'max' reserves the longest context for every request, but max_model_len is None; "
            "set SchedulerConfig.max_model_len"
        )
    return max(needed, max_model_len)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


class BuddyAllocator:
    """Hand out runs of a power of two of blocks, at multiples of their size (Knowlton, CACM 8(10), 1965).

    The smallest free run that is large enough is halved until it fits, of equal ones the lowest. A run given
    back merges with the half it was once split from, its buddy, when that is free too. So a run is rejected
    exactly when no free blocks at a multiple of its size make it up.

    A pool of another size begins as the powers of two that sum up to it, the largest at address 0.

    Args:
        num_blocks: Size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        # Addresses of the free runs, by the binary logarithm of their size.
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]
        self._orders: dict[int, int] = {}
        address = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].add(address)
                address += 1 << order

    @property
    def held_runs(self) -> Mapping[int, int]:
        """Return the binary logarithm of the size of each held run by its address."""
        return self._orders

    def fits(self, num_blocks: int) -> bool:
        """Return whether a run of at least so many blocks is free."""
        return any(self._free[(num_blocks - 1).bit_length() :])

    def allocate(self, num_blocks: int) -> int | None:
        """Take a run of at least so many blocks; return its address, or None if none is free."""
        order = (num_blocks - 1).bit_length()
        larger = next((size for size in range(order, len(self._free)) if self._free[size]), None)
        if larger is None:
            return None
        address = min(self._free[larger])
        self._free[larger].remove(address)
        for half in reversed(range(order, larger)):
            self._free[half].add(address + (1 << half))
        self._orders[address] = order
        self.num_free_blocks -= 1 << order
        return address

    def release(self, address: int) -> None:
        """Give back the run at an address.

        Raises:
            ValueError: No run that is held begins there.
        """
        order = self._orders.pop(address, None)
        if order is None:
            raise ValueError(f"no run begins at block {address}; it was never allocated or already freed")
        self.num_free_blocks += 1 << order
        while (buddy := address ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        self._free[order].add(address)

    def check(self) -> None:
        """Prove the allocator's invariants.

        Raises:
            AssertionError: Runs overlap or leave gaps, are misplaced or unmerged, or are miscounted.
        """
        free = [(address, order) for order, runs in enumerate(self._free) for address in runs]
        tiles = sorted([*free, *self._orders.items()])
        assert all(address % (1 << order) == 0 for address, order in tiles), (
            "a run is not at its size's multiple"
        )
        ends = [0, *(address + (1 << order) for address, order in tiles)]
        starts = [*(address for address, _ in tiles), self.num_blocks]
        assert ends == starts, "runs overlap, or blocks are lost"
        assert all(
            left[1] != right[1] or left[0] ^ 1 << left[1] != right[0]
            for left, right in pairwise(sorted(free))
        ), "two free buddies are not merged"
        assert self.num_free_blocks == sum(1 << order for _, order in free), "free blocks are miscounted"


class ContiguousKV:
    """Reserve one contiguous run of blocks for each request, in the place of a `PagedKV`.

    A run is taken whole when its request joins and given back whole when it leaves. It holds all the tokens
    that the request can come to have, so that no request runs out of blocks midway. A buddy allocator makes
    the runs powers of two: what a run has beyond its reservation is of no use (`num_unusable_blocks`), and
    free blocks that lie apart do not help a request that needs a long run. Nothing is cached, shared or
    swapped.

    Args:
        config: The pool's size, and how much is reserved.
        max_model_len: Longest context in tokens, or None for no limit.

    Raises:
        ValueError: The configuration asks for pages, or for "max" without a `max_model_len`.
    """

    num_cached_blocks = 0
    num_shared_blocks = 0
    num_held_host_blocks = 0

    def __init__(self, config: CacheConfig, max_model_len: int | None) -> None:
        if config.reservation is None:
            raise ValueError("CacheConfig: reservation is None, which is paging; use a PagedKV")
        self.config = config
        self._reservation = config.reservation
        self._max_model_len = max_model_len
        # Whatever can be wrong with the limits shows on any request; better now than at the first arrival.
        reserved_tokens(Request("any", 1, 1), self._reservation, max_model_len)
        self._buddies = BuddyAllocator(config.num_blocks)
        self._events = EventLog()
        self._reserved: dict[str, int] = {}
        self._runs: dict[str, range] = {}
        self._num_held = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool."""
        return self.config.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks are in no run; the longest run that they make up may be far shorter."""
        return self._buddies.num_free_blocks

    @property
    def num_held_blocks(self) -> int:
        """Return how many blocks are reserved, whether or not they hold tokens yet."""
        return self._num_held

    @property
    def num_unusable_blocks(self) -> int:
        """Return how many blocks lie in a run but not in its reservation: the allocator's rounding."""
        return self.num_blocks - self.num_free_blocks - self._num_held

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.config.block_size)

    def max_blocks_needed(self, request: Request) -> int:
        """Remember what a request will reserve, for as often as it joins.

        Returns:
            The blocks that its run takes from an empty pool, rounding included. They are more than the pool
            has exactly when no run can ever be long enough: the pool's longest run is the largest power of
            two in it, and the next one is longer than the pool. Then nothing is remembered.
        """
        needed = self.blocks_for(reserved_tokens(request, self._reservation, self._max_model_len))
        run = next_power_of_two(needed)
        if run <= self.num_blocks:
            self._reserved[request.id] = needed
        return run

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's blocks, all that it reserved, in order; empty if it holds none."""
        return tuple(self._runs.get(request_id, ()))

    def host_table(self, request_id: str) -> tuple[int, ...]:
        """Return no blocks: there is no host pool."""
        return ()

    def holds(self, request_id: str) -> bool:
        """Return whether a request holds a run."""
        return request_id in self._runs

    def num_private_blocks(self, request_id: str) -> int:
        """Return how many blocks would be free if a request gave back its own."""
        return len(self._runs[request_id])

    def num_cached_tokens(self, state: RequestState) -> int:
        """Return 0: no prefix is cached."""
        return 0

    def admit(self, state: RequestState, sibling: RequestState | None) -> bool:
        """Return whether a run is free that holds the request's whole reservation.

        Raises:
            ValueError: The request reserves less than its known tokens, or nothing.
        """
        if not self._buddies.fits(self._needed(state.id, state.num_tokens)):
            return False
        state.num_computed_tokens, state.num_transferred_tokens = state.num_transferred_tokens, 0
        return True

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Take a request's whole run, unless it holds it already.

        Returns:
            The ids of the blocks added: the whole reservation the first time, in order and without the
            allocator's rounding, and none later. None if no run is free; then nothing has changed.

        Raises:
            ValueError: The request reserves less than `num_tokens` tokens, or nothing.
        """
        needed = self._needed(request_id, num_tokens)
        if request_id in self._runs:
            return ()
        address = self._buddies.allocate(needed)
        if address is None:
            return None
        run = self._runs[request_id] = range(address, address + needed)
        self._num_held += needed
        return tuple(run)

    def capacities(self, request_ids: Sequence[str]) -> list[int]:
        """Return how many tokens requests' runs can hold."""
        return [len(self._runs[request_id]) * self.config.block_size for request_id in request_ids]

    def append_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Return no blocks: a run never grows.

        Raises:
            ValueError: A request is named.
        """
        for request_id in request_ids:
            self._needed(request_id, len(self._runs[request_id]) * self.config.block_size + 1)
        return []

    def update(self, state: RequestState, start: int) -> None:
        """Do nothing: a run stays whole until its request leaves."""

    def cache_scheduled(self, state: RequestState, end: int) -> None:
        """Do nothing: no prefix is cached."""

    def uncache(
        self, state: RequestState, num_computed: int, others: Iterable[RequestState]
    ) -> list[RequestState]:
        """Return no request: no block is shared."""
        return []

    def swap_out(self, state: RequestState) -> bool:
        """Return False: there is no host pool, so that a preempted request computes again."""
        return False

    def swap_in(self, state: RequestState) -> bool:
        """Return False: no request was swapped out."""
        return False

    def free(self, request_id: str) -> None:
        """Give back a request's run. What it reserves is still known, should it join again.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """
        run = self._runs.pop(request_id, None)
        if run is None:
            raise ValueError(
                f"request {request_id!r} holds no blocks; it was never allocated or already freed"
            )
        self._num_held -= len(run)
        self._events.freed += run
        self._buddies.release(run.start)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return no copies."""
        return ()

    def take_events(self) -> BlockEvents:
        """Return what became of blocks since the last call."""
        return self._events.take()

    def check(self) -> None:
        """Prove the pool's invariants.

        Raises:
            AssertionError: A block is lost, held twice or miscounted, or a run is not its request's.
        """
        self._buddies.check()
        orders = {run.start: (len(run) - 1).bit_length() for run in self._runs.values()}
        assert len(orders) == len(self._runs), "two requests hold one run"
        assert orders == self._buddies.held_runs, "the runs differ from the allocator's"
        assert self._num_held == sum(map(len, self._runs.values())), "held blocks are miscounted"
        for request_id, run in self._runs.items():
            assert run, f"request {request_id!r} has an empty run"

    def _needed(self, request_id: str, num_tokens: int) -> int:
        """Return the blocks that a request reserves, which have to hold so many tokens."""
        run = self._runs.get(request_id)
        reserved = self._reserved.get(request_id, 0) if run is None else len(run)
        if not reserved or self.blocks_for(num_tokens) > reserved:
            raise ValueError(
                f"request {request_id!r} wants room for {num_tokens} tokens but reserved {reserved} blocks "
                f"of {self.config.block_size}; a reservation is made once and does not grow. Is its "
                "output_length too low?"
            )
        return reserved
