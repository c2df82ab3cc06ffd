"""Contiguous baselines: a request reserves one run of blocks when it joins (vLLM, SOSP'23, section 6.1)."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy

from cbresearch.config import CacheConfig
from cbresearch.kv.interface import EventLog, KVManager
from cbresearch.request import Request, RequestState
from cbresearch.step import BlockEvents


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
    output = min(request.max_tokens, request.output_length or request.max_tokens)
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
        # The binary logarithm of the size of each held run, by its address.
        self.held_runs: dict[int, int] = {}
        address = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].add(address)
                address += 1 << order

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
        self.held_runs[address] = order
        self.num_free_blocks -= 1 << order
        return address

    def release(self, address: int) -> None:
        """Give back the run at an address.

        Raises:
            ValueError: No run that is held begins there.
        """
        order = self.held_runs.pop(address, None)
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
        tiles = sorted([*free, *self.held_runs.items()])
        assert not any(start % (1 << order) for start, order in tiles), "a run is not at its size's multiple"
        ends = [0, *(address + (1 << order) for address, order in tiles)]
        starts = [*(address for address, _ in tiles), self.num_blocks]
        assert ends == starts, "runs overlap, or blocks are lost"
        for address, order in free:
            assert address ^ 1 << order not in self._free[order], "two free buddies are not merged"
        assert self.num_free_blocks == sum(1 << order for _, order in free), "free blocks are miscounted"


class ContiguousKV(KVManager):
    """Reserve one contiguous run of blocks for each request, in the place of a `BlockManager`.

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
            raise ValueError("CacheConfig: reservation is None, which is paging; use a BlockManager")
        self.config, self.num_blocks = config, config.num_blocks
        self._reservation = config.reservation
        self._max_model_len = max_model_len
        # Whatever can be wrong with the limits shows on any request; better now than at the first arrival.
        self._num_reserved(Request("any", 1, 1))
        self._buddies = BuddyAllocator(config.num_blocks)
        self._events = EventLog()
        self._runs: dict[str, range] = {}
        # In a run but not in its reservation: the allocator's rounding.
        self.num_unusable_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks are in no run; the longest run that they make up may be far shorter."""
        return self._buddies.num_free_blocks

    @property
    def num_held_blocks(self) -> int:
        """Return how many blocks are reserved, whether or not they hold tokens yet."""
        return self.num_blocks - self.num_free_blocks - self.num_unusable_blocks

    def max_blocks_needed(self, request: Request) -> int:
        """Return the blocks that a request's run takes from an empty pool, rounding included.

        The pool has fewer exactly when no run can ever be long enough: the pool's longest run is the largest
        power of two in it, and the next one is longer than the pool.
        """
        return next_power_of_two(self._num_reserved(request))

    def table(self, request_id: str) -> tuple[int, ...]:
        """Return a request's blocks, all that it reserved, in order; empty if it holds none."""
        return tuple(self._runs.get(request_id, ()))

    def num_private_blocks(self, request_id: str) -> int:
        """Return how many blocks would be free if a request gave back its own."""
        return next_power_of_two(len(self._runs[request_id]))

    def missing_blocks(self, state: RequestState, num_tokens: int, leaving: Iterable[str]) -> Iterator[int]:
        """Yield the length of the run that a request lacks, now and as others leave; 0 once there is one."""
        buddies, reserved = deepcopy(self._buddies), self._num_reserved(state.request)
        yield reserved * (deepcopy(buddies).allocate(reserved) is None)
        for request_id in leaving:
            buddies.release(self._runs[request_id].start)
            yield reserved * (deepcopy(buddies).allocate(reserved) is None)

    def admit(self, state: RequestState, sibling: RequestState | None) -> bool:
        """Take a request's whole run, in order and without the allocator's rounding, if one is free.

        Raises:
            ValueError: The request reserves less than its known tokens.
        """
        reserved = self._num_reserved(state.request)
        self._require_room(state.id, state.num_tokens, reserved)
        address = self._buddies.allocate(reserved)
        if address is None:
            return False
        self._runs[state.id] = range(address, address + reserved)
        self.num_unusable_blocks += next_power_of_two(reserved) - reserved
        state.num_computed_tokens, state.num_transferred_tokens = state.num_transferred_tokens, 0
        return True

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Return no blocks: a run, which `admit` took, never grows.

        Raises:
            ValueError: The request reserved less than `num_tokens` tokens, or nothing.
        """
        self._require_room(request_id, num_tokens, len(self._runs.get(request_id, ())))
        return ()

    def capacities(self, request_ids: Sequence[str]) -> list[int]:
        """Return how many tokens requests' runs can hold."""
        return [len(self._runs[request_id]) * self.config.block_size for request_id in request_ids]

    def append_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Return no blocks: a run never grows.

        Raises:
            ValueError: A request is named.
        """
        for request_id, capacity in zip(request_ids, self.capacities(request_ids), strict=True):
            self.allocate(request_id, capacity + 1)
        return []

    def update(self, state: RequestState, start: int) -> None:
        """Do nothing: a run stays whole until its request leaves."""

    def cache_scheduled(self, state: RequestState, end: int) -> None:
        """Do nothing: no prefix is cached."""

    def free(self, request_id: str) -> None:
        """Give back a request's run.

        Raises:
            ValueError: The request holds no blocks, for instance because it was freed before.
        """
        run = self._runs.pop(request_id, None)
        if run is None:
            raise ValueError(f"request {request_id!r} holds no blocks: never allocated, or freed already")
        self.num_unusable_blocks -= next_power_of_two(len(run)) - len(run)
        self._events.freed += run
        self._buddies.release(run.start)

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
        assert self.num_held_blocks == sum(map(len, self._runs.values())), "held blocks are miscounted"
        for request_id, run in self._runs.items():
            assert run, f"request {request_id!r} has an empty run"

    def _num_reserved(self, request: Request) -> int:
        return self.blocks_for(reserved_tokens(request, self._reservation, self._max_model_len))

    def _require_room(self, request_id: str, num_tokens: int, reserved: int) -> None:
        if self.blocks_for(num_tokens) > reserved:
            raise ValueError(
                f"request {request_id!r} wants room for {num_tokens} tokens but reserved {reserved} blocks "
                f"of {self.config.block_size}; a reservation is made once and does not grow. Is its "
                "output_length too low?"
            )
