"""The block manager keeps every token of every request under any sequence of operations."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from pool_machine import PoolAgainstMemory

WALK = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def test_block_manager_keeps_every_token_whatever_is_shared_copied_moved_or_freed():
    PoolAgainstMemory.num_operations.clear()
    run_state_machine_as_test(PoolAgainstMemory, settings=WALK)
    # A walk that never shares, copies or swaps would prove nothing.
    done = PoolAgainstMemory.num_operations
    for name in ("hit", "forked", "copied on write", "swapped out", "swapped in", "aborted on the host"):
        assert done[name] > 20, f"{name}: {done[name]} times"
