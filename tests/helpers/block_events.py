"""A run beside the block tables that its executor saw."""

from cbresearch import policies
from cbresearch.costs import Linear
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor

NULL = -1


class Watching(CostExecutor):
    """Write down the block table of each scheduled request before its step is computed."""

    def __init__(self, cost, scheduler):
        super().__init__(cost)
        self.scheduler = scheduler
        self.seen = []

    def execute(self, plan):
        self.seen.append(
            {entry.request_id: self.scheduler.kv.table(entry.request_id) for entry in plan.scheduled}
        )
        return super().execute(plan)


def recorded(requests, policy="fcfs", limits=None, cache=None, between=None, cost=None):
    """Serve requests step by step; return the trace, and the scheduled requests' tables by step."""
    scheduler = Scheduler(policies.get(policy) if isinstance(policy, str) else policy, limits, cache)
    executor = Watching(cost or Linear(step=1.0), scheduler)
    on_step = None if between is None else lambda record: between(scheduler, record)
    return serve(requests, scheduler, executor, on_step=on_step, fast_forward=False), executor.seen
