"""How well the simulator predicts a real run, on a computer whose speed changes while it is measured."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cbresearch import metrics
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.policies import Policy
from cbresearch.request import Rejected, Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Executor, serve
from cbresearch.simulator import CostExecutor, policy_of
from cbresearch.step import Admission, Plan, Scheduled, StepResult
from cbresearch.trace import Trace

if TYPE_CHECKING:
    from cbresearch.models import LoadedModel

_NUM_ROWS, _CONTEXT, _CHUNK = 4, 64, 16


class SimulationError(NamedTuple):
    """The relative errors of a simulated run against the real one, predicted / measured - 1.

    Attributes:
        latency: Error of each complete request's end-to-end latency.
        ttft: Error of each answered request's time to first token.
        makespan: Error of the run's makespan.
        equal_plans: Share of the steps whose plans are equal, of the longer run's.
    """

    latency: tuple[float, ...]
    ttft: tuple[float, ...]
    makespan: float
    equal_plans: float


def simulation_error(measured: Trace, predicted: Trace) -> SimulationError:
    """Compare a simulated run with the real run of the same requests.

    Args:
        measured: The real run.
        predicted: The simulated one.

    Raises:
        ValueError: A run answered no request, or they served different requests.
    """
    pairs = list(zip(measured.requests, predicted.requests, strict=True))
    real_span, span = metrics.makespan(measured), metrics.makespan(predicted)
    if real_span is None or span is None or any(one.id != other.id for one, other in pairs):
        raise ValueError("the two runs did not serve the same requests, or answered none")

    def errors(name: str) -> tuple[float, ...]:
        both = ((getattr(one, name), getattr(other, name)) for one, other in pairs)
        return tuple(ours / real - 1 for real, ours in both if real and ours)

    plans = [one.plan == other.plan for one, other in zip(measured.steps, predicted.steps, strict=False)]
    share = sum(plans) / max(len(measured.steps), len(predicted.steps))
    return SimulationError(errors("latency"), errors("ttft"), span / real_span - 1, share)


def predict_run(
    trace: Trace,
    requests: Iterable[Request | Rejected],
    cost: CostModel,
    policy: str | Policy | None = None,
) -> Trace:
    """Simulate the requests of a real run with its limits, its pool, and the lengths of its outputs.

    Args:
        trace: The real run; of its times nothing is used.
        requests: Its requests, in the order in which they were given.
        cost: The step time.
        policy: Its policy; by default the one of that name.

    Raises:
        ValueError: As for `simulator.policy_of`.
    """
    named = policy_of(trace, policy)
    known = [
        replace(request, output_length=len(record.tokens))
        if isinstance(request, Request) and record.tokens
        # Whatever it failed of, it got nothing.
        else Rejected(request.id, record.error or "it got no token", request.arrival)
        for request, record in zip(requests, trace.requests, strict=True)
    ]
    scheduler = Scheduler(named, trace.scheduler, trace.cache)
    return serve(known, scheduler, CostExecutor(cost, trace.outputs))


class DriftCorrectedExecutor:
    """Carry out plans on another executor, and correct the durations for changes of the computer's speed.

    What else runs on a computer slows all of a process down, in its CPU seconds too, for seconds at a time.
    So a calibration probe, a fixed piece of work, is timed after each step, and the step's duration is
    divided by how much longer than usual the probe took, in the median of its last three times.

    Args:
        executor: What carries out the plans.
        probe: Does the fixed work and returns the seconds that it took.
        usual: Seconds that it usually takes; the same for all runs that are to be compared.
    """

    def __init__(self, executor: Executor, probe: Callable[[], float], usual: float) -> None:
        self.executor = executor
        self._probe, self._usual = probe, usual
        self._recent: deque[float] = deque([probe(), probe()], maxlen=3)

    def check(self, request: Request) -> None:
        """Reject what the other executor rejects."""
        self.executor.check(request)

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step."""
        result = self.executor.execute(plan)
        self._recent.append(self._probe())
        return result._replace(duration=result.duration * self._usual / median(self._recent))


def calibration_probe(
    loaded: "LoadedModel", clock: Callable[[], float] = time.thread_time
) -> Callable[[], float]:
    """Return a function that runs one fixed small step of a model and returns the seconds that it took.

    Args:
        loaded: The model.
        clock: Seconds; by default those in which this thread had a core, whatever else the computer does.
    """
    from cbresearch.engine import ModelExecutor

    rng = np.random.default_rng(0)
    executor = ModelExecutor(
        loaded, SchedulerConfig(_NUM_ROWS), CacheConfig(_NUM_ROWS, 2 * _CONTEXT), clock=clock, fill=0.0
    )
    rows = []
    for seat in range(_NUM_ROWS):
        prompt = tuple(rng.integers(1, 256, _CONTEXT).tolist())
        request = Request(str(seat), prompt, _CONTEXT)
        whole = Scheduled(request.id, seat, 0, _CONTEXT, True, True, (seat,))
        executor.execute(Plan(0, (whole,), (Admission(request, seat, ()),)))
        number = _CHUNK if seat == 0 else 1
        rows.append(Scheduled(request.id, seat, _CONTEXT - number, number, seat == 0, True, ()))
    plan = Plan(1, tuple(rows))
    return lambda: executor.execute(plan).duration
