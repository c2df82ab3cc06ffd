"""Sweeps: every run depends on its own point alone, is kept, and is never computed twice."""

import csv
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time

import joblib
import numpy as np
import pytest
from hygiene import ROOT

from cbresearch import CacheConfig, Linear, Request, SchedulerConfig, metrics, policies, simulate
from cbresearch.experiments import compare, sweep
from cbresearch.experiments.fingerprint import fingerprint
from cbresearch.metrics import Slo

NUM_RUNS = 64


@pytest.fixture(autouse=True)
def no_bars(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def ten(rng):
    return [Request(str(n), int(rng.integers(1, 30)), int(rng.integers(1, 9)), n * 0.5) for n in range(10)]


def twelve(rng):
    return [*ten(rng), Request("x", 3, 3), Request("y", 3, 3)]


class Broken(policies.Policy):
    """Give up in the third step."""

    name = "broken"

    def begin(self):
        self.num_steps = 0

    def propose(self, view):
        self.num_steps += 1
        if self.num_steps == 3:
            raise ZeroDivisionError("the third step")
        return super().propose(view)


class Remembering(policies.Policy):
    """Serve one request more of the batch than in the run before: what no policy should do."""

    name = "remembering"

    def __init__(self):
        self.num_runs = 0

    def begin(self):
        self.num_runs += 1

    def propose(self, view):
        for request, num_tokens in super().propose(view):
            if len(view.running) < self.num_runs or request in view.running:
                yield request, num_tokens


def table(result):
    return [run.row() for run in result.runs]


# --- the grid


def test_a_run_is_what_a_simulation_of_its_point_gives():
    limits = [SchedulerConfig(max_num_seqs=2), SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)]
    pools = [None, CacheConfig(12, 4, prefix_caching=True)]
    cost, slo = Linear(0.01, 0.002), Slo(ttft=0.2)
    result = sweep(
        ten, ["fcfs", "static:release"], cost=cost, scheduler=limits, cache=pools, seeds=[3, 5], slo=slo
    )
    places = [(run.policy, run.scheduler, run.cache, run.seed) for run in result.runs]
    assert places == [
        (policy, limit, pool, seed)
        for policy in ("fcfs", "static:release")
        for limit in limits
        for pool in pools
        for seed in (3, 5)
    ]
    for run in result.runs:
        trace = simulate(
            ten(np.random.default_rng(run.seed)),
            run.policy,
            cost=cost,
            scheduler=run.scheduler,
            cache=run.cache,
        )
        expected = metrics.summary(trace)
        expected["slo_attainment"] = metrics.slo_attainment(trace, slo)
        expected["goodput_requests_per_s"] = metrics.goodput(trace, slo)
        assert run.metrics == expected
        assert run.error is None


def test_a_preset_gives_what_compare_gives_for_the_same_seed():
    comparison = compare("lognormal128", "sjf", cost=Linear(1.0), seed=4)
    (run,) = sweep("lognormal128", "sjf", seeds=[4]).runs
    pool = {"mean_pool_use"} | {name for name in run.metrics if name.startswith("kv_")}
    expected = metrics.summary(comparison.traces["sjf"])
    assert {k: v for k, v in run.metrics.items() if k not in pool} == {
        k: v for k, v in expected.items() if k not in pool
    }


def test_a_run_depends_on_neither_its_order_nor_its_company():
    many = sweep([ten, twelve], ["fcfs", Remembering()], seeds=range(4))
    backwards = sweep([twelve, ten], [Remembering(), "fcfs"], seeds=[3, 2, 1, 0])
    assert sorted(map(str, table(many))) == sorted(map(str, table(backwards)))
    (alone,) = sweep(twelve, Remembering(), seeds=[2]).runs
    assert alone in many.runs


def test_a_bad_point_fails_alone_and_its_error_is_in_the_table():
    result = sweep(["classic60", "clasic60", "fails"], ["fcfs", "fcsf", Broken()], seeds=[0])
    errors = {(run.workload, run.policy): run.error for run in result.runs}
    assert errors.pop(("classic60", "fcfs")) is None
    assert "'fcfs'" in errors[("classic60", "fcsf")]
    assert "policy 'broken'" in errors[("classic60", "broken")]
    assert "ZeroDivisionError: the third step" in errors[("classic60", "broken")]
    assert "'classic60'" in errors[("clasic60", "fcfs")]
    assert all(errors.values())
    assert len(result.failed) == 8
    assert all(run.metrics == {} for run in result.failed)


def test_a_draw_that_ends_the_process_fails_alone():
    def leaves(rng):
        sys.exit(5)

    result = sweep([leaves, ten], ["fcfs"], seeds=[0])
    assert [run.error for run in result.runs] == ["SystemExit: 5", None]


