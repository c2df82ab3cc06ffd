"""Calls that cannot work are refused before any run, with the value and the remedy."""

import errno
import re
import sys

import joblib
import pytest

from cbresearch import CacheConfig, Linear, Request, SchedulerConfig, policies
from cbresearch.cluster import Handover, ReplicaConfig, simulate_cluster
from cbresearch.experiments import capacity, compare, sweep
from cbresearch.metrics import Reporting, Slo

UNIT = Linear(1.0)
POOL = CacheConfig(64)
LIMITS = SchedulerConfig()


def draw(rng):
    return [Request(str(n), 3, 2) for n in range(4)]


def at_rate(rate, rng):
    return [Request(str(n), 1, 1, n / rate) for n in range(20)]


def never(plan):
    raise AssertionError("a run began")


COMPARE = [
    ({"workload": None}, "the requests are None; give a list of requests"),
    ({"workload": Request("a", 1, 1)}, "give a list of requests, such as [Request("),
    (
        {"workload": [Request("a", 1, 1), {"prompt": 3}]},
        "entry 1 of the requests is {'prompt': 3}; give a",
    ),
    ({"workload": ["Hello"]}, "entry 0 of the requests is 'Hello'; give a list of requests"),
    ({"policies": 3}, "the policy is 3; give the name"),
    ({"policies": policies.Policy}, "give the name of one, or a policy built from its class"),
    ({"policies": [None]}, "the policy is None; give the name"),
    ({"policies": []}, "no policy is given"),
    ({"cost": 3}, "cost is 3; give a function from a Plan to seconds"),
    ({"cost": "linear:1"}, "cost is 'linear:1'; give a function"),
    ({"seed": "x"}, "seed is 'x'; it must be an integer of at least 0"),
    ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
    ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
    ({"scheduler": 8}, "scheduler is 8; give a SchedulerConfig("),
    ({"cache": 64}, "cache is 64; give a CacheConfig("),
]
SWEEP = [
    ({"workloads": 3}, "the workload 3 is neither a name nor a function"),
    ({"policies": 3}, "the policy is 3; give the name"),
    ({"policies": ["fcfs", None]}, "the policy is None; give the name"),
    ({"policies": [policies.Policy]}, "give the name of one, or a policy built from its class"),
    ({"cost": 3}, "cost is 3; give a function"),
    ({"scheduler": 8}, "scheduler is 8; give a SchedulerConfig("),
    ({"cache": 64}, "cache is 64; give a CacheConfig("),
    ({"cache": [POOL, 8]}, "cache is 8; give a CacheConfig("),
    ({"seeds": 3}, "seeds is 3; give several"),
    ({"slo": (1, 2)}, "slo is (1, 2); give a Slo("),
    ({"n_jobs": "two"}, "n_jobs is 'two'; give a number of processes"),
    ({"n_jobs": 0}, "n_jobs is 0; give a number of processes"),
]
CAPACITY = [
    ({"workload": "chat"}, "workload is 'chat'; give f(rate, rng)"),
    ({"policy": 3}, "the policy is 3; give the name"),
    ({"policy": policies.Policy}, "a policy built from its class"),
    ({"slo": (1, 2)}, "slo is (1, 2); give a Slo("),
    ({"slo": None}, "slo is None; give an Slo("),
    ({"attainment": "most"}, "attainment is 'most'; it must be a number from 0 to 1"),
    ({"start": "1"}, "start is '1'; it must be a positive number"),
    ({"tolerance": None}, "tolerance is None; it must be a positive number"),
    ({"max_doublings": "many"}, "max_doublings is 'many'; it must be a positive number"),
    ({"cost": 3}, "cost is 3; give a function"),
    ({"scheduler": 8}, "scheduler is 8; give a SchedulerConfig("),
    ({"cache": [POOL]}, "give a CacheConfig("),
    ({"n_jobs": 1.5}, "n_jobs is 1.5; give a number of processes"),
]


