"""The block manager keeps every token of every request under any sequence of operations."""

from hypothesis import settings
from pool_machine import PoolAgainstMemory

TestPoolAgainstMemory = PoolAgainstMemory.TestCase
TestPoolAgainstMemory.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_the_walk_does_all_that_it_is_meant_to():
    """A walk that never shares, copies or swaps would prove nothing."""
    PoolAgainstMemory.num_operations.clear()
    PoolAgainstMemory.TestCase("runTest").runTest()
    done = PoolAgainstMemory.num_operations
    for name in ("hit", "forked", "copied on write", "swapped out", "swapped in", "aborted on the host"):
        assert done[name] > 20, f"{name}: {done[name]} times"