def test_a_policy_that_cannot_be_sent_to_a_worker_fails_alone():
    policy = policies.get("sjf")
    policy.lock = threading.Lock()
    result = sweep(ten, {"fine": "fcfs", "locked": policy}, seeds=[0])
    assert [run.error is None for run in result.runs] == [True, False]
    assert "lock" in result.runs[1].error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": []}, ["no policy is given"]),
        ({"policies": ["fcfs", "sjf", "fcfs"]}, ["policy 'fcfs'", "twice"]),
        ({"workloads": lambda rng: []}, ["has no name", "'mine'"]),
        ({"workloads": [Request("a", 1, 1)]}, ["Request", "neither a name nor a function"]),
        ({"workloads": {}}, ["no workload is given"]),
        ({"scheduler": []}, ["no SchedulerConfig is given"]),
        ({"cache": [None, None]}, ["CacheConfig None is given twice"]),
        ({"seeds": 5}, ["seeds is 5", "range(5)"]),
        ({"seeds": [1, 1]}, ["seed 1 is given twice"]),
        ({"seeds": [-1]}, ["a seed is -1"]),
        ({"seeds": [0.5]}, ["a seed is 0.5"]),
    ],
)
def test_a_grid_that_cannot_be_is_rejected_with_the_value(changes, said):
    with pytest.raises(ValueError) as rejected:
        sweep(**{"workloads": ten, "policies": "fcfs", **changes})
    for part in said:
        assert part in str(rejected.value)


# --- the table


def test_the_summary_is_the_interval_over_seeds_of_each_cell():
    limits = [SchedulerConfig(max_num_seqs=2), SchedulerConfig(max_num_seqs=5)]
    result = sweep(ten, ["fcfs", Broken()], scheduler=limits, seeds=range(4))
    summary = result.summary("ttft_p99_s", confidence=0.9)
    assert list(summary.columns) == [
        "workload",
        "policy",
        "max_num_seqs",
        "metric",
        "mean",
        "low",
        "high",
        "n",
    ]
    assert list(summary["n"]) == [4, 4, 0, 0]
    for row, seats in zip(summary.itertuples(), (2, 5), strict=False):
        values = [run.metrics["ttft_p99_s"] for run in result.runs[:8] if run.scheduler.max_num_seqs == seats]
        assert (row.mean, row.low, row.high, row.n) == metrics.mean_interval(values, 0.9)
    with pytest.raises(ValueError, match="'ttft_p99_s'"):
        result.summary("ttft_p99")


def test_files_have_units_in_their_columns_one_row_a_run_and_the_environment(tmp_path):
    result = sweep(ten, ["fcfs", "fcsf"], seeds=[0, 1], cost=Linear(0.5))
    result.write(tmp_path)
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(set(result.columns)) == len(result.columns)
    assert tuple(rows[0]) == result.columns == tuple(result.frame().columns)
    assert {"workload", "policy", "max_num_seqs", "num_blocks", "seed", "makespan_s", "error"} <= set(rows[0])
    assert [row["seed"] for row in rows] == ["0", "1", "0", "1"]
    assert [float(row["makespan_s"]) for row in rows[:2]] == [
        run.metrics["makespan_s"] for run in result.runs[:2]
    ]
    assert rows[2]["makespan_s"] == "" != rows[2]["error"]
    written = json.loads((tmp_path / "results.json").read_text())
    assert {"cost", "seeds", "cbresearch", "numpy", "platform"} <= set(written["environment"])
    assert len(written["runs"]) == 4


# --- in parallel


def test_processes_and_pools_without_early_results_give_the_same_table():
    class Local(policies.Policy):
        """Known in this function only."""

        name = "local"

    def local(rng):
        return ten(rng)

    policy = [Local(), "sjf"]
    alone = sweep(local, policy, seeds=range(3))
    assert table(sweep(local, policy, seeds=range(3), n_jobs=2)) == table(alone)
    with joblib.parallel_config("threading", n_jobs=2):
        assert table(sweep(local, policy, seeds=range(3))) == table(alone)

    class Pool(joblib._parallel_backends.ThreadingBackend):
        """Like Ray's: it hands over nothing before the end."""

        supports_return_generator = False

    joblib.register_parallel_backend("pool", Pool)
    with joblib.parallel_config("pool", n_jobs=2):
        assert table(sweep(local, policy, seeds=range(3))) == table(alone)


# --- kept runs


