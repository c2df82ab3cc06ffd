"""A random walk over every operation of the block manager, beside a memory that says what each slot holds.

Run as a script it walks for a given number of operations and prints how many it did of each kind:

    python tests/pool_machine.py 200000
"""

import sys
from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cbresearch.config import CacheConfig
from cbresearch.kv import NULL_BLOCK, BlockManager

MAX_CHUNK = 6


class PoolAgainstMemory(RuleBasedStateMachine):
    """Keep, for each slot of both pools, all the tokens on which its KV depends.

    A slot's content is right for a request exactly when it equals the request's tokens up to there. Slots
    of blocks that no request holds and no prefix names are wiped after every operation, as if overwritten.
    """

    num_operations: ClassVar[Counter[str]] = Counter()

    def __init__(self):
        super().__init__()
        self.device: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.swapped: set[str] = set()
        # Blocks that can be found, by when they were cached.
        self.known: list[int] = []
        self.num_created = 0

    @initialize(
        num_blocks=st.integers(1, 12),
        num_host_blocks=st.integers(0, 8),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        window=st.none() | st.integers(1, 9),
    )
    def create(self, num_blocks, num_host_blocks, block_size, caching, window):
        self.pool = BlockManager(
            CacheConfig(num_blocks, block_size, caching, num_host_blocks, window), MAX_CHUNK
        )
        self.size, self.window, self.caching = block_size, window, caching

    def count(self, name):
        type(self).num_operations[name] += 1

    @property
    def seated(self):
        return sorted(self.tokens.keys() - self.swapped)

    def draw_seated(self, data):
        return data.draw(st.sampled_from(self.seated))

    def visible(self, request_id, end):
        """Return the positions below `end` to which the token at `end` may attend."""
        return range(0 if self.window is None else max(0, end - self.window + 1), end)

    def take_events(self):
        events = self.pool.take_events()
        self.known = [block for block in self.known if block not in events.evicted] + [*events.cached]
        assert len(set(self.known)) == len(self.known)

    def findable(self, tokens):
        """Return, for each full part of a prompt, the block that was cached first, as far as there is one."""
        found = []
        for end in range(self.size, len(tokens), self.size):
            whole = tuple(tokens[:end])
            holders = [block for block in self.known if self.device[block, self.size - 1] == whole]
            if not holders:
                break
            found.append(holders[0])
        return tuple(found)

    def copy(self, pairs, source, target):
        for read, written in pairs:
            for offset in range(self.size):
                target.pop((written, offset), None)
                if (read, offset) in source:
                    target[written, offset] = source[read, offset]

    def write(self, request_id, up_to):
        """Compute the tokens up to a place, as far as blocks for them can be had."""
        start = self.computed[request_id]
        up_to = min(up_to, start + MAX_CHUNK)
        if up_to <= start:
            return
        if start % self.size:
            before = self.pool.table(request_id)
            pairs = self.pool.copy_on_write(request_id, start // self.size)
            if pairs is None:
                assert self.pool.table(request_id) == before
                self.count("rejected")
                return
            self.copy(pairs, self.device, self.device)
            self.count("copied on write" if pairs else "written in place")
        before = self.pool.table(request_id)
        added = self.pool.allocate(request_id, up_to)
        if added is None:
            assert self.pool.table(request_id) == before
            self.count("rejected")
            return
        table, tokens = self.pool.table(request_id), self.tokens[request_id]
        assert table == before + added
        for position in range(start, up_to):
            block = table[position // self.size]
            holders = [other for other in self.seated if block in self.pool.table(other)]
            assert holders == [request_id], f"block {block} is written while {holders} refer to it"
            self.device[block, position % self.size] = tuple(tokens[: position + 1])
        self.computed[request_id] = up_to
        self.pool.cache_full_blocks(request_id, tokens, up_to)
        self.take_events()
        if self.caching:
            assert set(table[: up_to // self.size]) <= {*self.known, NULL_BLOCK}, "a copy is not cached"
        self.pool.remove_skipped_blocks(request_id, up_to)

    def begin(self, table, num_known, tokens):
        """Start a request on shared blocks that hold its first `num_known` tokens."""
        request_id = f"r{self.num_created}"
        num_copies = int(num_known % self.size > 0)
        if not self.pool.can_allocate(request_id, len(tokens), table, num_copies):
            self.count("rejected")
            return
        self.num_created += 1
        self.tokens[request_id], self.computed[request_id] = tokens, num_known
        self.pool.fork(request_id, table)
        self.write(request_id, num_known + 1)
        assert self.computed[request_id] == num_known + 1, "an admission was promised and then failed"

    @rule(tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=1, max_size=16))
    def admit(self, tokens):
        matched = self.pool.match(tokens)
        num_known = len(matched) * self.size
        assert num_known < len(tokens)
        assert matched == self.findable(tokens)
        for position in self.visible("", num_known):
            kept = self.device[matched[position // self.size], position % self.size]
            assert kept == tuple(tokens[: position + 1]), "a hit holds the KV of another prefix"
        num_lost = self.pool.num_skipped_blocks(num_known)
        self.begin((NULL_BLOCK,) * num_lost + matched[num_lost:], num_known, tokens)
        self.count("hit" if matched else "missed")

    @precondition(lambda self: self.seated)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data, token):
        parent = self.draw_seated(data)
        num_known = data.draw(st.integers(0, self.computed[parent]))
        table = self.pool.table(parent)[: self.pool.blocks_for(num_known)]
        num_lost = self.pool.num_skipped_blocks(num_known)
        if NULL_BLOCK in table[num_lost:]:
            return
        self.begin(
            (NULL_BLOCK,) * num_lost + table[num_lost:], num_known, [*self.tokens[parent][:num_known], token]
        )
        self.count("forked")

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def compute(self, data):
        request_id = self.draw_seated(data)
        self.write(request_id, data.draw(st.integers(1, len(self.tokens[request_id]))))

    @precondition(lambda self: self.seated)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        request_id = self.draw_seated(data)
        self.tokens[request_id].append(token)
        self.write(request_id, len(self.tokens[request_id]))
        self.count("appended")

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = self.draw_seated(data)
        before = self.pool.table(request_id), self.pool.num_held_host_blocks
        pairs = self.pool.move_to_host(request_id, self.computed[request_id])
        if pairs is None:
            assert (self.pool.table(request_id), self.pool.num_held_host_blocks) == before
            self.count("rejected")
            return
        self.copy(pairs, self.device, self.host)
        self.swapped.add(request_id)
        self.count("swapped out")

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.swapped)))
        before = self.pool.host_table(request_id)
        pairs = self.pool.move_to_device(request_id, len(self.tokens[request_id]))
        if pairs is None:
            assert not self.pool.table(request_id) and self.pool.host_table(request_id) == before
            self.count("rejected")
            return
        self.copy(pairs, self.host, self.device)
        self.swapped.discard(request_id)
        self.count("swapped in")

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.count("aborted on the host" if request_id in self.swapped else "freed")
        self.pool.free(request_id)
        self.swapped.discard(request_id)
        del self.tokens[request_id], self.computed[request_id]

    @invariant()
    def every_visible_token_is_where_the_table_says(self):
        self.pool.check()
        self.take_events()
        self.count("checked")
        for request_id, tokens in self.tokens.items():
            is_host = request_id in self.swapped
            memory = self.host if is_host else self.device
            table = self.pool.host_table(request_id) if is_host else self.pool.table(request_id)
            for position in self.visible(request_id, self.computed[request_id]):
                kept = memory.get((table[position // self.size], position % self.size))
                assert kept == tuple(tokens[: position + 1]), f"{request_id} lost its token {position}"

    @invariant()
    def counts_agree_with_the_tables(self):
        tables = [[b for b in self.pool.table(other) if b != NULL_BLOCK] for other in self.seated]
        held = {block for table in tables for block in table}
        assert self.pool.num_held_blocks == len(held)
        assert self.pool.num_shared_blocks == sum(map(len, tables)) - len(held)
        host = {block for other in self.swapped for block in self.pool.host_table(other)} - {NULL_BLOCK}
        assert self.pool.num_held_host_blocks == len(host)
        # What no request holds and no prefix names may be overwritten.
        kept = held | set(self.pool.cached_block_ids)
        self.device = {slot: known for slot, known in self.device.items() if slot[0] in kept}
        self.host = {slot: known for slot, known in self.host.items() if slot[0] in host}

    def teardown(self):
        if self.num_created:
            for request_id in sorted(self.tokens):
                self.pool.free(request_id)
            self.pool.check()
            assert self.pool.num_free_blocks == self.pool.num_blocks
            assert self.pool.num_held_host_blocks == 0


def main(num_wanted: int) -> None:
    """Walk until `num_wanted` operations are done and checked, and print the counts."""
    walk = settings(
        max_examples=200,
        stateful_step_count=50,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    round_number = 0
    while PoolAgainstMemory.num_operations["checked"] < num_wanted:
        machine = seed(round_number)(PoolAgainstMemory)
        run_state_machine_as_test(machine, settings=walk)
        round_number += 1
    counts = PoolAgainstMemory.num_operations
    print(f"{counts.pop('checked'):,} operations, each checked, 0 violations; among them:")
    for name, count in counts.most_common():
        print(f"{count:>10,} {name}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
