"""Runs whose records carry block events, derived from the block manager's own state after each step."""

from dataclasses import dataclass, fields

from cbresearch import policies
from cbresearch.costs import Linear
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.trace import StepRecord
from cbresearch.viz.columns import BlockEvents

NULL, NO_EVENTS = -1, BlockEvents()


@dataclass(frozen=True, slots=True)
class Eventful(StepRecord):
    """A step with its block events."""

    events: BlockEvents = NO_EVENTS


class Watched(Scheduler):
    """Write down both pools in each step, before the finished requests give back their blocks."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
        self._noted = True

    def _note(self):
        if not self._noted:
            self._noted = True
            ids = [state.id for state in (*self._running, *self._kept)]
            device = {name: self.blocks.table(name) for name in ids if self.blocks.table(name)}
            host = {state.id: self.blocks.host_table(state.id) for state in self.swapped}
            self.seen.append((device, host, frozenset(getattr(self.blocks, "cached_block_ids", ()))))

    def commit(self, plan, result, now):
        self._noted = False
        committed = super().commit(plan, result, now)
        self._note()
        return committed

    def _finish(self, finished):
        self._note()
        super()._finish(finished)


def recorded(requests, policy="fcfs", limits=None, cache=None, between=None, cost=None):
    """Serve requests; return the trace, and (device tables, host tables, cached blocks) by step."""
    scheduler = Watched(policies.get(policy) if isinstance(policy, str) else policy, limits, cache)
    on_step = None if between is None else lambda record: between(scheduler, record)
    executor = CostExecutor(cost or Linear(step=1.0))
    trace = serve(requests, scheduler, executor, on_step=on_step, fast_forward=False)
    steps = []
    findable: set[int] = set()
    before: tuple = ({}, {}, frozenset())
    for record, state in zip(trace.steps, scheduler.seen, strict=True):
        (_, hosted, _), (device, host, cached) = before, state
        held = {block for table in device.values() for block in table}
        evicted = findable - cached - held
        tables = {name: list(table) for name, table in before[0].items()}
        for entry in record.plan.scheduled:
            is_new = entry.request_id in {admission.request.id for admission in record.plan.admitted}
            tables[entry.request_id] = [*([] if is_new else tables[entry.request_id]), *entry.new_block_ids]
        released = [
            (name, block)
            for name, table in device.items()
            for block, now in zip(tables[name], table, strict=True)
            if now == NULL != block
        ]
        host_held = [
            (name, block) for name, table in host.items() if hosted.get(name) != table for block in table
        ]
        gone = {b for table in hosted.values() for b in table} - {b for table in host.values() for b in table}
        events = BlockEvents(
            tuple(sorted(cached - findable)),
            tuple(sorted(evicted)),
            (),
            tuple(released),
            tuple(pair for pair in host_held if pair[1] != NULL),
            tuple(sorted(gone)),
        )
        findable = (findable | cached) - evicted
        before = state
        values = {one.name: getattr(record, one.name) for one in fields(StepRecord)}
        steps.append(Eventful(**values, events=events))
    return replaced(trace, tuple(steps)), scheduler.seen


def replaced(trace, steps):
    """Return a trace with other steps."""
    return type(trace)(trace.policy, trace.scheduler, trace.cache, steps, trace.requests)