def test_a_kept_run_is_not_computed_again_and_a_wider_sweep_computes_only_what_is_new(tmp_path):
    first = sweep(ten, ["fcfs", "sjf"], seeds=range(3), folder=tmp_path)
    again = sweep(ten, ["fcfs", "sjf"], seeds=range(3), folder=tmp_path)
    assert (first.num_computed, again.num_computed) == (6, 0)
    assert again.runs == first.runs
    wider = sweep([ten, twelve], {"mine": "sjf", "fcfs": "fcfs"}, seeds=range(4), folder=tmp_path)
    assert wider.num_computed == 16 - 6
    assert {run.metrics["makespan_s"] for run in first.runs} <= {
        run.metrics["makespan_s"] for run in wider.runs
    }


def test_a_run_that_failed_is_tried_again(tmp_path):
    for _ in range(2):
        result = sweep(ten, ["fcfs", Broken()], seeds=[0], folder=tmp_path / "kept")
        assert [run.error is None for run in result.runs] == [True, False]
    assert result.num_computed == 1


def drawn(num_requests):
    """Return a workload as a notebook's cell defines it, which depends on another cell's value."""
    cell = "def drawn(rng):\n    return [Request(str(n), 2, LENGTH) for n in range(NUM)]\n"
    names = {"Request": Request, "LENGTH": 4, "NUM": num_requests, "__name__": "__main__"}
    exec(cell, names)
    return names["drawn"]


class Waiting(policies.Policy):
    """Hold a parameter, as a policy of one's own does."""

    name = "waiting"

    def __init__(self, patience=1):
        self.patience = patience


class Wider(Waiting):
    """Differ from its base in one method."""

    def victim(self, view, candidates):
        return candidates[0]


CHANGES = {
    "workload's name": {"workloads": "lognormal128"},
    "workload's code": {"workloads": {"ten": twelve}},
    "workload's global": {"workloads": {"ten": drawn(5)}},
    "policy's option": {"policies": {"waiting": Waiting(2)}},
    "policy's method": {"policies": {"waiting": Wider()}},
    "scheduler": {"scheduler": SchedulerConfig(max_num_seqs=3)},
    "cache": {"cache": CacheConfig(1000)},
    "cost": {"cost": Linear(2.0)},
    "cost's code": {"cost": lambda plan: 1.0},
    "seed": {"seeds": [1]},
    "slo": {"slo": Slo(ttft=1.0)},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    base = {"workloads": {"ten": drawn(4)}, "policies": Waiting(), "seeds": [0], "folder": folder}
    assert sweep(**base).num_computed == 1
    assert sweep(**base).num_computed == 0
    return base


@pytest.mark.parametrize("what", CHANGES)
def test_sweep_computes_a_run_anew_if_anything_it_depends_on_changed(kept, what):
    assert sweep(**{**kept, **CHANGES[what]}).num_computed == 1
    assert sweep(**{**kept, **CHANGES[what]}).num_computed == 0


def test_a_cell_that_is_run_again_changes_nothing(kept):
    assert sweep(**{**kept, "workloads": {"other": drawn(4)}}).num_computed == 0


def test_a_workload_file_counts_by_its_content_not_by_its_place(tmp_path):
    line = '{"prompt": 3, "max_tokens": 4}\n'
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "w.jsonl").write_text(line)
    arguments = {"policies": "fcfs", "seeds": [0], "folder": tmp_path / "kept"}
    first = sweep(tmp_path / "a" / "w.jsonl", **arguments)
    assert (first.num_computed, first.runs[0].workload) == (1, "w.jsonl")
    assert sweep(str(tmp_path / "a" / "w.jsonl"), **arguments).num_computed == 0
    (tmp_path / "a" / "w.jsonl").write_text(line * 2)
    changed = sweep(tmp_path / "a" / "w.jsonl", **arguments)
    assert changed.num_computed == 1
    assert changed.runs[0].metrics["num_requests"] == 2


def test_what_cannot_be_known_again_is_rejected_before_any_run_with_the_remedy(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the cost is .*lock.*without a folder"):
        sweep(ten, "fcfs", cost=functools.partial(lambda lock, plan: 1.0, lock), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:20], lambda content: b"\xff" + content]
)
def test_a_run_whose_kept_file_is_damaged_is_computed_again(tmp_path, damage, caplog):
    first = sweep(ten, "fcfs", seeds=range(2), folder=tmp_path)
    path = min(tmp_path.rglob("output.pkl"))
    path.write_bytes(damage(path.read_bytes()))
    again = sweep(ten, "fcfs", seeds=range(2), folder=tmp_path)
    assert "Exception while loading results" in caplog.text
    assert again.runs == first.runs
    caplog.clear()
    assert sweep(ten, "fcfs", seeds=range(2), folder=tmp_path).runs == first.runs
    assert not caplog.text