@pytest.mark.parametrize(
    ("function", "right", "changes", "said"),
    [
        *((compare, {"workload": draw(0), "policies": "fcfs", "cost": never}, *case) for case in COMPARE),
        *((sweep, {"workloads": draw, "policies": "fcfs", "cost": never}, *case) for case in SWEEP),
        *((capacity, {"workload": at_rate, "slo": Slo(1), "cost": never}, *case) for case in CAPACITY),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else getattr(value, "__name__", ""),
)
def test_a_wrong_argument_is_refused_before_any_run_with_the_remedy(function, right, changes, said):
    given = {**right, **changes}
    first = [given.pop(name) for name in ("workload", "workloads", "policies") if name in given]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        function(*first, **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Reporting(slo=(1, 2)), "slo is (1, 2); give an Slo"),
        (
            lambda: Reporting(price_per_hour="3"),
            "price_per_hour is '3'; it must be a finite number",
        ),
        (lambda: Slo(ttft="1"), "ttft is '1'; it must be a positive number of seconds"),
        (lambda: Slo(tpot=(1,)), "tpot is (1,); it must be a positive number of seconds"),
        (lambda: Handover(latency="1"), "latency is '1'"),
        (lambda: Handover(bandwidth="1"), "bandwidth is '1'"),
        (lambda: Handover(bandwidth=0), "bandwidth is 0"),
        (lambda: ReplicaConfig(3, LIMITS, POOL), "cost is 3; give a function"),
        (lambda: ReplicaConfig(UNIT, 8, POOL), "scheduler is 8; give a SchedulerConfig("),
        (lambda: ReplicaConfig(UNIT, LIMITS, 64), "cache is 64; give a CacheConfig("),
        (lambda: simulate_cluster([3], [ReplicaConfig(UNIT, LIMITS, POOL)]), "entry 0 of the requests is 3"),
        (lambda: simulate_cluster(draw(0), [3]), "replica is 3; give a ReplicaConfig("),
        (lambda: compare(draw(0), "fcfs", cost=UNIT).kpi(Slo(1)), "give a Reporting(slo=Slo("),
    ],
)
def test_a_wrong_part_is_refused_when_it_is_built_with_the_remedy(make, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        make()


def test_a_cluster_of_generators_is_that_of_lists():
    replica = ReplicaConfig(UNIT, LIMITS, POOL)
    ran = simulate_cluster(iter(draw(0)), iter([replica, replica]))
    assert ran == simulate_cluster(draw(0), [replica, replica])
    assert {route for routes in ran.routes.values() for route in routes} == {0, 1}


def test_a_comparison_of_generators_is_that_of_lists():
    one = compare(iter(draw(0)), iter(["static", "fcfs"]), cost=UNIT)
    assert one.traces == compare(draw(0), ["static", "fcfs"], cost=UNIT).traces


def test_a_file_of_which_no_line_can_be_read_is_refused_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "?"}\n' * 30)
    with pytest.raises(ValueError, match=r"'other.jsonl': no line of 30 can be read: line 1.*line 3"):
        compare(path, "fcfs", model="org/model-that-is-nowhere")


def test_a_sweep_into_a_folder_that_is_a_file_is_refused_first(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"folder '.*taken' cannot be written \(File exists\); name another"):
        sweep(draw, "fcfs", cost=never, folder=tmp_path / "taken")


def test_a_disk_that_fills_up_during_a_sweep_keeps_what_was_computed(tmp_path, monkeypatch):
    expected = sweep(draw, ["static", "fcfs"], seeds=range(3))
    store, module = joblib._store_backends.FileSystemStoreBackend, sys.modules["cbresearch.experiments.sweep"]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def run_all(*arguments, run_all=module.run_all):
        for name in ("create_location", "_move_item", "get_cached_func_code", "store_cached_func_code"):
            monkeypatch.setattr(store, name, full)
        monkeypatch.setattr(joblib.memory, "_FUNCTION_HASHES", {})
        return run_all(*arguments)

    monkeypatch.setattr(module, "run_all", run_all)
    found = sweep(draw, ["static", "fcfs"], seeds=range(3), folder=tmp_path)
    assert found.runs == expected.runs
    assert not found.failed
