"""The clock of measured runs: policies take turns, and where other work disturbs it, that is said."""

import json
from dataclasses import replace

import pytest

from cbresearch import CacheConfig, Linear, Request, SchedulerConfig, engine, simulate, viz
from cbresearch.experiments import compare
from cbresearch.experiments.clock import MOST_SLOWDOWN, caution, slowdowns
from cbresearch.trace import Origin

REQUESTS = [Request(str(n), tuple(range(3, 9)), 40) for n in range(8)]
COST = Linear(0.01, 0.001, 1e-6)


def run(policy="fcfs", disturbed=lambda place: 1.0):
    trace = simulate(REQUESTS, policy, cost=COST, scheduler=SchedulerConfig(4), cache=CacheConfig(400, 4))
    now, steps = 0.0, []
    for place, step in enumerate(trace.steps):
        steps.append(replace(step, start=now, duration=step.duration * disturbed(place)))
        now = steps[-1].end
    return replace(trace, steps=tuple(steps), origin=Origin(model="tiny"))


@pytest.mark.parametrize(
    ("disturbed", "least", "most"),
    [
        (lambda place: 1.0, 1.0, 1.05),
        (lambda place: 1 + 0.1 * (place % 2), 1.0, 1.12),
        (lambda place: 300.0 if place == 40 else 1.0, 3.0, 12.0),
        (lambda place: 2.0 if place % 2 else 1.0, 1.4, 1.6),
        (lambda place: 7.0, 4.0, 7.1),
    ],
    ids=["quiet", "a tenth", "one step of seconds", "half of the steps", "all steps of one run"],
)
def test_a_disturbed_run_is_told_from_a_quiet_one_by_its_like_steps(disturbed, least, most):
    found = slowdowns({"quiet": run(), "other": run(disturbed=disturbed)})
    assert 0.95 < found["quiet"] < 1.05
    assert least <= found["other"] <= most
    assert ("other" in caution(found)) == (most > MOST_SLOWDOWN)
    assert "quiet" not in caution({name: found[name] for name in ("quiet",)})


def test_runs_of_different_policies_are_held_against_each_other():
    found = slowdowns({"static": run("static", lambda place: 5.0), "fcfs": run("fcfs")})
    assert found["static"] > 2 > found["fcfs"]


def test_where_no_steps_are_alike_nothing_is_said():
    single = replace(run(), steps=tuple(run().steps[:3]))
    assert slowdowns({"short": single}) == {"short": None}
    assert slowdowns({"none": replace(single, steps=())}) == {"none": None}
    assert slowdowns({}) == {}
    assert caution({"short": None}) == ""


def test_table_report_and_results_say_that_the_clock_was_disturbed(tmp_path, tiny, monkeypatch):
    executed = engine.ModelExecutor.execute
    count = iter(range(10**6))

    def execute(self, plan):
        result = executed(self, plan)
        return result._replace(duration=5.0 if next(count) % 7 == 6 else 0.01)

    monkeypatch.setattr(engine.ModelExecutor, "execute", execute)
    comparison = compare(REQUESTS, ["static", "fcfs"], model=tiny, scheduler=SchedulerConfig(4))
    assert "disturbed" in comparison.caution
    (row,) = [row for row in comparison.kpi() if row.name.startswith("step time over")]
    assert all(float(value) > 10 for value in row.values)
    comparison.write(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["caution"] == comparison.caution
    assert all(run["metrics"]["slowdown_over_like_steps"] > 10 for run in results["runs"])
    told = {"note": comparison.caution, "kpi": comparison.kpi()}
    page = viz.write_report(tmp_path / "r.html", title="t", traces=comparison.traces, **told)
    assert "The clock was disturbed" in page.read_text(encoding="utf-8")


def test_equal_schedules_compare_equal_on_a_computer_that_slows_down(tiny, monkeypatch):
    # Whatever the first 60 steps are, they take seven times as long.
    executed = engine.ModelExecutor.execute
    order = []

    def execute(self, plan):
        order.append(id(self))
        return executed(self, plan)._replace(duration=0.07 if len(order) <= 60 else 0.01)

    monkeypatch.setattr(engine.ModelExecutor, "execute", execute)
    comparison = compare(REQUESTS, ["fcfs", "lpm"], model=tiny, scheduler=SchedulerConfig(4))
    spans = [trace.duration for trace in comparison.traces.values()]
    assert [len(trace.steps) for trace in comparison.traces.values()] == [80, 80]
    assert max(spans) / min(spans) < 1.01
    assert len(set(order[:2])) == 2


def test_policies_of_large_pools_serve_one_after_the_other(tiny, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["cbresearch.experiments.compare"], "_MOST_POOL_BYTES", 1)
    order = []
    executed = engine.ModelExecutor.execute
    monkeypatch.setattr(
        engine.ModelExecutor, "execute", lambda self, plan: (order.append(id(self)), executed(self, plan))[1]
    )
    comparison = compare(REQUESTS, ["fcfs", "static"], model=tiny, scheduler=SchedulerConfig(4))
    assert list(comparison.traces) == ["fcfs", "static"]
    first = len(comparison.traces["fcfs"].steps)
    assert len(set(order[:first])) == len(set(order[first:])) == 1


def test_steps_come_before_seconds():
    comparison = compare("classic60", ["static", "fcfs"], cost=Linear(1.0))
    assert [row.name for row in comparison.kpi()][:3] == ["steps", "mean occupancy", "utilization"]
    names = [row.quantity for row in comparison.predictions]
    first = names.index("speed-up in steps, this queue")
    assert all(not name.startswith("speed-up,") for name in names[:first])
    row = comparison.predictions[first]
    assert row.measured == row.predicted == pytest.approx(91 / 69)


def test_runs_that_take_turns_are_the_runs_by_themselves_in_the_order_of_the_policies(tiny):
    policies = ["static", "fcfs", "lpm", "sjf"]
    limits = SchedulerConfig(3)
    together = compare(REQUESTS, policies, model=tiny, scheduler=limits)
    assert list(together.traces) == policies
    for policy in policies:
        alone = compare(REQUESTS, policy, model=tiny, scheduler=limits).traces[policy]
        assert [step.plan for step in together.traces[policy].steps] == [step.plan for step in alone.steps]
        assert together.traces[policy].outputs == alone.outputs
