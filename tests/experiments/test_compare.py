"""Comparisons: one call for the simulator and for models, its defaults, predictions and errors."""

import inspect

import pytest

from cbresearch import CacheConfig, Linear, Request, SchedulerConfig, metrics
from cbresearch.experiments import compare, default_cache
from cbresearch.metrics import Reporting, Slo

UNIT = Linear(1.0)


def test_progress_is_shown_unless_it_is_turned_off(monkeypatch, capsys):
    requests = [Request("a", 1, 3), Request("b", 1, 3)]
    for disable, is_shown in (("0", True), ("1", False)):
        monkeypatch.setenv("TQDM_DISABLE", disable)
        compare(requests, ["fcfs"], cost=UNIT)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert ("fcfs" in printed.err and "2/2" in printed.err) if is_shown else printed.err == ""


def test_the_classic_numbers_are_predicted_and_measured_alike():
    comparison = compare("classic60", ["static:release", "fcfs"], cost=UNIT, scheduler=SchedulerConfig(8))
    rows = {row.quantity: row for row in comparison.predictions}
    (static_steps,) = [row for name, row in rows.items() if name.startswith("static: steps")]
    (other_steps,) = [row for name, row in rows.items() if name.startswith("fcfs: steps")]
    assert static_steps[1:] == (91, 91)
    assert other_steps[1:] == (69, 69)
    assert static_steps.relative_error == 0
    (finite,) = [row for name, row in rows.items() if name.startswith("speed-up, this queue")]
    assert rows["static: utilization, this queue"].relative_error == pytest.approx(0)
    assert finite.predicted == pytest.approx(91 / 69)
    assert finite.measured == pytest.approx(91 / 69)


def test_a_policy_whose_steps_take_no_time_can_still_be_compared():
    comparison = compare("classic60", ["static", "fcfs"], cost=lambda plan: 0.0)
    assert [len(trace.served) for trace in comparison.traces.values()] == [60, 60]


def test_a_length_with_too_many_zeros_is_rejected_and_the_others_are_served():
    comparison = compare([Request("a", 10**15, 1), Request("b", 3, 2)], ["fcfs"], cost=UNIT)
    records = comparison.traces["fcfs"].requests
    assert [record.error is None for record in records] == [False, True]


def test_model_and_simulator_have_the_same_default_pool_with_prefix_caching(tiny):
    requests = [Request(str(n), tuple(range(3, 40)), 3) for n in range(3)]
    limits = SchedulerConfig(2)
    real = compare(requests, "fcfs", model=tiny, scheduler=limits).traces["fcfs"]
    simulated = compare(requests, "fcfs", cost=UNIT, scheduler=limits).traces["fcfs"]
    assert (real.origin.model, simulated.origin.model) == ("tiny", None)
    assert real.cache == simulated.cache == default_cache(requests, limits)
    assert real.cache == CacheConfig(2 * 3, 16, prefix_caching=True)
    assert [step.plan for step in real.steps] == [step.plan for step in simulated.steps]


@pytest.mark.parametrize(
    ("preemption", "options", "expected"),
    [
        ("recompute", {}, CacheConfig(3, 16, prefix_caching=True)),
        ("recompute", {"block_size": 4, "prefix_caching": False}, CacheConfig(10, 4)),
        ("recompute", {"num_blocks": 7, "num_host_blocks": 2}, CacheConfig(7, 16, True, 2)),
        ("swap", {}, CacheConfig(3, 16, True, 3)),
        ("swap", {"num_host_blocks": 0}, CacheConfig(3, 16, True, 0)),
    ],
)
def test_the_default_pool_never_runs_out_and_each_number_of_it_can_be_set(preemption, options, expected):
    requests = [Request("a", 30, 10), Request("b", 1, 1)]
    limits = SchedulerConfig(1, preemption=preemption)
    assert default_cache(requests, limits, **options) == expected
    sized = compare(
        requests, cost=UNIT, scheduler=limits, cache=lambda *known: default_cache(*known, **options)
    )
    assert {trace.cache for trace in sized.traces.values()} == {expected}


def test_any_pool_can_be_given_a_contiguous_one_too():
    pool = CacheConfig(64, 16, reservation="max")
    comparison = compare(
        "classic60", "fcfs", cost=UNIT, cache=pool, scheduler=SchedulerConfig(max_model_len=64)
    )
    assert comparison.traces["fcfs"].cache == pool


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("tiny", "chat24"), {}, "compare('tiny', 'chat24') has no model or cost"),
        (("tiny", "chat24", ["fcfs"]), {}, "compare('tiny', 'chat24', ['fcfs']) has no model or cost"),
        (("chat24", ["fcfs"]), {"model": "tiny", "cost": UNIT}, "has both model and cost"),
        (("chat24", ["fcfs"], UNIT), {"cost": UNIT}, "all else by name"),
    ],
    ids=["old order", "old order, policies", "both", "without a name"],
)
def test_a_call_that_cannot_be_understood_says_what_to_write(arguments, options, said):
    with pytest.raises(TypeError) as rejected:
        compare(*arguments, **options)
    for part in (said, 'compare("chat24", ["static", "fcfs"], model="tiny")', "cost=Linear(0.01)"):
        assert part in str(rejected.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 3}, "model is 3; give a name such as 'tiny'"),
        ({"cost": UNIT, "scheduler": 8}, "scheduler is 8; give a SchedulerConfig("),
        ({"cost": UNIT, "cache": 64}, "cache is 64; give a CacheConfig("),
    ],
    ids=["model", "scheduler", "cache"],
)
def test_compare_names_an_option_of_a_wrong_kind_and_the_remedy(options, said):
    with pytest.raises(TypeError) as rejected:
        compare("classic60", ["fcfs"], **options)
    assert said in str(rejected.value)


def test_no_run_knows_a_price_and_tables_do():
    assert not {"slo", "price_per_hour", "currency"} & set(inspect.signature(compare).parameters)
    comparison = compare("classic60", ["fcfs"], cost=UNIT)
    plain, priced = comparison.kpi_frame(), comparison.kpi_frame(Reporting(Slo(ttft=30.0), 3.6, "CHF"))
    assert set(priced.index) - set(plain.index) == {
        "kept the SLO (%)",
        "goodput (requests/s)",
        "cost per million output tokens (CHF)",
        "cost per million total tokens (CHF)",
    }
    assert metrics.summary(comparison.traces["fcfs"])["num_finished"] == 60
    with pytest.raises(ValueError, match="price_per_hour is -1; it must be a finite number, 0 or more"):
        Reporting(price_per_hour=-1)
