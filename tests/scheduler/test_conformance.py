"""The `vllm_v1` policy against recorded decisions of that scheduler."""

import gzip
import json
import lzma
import os
import subprocess
import sys

import pytest
from conformance import compare, conformance, decisions, main, read
from hygiene import ROOT
from record_vllm import duplicates

ORACLE = ROOT / "tests" / "oracle"
RECORDED, SWITCHES = ORACLE / "vllm_v1_decisions.jsonl.gz", ORACLE / "vllm_v1_switches.jsonl.gz"
DUPLICATES = ORACLE / "vllm_v1_duplicates.jsonl.xz"


def test_vllm_v1_repeats_every_recorded_decision():
    cases = read(RECORDED)
    assert [entry for number, case in enumerate(cases) for entry in compare(number, case)] == []
    steps = [step for case in cases for step in case["steps"]]
    assert len(cases) == 40
    assert sum(len(step["preempted"]) for step in steps) == 110
    assert len(steps) == 4704


@pytest.mark.parametrize("kind", ["abort_eos", "cache_salt", "duplicates"])
def test_vllm_v1_repeats_the_decisions_of_a_switch(kind):
    cases = [case for case in read(SWITCHES) if case["kind"] == kind]
    assert len(cases) == 12
    assert [entry for number, case in enumerate(cases) for entry in compare(number, case)] == []


def test_vllm_v1_repeats_the_decisions_on_duplicate_contents():
    cases = read(DUPLICATES)
    assert len(cases) == 200
    assert {case["config"]["block_size"] for case in cases} == {1, 2, 3, 4}
    assert sum(len(step["preempted"]) for case in cases for step in case["steps"]) == 692
    # The script takes them all.
    assert [entry for number, case in enumerate(cases[::3]) for entry in compare(number, case)] == []


def test_the_recorder_draws_the_recorded_workloads():
    # The file can be made again; the steps need vLLM.
    for seed, case in enumerate(read(DUPLICATES)):
        assert duplicates(seed) == {name: case[name] for name in ("kind", "config", "requests")}


def test_conformance_compares_finished_and_preempted_requests_in_any_order(tmp_path):
    # vLLM gives both as sets.
    case = small_case()
    case["requests"] = [{**case["requests"][0], "id": name, "max_tokens": 1} for name in ("0", "1")]
    done = {"preempted": [], "running": 0, "waiting": 0, "free_blocks_after": 5}
    case["steps"] = [{"scheduled": [["0", 0, 4], ["1", 0, 4]], "finished": ["1", "0"], **done}]
    assert conformance(written(tmp_path, case)) == []


def test_the_recorded_aborts_find_requests_in_every_state_before_and_during_a_step():
    cases = [case for case in read(SWITCHES) if case["kind"] == "abort_eos"]
    aborted = [entry for case in cases for step in case["steps"] for entry in step.get("aborted", ())]
    assert {when for _, when, _ in aborted} == {"before", "during"}
    assert {state for _, _, state in aborted} == {"waiting", "preempted", "prefill", "decode"}


def test_another_policy_decides_otherwise():
    (first, *_) = read(RECORDED)
    recorded = [step["scheduled"] for step in first["steps"]]
    decided = [
        row["scheduled"]
        for row in decisions({**first, "config": {**first["config"], "policy": "fcfs"}}, "static")
    ]
    assert decided != recorded


def small_case(policy="fcfs"):
    """Two requests that do not fit together: to follow by hand."""
    return {
        "config": {
            "policy": policy,
            "block_size": 2,
            "num_blocks": 5,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 100,
            "max_model_len": 20,
            "prefix_caching": False,
        },
        "requests": [
            {"id": "0", "arrival_step": 0, "prompt": [1, 2, 3, 4], "max_tokens": 4, "priority": 1},
            {"id": "1", "arrival_step": 0, "prompt": [5, 6, 8], "max_tokens": 3, "priority": 0},
        ],
        "steps": [
            {
                "scheduled": [["0", 0, 4], ["1", 0, 3]],
                "preempted": [],
                "finished": [],
                "running": 2,
                "waiting": 0,
                "free_blocks_after": 1,
            },
            {
                "scheduled": [["0", 4, 1], ["1", 3, 1]],
                "preempted": [],
                "finished": [],
                "running": 2,
                "waiting": 0,
                "free_blocks_after": 0,
            },
            {
                "scheduled": [["0", 5, 1]],
                "preempted": ["1"],
                "finished": [],
                "running": 1,
                "waiting": 1,
                "free_blocks_after": 2,
            },
        ],
    }


def written(tmp_path, *cases, name="decisions.jsonl"):
    path = tmp_path / name
    data = "".join(json.dumps(case) + "\n" for case in cases).encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))
    return path


def test_conformance_finds_no_difference_in_a_file_that_is_right(tmp_path, capsys):
    path = written(tmp_path, small_case())
    assert conformance(path) == []
    assert main(path) == 0
    assert capsys.readouterr().out == "1 cases, 3 steps, 0 differences\n"


@pytest.mark.parametrize(
    "field", ["scheduled", "preempted", "finished", "running", "waiting", "free_blocks_after"]
)
def test_conformance_finds_a_difference_in_each_field(field, tmp_path, capsys):
    case = small_case()
    case["steps"][1][field] = [["9", 0, 1]] if isinstance(case["steps"][1][field], list) else 77
    path = written(tmp_path, small_case(), case)
    (difference,) = conformance(path)
    assert (difference.case, difference.step, difference.field) == (1, 1, field)
    assert main(path) == 1
    assert capsys.readouterr().out.endswith("2 cases, 6 steps, 1 differences\n")


def test_conformance_reads_several_files_plain_and_compressed(tmp_path, capsys):
    names = ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz")
    assert main(*(written(tmp_path, small_case(), name=name) for name in names)) == 0
    assert capsys.readouterr().out == "3 cases, 9 steps, 0 differences\n"


def test_conformance_runs_as_a_script_from_the_repositorys_root(tmp_path):
    for case, code in ((small_case(), 0), (small_case("priority"), 1)):
        path = written(tmp_path, case, name="case.jsonl.gz")
        done = subprocess.run(
            [sys.executable, "tests/conformance.py", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.splitlines()[-1].startswith("1 cases, 3 steps, ")