def closing_over(value):
    return lambda: value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ([1], (1,)),
        ({1: 2}, {2: 1}),
        ({1}, frozenset({1})),
        (np.arange(3), np.arange(3.0)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (random.Random(1), random.Random(2)),
        (lambda: 1, lambda: 2),
        (lambda: [x for x in (1,)], lambda: [x for x in (2,)]),
        (lambda a=1: a, lambda a=2: a),
        (lambda *, a=1: a, lambda *, a=2: a),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.lru_cache(lambda: 1), functools.lru_cache(lambda: 2)),
        (closing_over(1), closing_over(2)),
        (policies.get("mlfq:levels=2"), policies.get("mlfq:levels=3")),
        (type("A", (), {"x": 1}), type("A", (), {"x": 2})),
        (type("A", (), {"x": property(lambda self: 1)}), type("A", (), {"x": property(lambda self: 2)})),
        (len, max),
        (json, csv),
    ],
)
def test_fingerprint_tells_different_things_apart(one, other):
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


# --- other processes


def run(code, **environment):
    command = [sys.executable, "-c", code] if isinstance(code, str) else [sys.executable, *code]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "cbresearch" not in error
    return out


def test_fingerprint_is_the_same_in_every_process():
    code = """
from cbresearch import policies
from cbresearch.experiments.fingerprint import fingerprint
from enum import Enum
class Kind(Enum):
    A = "a"
    B = "b"
def inner(name):
    return name in {"x", "y", "z"} and KINDS and inner
KINDS = frozenset(Kind) | {"x", "y"}
print([fingerprint(policies.get(name)) for name in policies.available() if name != "constant"])
print(fingerprint(inner), fingerprint(Kind), fingerprint({"p", "q", "r"}))
"""
    processes = [run(code, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    first, second = map(output, processes)
    assert first == second


def study(folder, *options, **environment):
    environment = {"SWEEP_LOG": str(folder / "log"), **environment}
    return run([str(ROOT / "tests" / "sweep_study.py"), str(folder), *map(str, options)], **environment)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert output(study(folder)) == f"{NUM_RUNS} 0\n"
    content = (folder / "runs.csv").read_bytes()
    assert content.count(b"\n") == 1 + NUM_RUNS
    return content


def test_a_sweep_that_was_killed_goes_on_and_gives_the_same_table(tmp_path, undisturbed):
    kept = tmp_path / "kept"
    victim = study(tmp_path, "--folder", kept, SWEEP_STOP_AFTER="32", PYTHONHASHSEED="1")
    deadline = time.monotonic() + 120
    while len(list(kept.rglob("output.pkl"))) < 32:
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -9
    assert not (tmp_path / "runs.csv").exists()
    # The log tells what was computed: half before the kill, the other half after it.
    assert (tmp_path / "log").read_text().count("\n") == 32
    resumed = output(study(tmp_path, "--folder", kept, "--jobs", 2, PYTHONHASHSEED="2"))
    assert resumed == "32 0\n"
    assert (tmp_path / "log").read_text().count("\n") == NUM_RUNS
    assert (tmp_path / "runs.csv").read_bytes() == undisturbed


def test_two_sweeps_at_once_in_one_folder_disturb_neither(tmp_path, undisturbed):
    folders = [tmp_path / name for name in ("a", "b", "later")]
    for folder in folders:
        folder.mkdir()
    both = [study(folder, "--folder", tmp_path / "kept") for folder in folders[:2]]
    for process in both:
        assert output(process).endswith(" 0\n")
    assert output(study(folders[2], "--folder", tmp_path / "kept")) == "0 0\n"
    for folder in folders:
        assert (folder / "runs.csv").read_bytes() == undisturbed


@pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="Dask is not installed: pip install -e .[dask]"
)
def test_a_dask_cluster_of_two_workers_gives_the_same_bytes(tmp_path, undisturbed):
    assert output(study(tmp_path, "--dask")) == f"{NUM_RUNS} 0\n"
    assert (tmp_path / "runs.csv").read_bytes() == undisturbed


def test_progress_is_shown_unless_it_is_turned_off(monkeypatch, capsys):
    for disable, is_shown in (("0", True), ("1", False)):
        monkeypatch.setenv("TQDM_DISABLE", disable)
        sweep("classic60", ["fcfs", "fcsf"], seeds=range(3))
        printed = capsys.readouterr()
        assert printed.out == ""
        assert ("6/6" in printed.err and "failed=3" in printed.err) if is_shown else printed.err == ""
