"""The `vllm_v1` policy against recorded decisions of that scheduler, where a file of them is at hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance import conformance, decisions, main, read
from hygiene import ROOT

RECORDED = Path(
    os.environ.get("CBRESEARCH_DECISIONS", ROOT.parent / "shared" / "oracle" / "vllm_v1_decisions.jsonl")
)
needs_file = pytest.mark.skipif(
    not RECORDED.is_file(),
    reason=f"no file of recorded decisions at {RECORDED}; name one in CBRESEARCH_DECISIONS",
)


@needs_file
def test_every_recorded_decision_is_repeated():
    assert conformance(RECORDED) == []
    steps = [step for case in read(RECORDED) for step in case["steps"]]
    assert sum(len(step["preempted"]) for step in steps) > 0
    assert len(steps) > 1000


@needs_file
def test_another_policy_decides_otherwise():
    (first, *_) = read(RECORDED)
    recorded = [step["scheduled"] for step in first["steps"]]
    decided = [
        row["scheduled"]
        for row in decisions({**first, "config": {**first["config"], "policy": "fcfs"}}, "static")
    ]
    assert decided != recorded


def small_case(policy="fcfs"):
    """Two requests that do not fit together: followed by hand."""
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


def written(tmp_path, *cases):
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def test_a_file_that_is_right_has_no_difference(tmp_path, capsys):
    path = written(tmp_path, small_case())
    assert conformance(path) == []
    assert main(path) == 0
    assert capsys.readouterr().out == "1 cases, 3 steps, 0 differences\n"


@pytest.mark.parametrize(
    "field", ["scheduled", "preempted", "finished", "running", "waiting", "free_blocks_after"]
)
def test_a_difference_is_found_in_each_field(field, tmp_path, capsys):
    case = small_case()
    case["steps"][1][field] = [["9", 0, 1]] if isinstance(case["steps"][1][field], list) else 77
    path = written(tmp_path, small_case(), case)
    (difference,) = conformance(path)
    assert (difference.case, difference.step, difference.field) == (1, 1, field)
    assert main(path) == 1
    assert capsys.readouterr().out.endswith("2 cases, 6 steps, 1 differences\n")


def test_the_reader_runs_as_a_script_from_the_repositorys_root(tmp_path):
    wrong = small_case("priority")
    for case, code in ((small_case(), 0), (wrong, 1)):
        done = subprocess.run(
            [sys.executable, "tests/conformance.py", str(written(tmp_path, case))],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert "1 cases, 3 steps, " in done.stdout
