"""How far a simulated run is from a real one, and durations that do not follow the computer's speed."""

from dataclasses import replace

import numpy as np
import pytest

from cbresearch import (
    CacheConfig,
    CostExecutor,
    Linear,
    Request,
    Scheduler,
    SchedulerConfig,
    policies,
    simulate,
)
from cbresearch.costs import Replayed
from cbresearch.experiments.simulation_error import (
    DriftCorrectedExecutor,
    calibration_probe,
    predict_run,
    simulation_error,
)
from cbresearch.serve import serve

LIMITS, POOL = SchedulerConfig(4, 64), CacheConfig(24)


def requests(gap):
    rng = np.random.default_rng(3)
    return [
        Request(str(n), int(rng.integers(1, 60)), 40, arrival=gap * n, output_length=int(rng.integers(1, 40)))
        for n in range(20)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "srpt", "static"])
def test_a_run_is_predicted_exactly_from_its_own_durations(policy):
    given = requests(0.05)
    trace = simulate(given, policy, cost=Linear(0.01, 0.001), scheduler=LIMITS, cache=POOL)
    # The lengths come from the run, not from what the requests say.
    hidden = [replace(request, output_length=None) for request in given]
    predicted = predict_run(trace, hidden, Replayed(step.duration for step in trace.steps))
    found = simulation_error(trace, predicted)
    assert set(found.latency) | set(found.ttft) | {found.makespan} == {0.0}
    assert found.equal_plans == 1
    assert len(found.latency) == len(given)


def test_the_errors_are_those_of_the_prediction_relative_to_the_measurement():
    trace = simulate(requests(0.0), cost=Linear(0.01), scheduler=LIMITS, cache=POOL)
    found = simulation_error(trace, predict_run(trace, requests(0.0), Linear(0.015)))
    np.testing.assert_allclose([*found.latency, *found.ttft, found.makespan], 0.5)
    assert found.equal_plans == 1
    apart = simulation_error(
        trace, simulate(requests(0.0), cost=Linear(0.01), scheduler=SchedulerConfig(2, 64))
    )
    assert apart.equal_plans < 0.1


def test_runs_of_different_requests_are_not_compared():
    trace = simulate(requests(0.0), scheduler=LIMITS)
    others = [replace(request, id=f"x{request.id}") for request in requests(0.0)]
    with pytest.raises(ValueError, match="did not serve the same requests"):
        simulation_error(trace, simulate(others, scheduler=LIMITS))


def test_drift_corrected_durations_do_not_follow_the_speed_of_the_computer():
    class Uneven(CostExecutor):
        """An executor on a computer that is three times slower from its tenth step on."""

        def execute(self, plan):
            self.speed = 1 if plan.step < 10 else 3
            result = super().execute(plan)
            return result._replace(duration=result.duration * self.speed)

    uneven = Uneven(Linear(0.01, 0.001))
    uneven.speed = 1
    paced = DriftCorrectedExecutor(uneven, lambda: 0.002 * uneven.speed, 0.002)
    trace = serve(requests(0.0), Scheduler(policies.get("fcfs"), LIMITS, POOL), paced)
    even = simulate(requests(0.0), cost=Linear(0.01, 0.001), scheduler=LIMITS, cache=POOL)
    ratios = np.array([a.duration / b.duration for a, b in zip(trace.steps, even.steps, strict=True)])
    # The median of three lags by one step.
    np.testing.assert_allclose(np.delete(ratios, 10), 1)


def test_calibration_probe_of_a_model_is_the_same_step_every_time():
    models = pytest.importorskip("cbresearch.models")
    ticks = iter(range(1000))
    measure = calibration_probe(models.load("tiny"), lambda: float(next(ticks)))
    assert measure() == measure() > 0
