"""Wrong command lines: one line each, which names the value and what is allowed, soon and before any work."""

import os
import subprocess
import sys
import time

import pytest
from hygiene import ROOT

from cbresearch.__main__ import main

GOOD = {
    "simulate": {"--workload": "w.jsonl", "--policy": "fcfs", "--output": "out", "--cost": "linear:0.01"},
    "compare": {"--workload": "w.jsonl", "--policy": "fcfs", "--output": "out", "--model": "tiny"},
}
FILES = {
    "w.jsonl": '{"prompt": 5, "max_tokens": 3}\n',
    "bad.jsonl": '{"prompt": 5}\nnonsense\n',
    "several.py": "from cbresearch.policies import Policy\nclass A(Policy): pass\nclass B(Policy): pass\n",
    "none.py": "NUMBER = 3\n",
    "refuses.py": "from cbresearch.policies import Policy\nclass A(Policy):\n"
    "    def __init__(self, x=1):\n        {1: exit, 2: int, 3: [].index}[x]('no')\n",
    "syntax.py": "x = 1\ndef f(:\n    pass\n",
    "raises.py": "import math\n\nmath.sqrt(-1)\n",
    "exits.py": "import sys\nsys.exit('go away')\n",
    "taken": "",
    "out/report.html/keep": "",
}

# The command, what is changed (None leaves an option out), what follows, and parts of the one line.
LINES = [
    ("", {}, [], ["command", "compare, simulate or policies"]),
    ("comparee", {}, [], ["'comparee'", "compare", "simulate"]),
    ("simulate", {"--policy": None}, [], ["--policy", "write --policy fcfs"]),
    ("simulate", {"--workload": None}, [], ["--workload", "write --workload chat24"]),
    ("simulate", {"--output": None}, [], ["--output", "write --output out"]),
    ("simulate", {"--cost": None}, [], ["--cost", "linear:0.01"]),
    ("compare", {"--model": None}, [], ["--model", "write --model tiny"]),
    ("simulate", {}, ["--policy"], ["--policy", "expected one argument", "write --policy fcfs"]),
    ("simulate", {}, ["static"], ["'static'", "repeat", "--policy P --policy Q"]),
    ("simulate", {"--policy": None}, ["--polcy", "fcfs"], ["'--polcy'", "'--policy'"]),
    ("simulate", {}, ["--model", "tiny"], ["'--model'", "for compare"]),
    ("compare", {}, ["--cost", "h100"], ["'--cost'", "for simulate"]),
    ("simulate", {}, ["--max", "3"], ["--max", "--max-num-seqs", "--max-num-batched-tokens"]),
    ("simulate", {}, ["--max-num-seqs", "many"], ["--max-num-seqs", "'many'", "whole number"]),
    ("simulate", {}, ["--max-num-seqs", "0"], ["max_num_seqs is 0", "at least 1"]),
    ("simulate", {}, ["--max-num-batched-tokens", "-3"], ["max_num_batched_tokens is -3", "at least 1"]),
    ("simulate", {}, ["--block-size", "1.5"], ["--block-size", "'1.5'", "whole number"]),
    ("simulate", {}, ["--num-blocks", "0"], ["num_blocks is 0", "at least 1"]),
    ("simulate", {}, ["--num-blocks", "1000000000"], ["num_blocks is 1000000000", "from 1 to 10000000"]),
    ("simulate", {}, ["--host-blocks", "9" * 23], ["num_host_blocks is 999", "from 0 to 10000000"]),
    ("simulate", {}, ["--max-num-seqs", "9" * 20], ["max_num_seqs is 999", "from 1 to 1000000"]),
    ("simulate", {}, ["--max-num-batched-tokens", "9" * 20], ["max_num_batched_tokens is 999", "from 1 to"]),
    ("simulate", {}, ["--block-size", "9" * 20], ["block_size is 999", "from 1 to"]),
    ("simulate", {"--workload": "chat:n=99999999999"}, [], ["is 99999999999", "from 0 to 10000000"]),
    ("simulate", {"--workload": "agents:n=99999999999"}, [], ["is 99999999999", "from 0 to 10000000"]),
    ("simulate", {}, ["--host-blocks", "-1"], ["num_host_blocks is -1", "at least 0"]),
    ("simulate", {}, ["--seed", "-1"], ["seed is -1", "at least 0"]),
    ("simulate", {}, ["--preemption", "forget"], ["'forget'", "recompute", "swap"]),
    ("simulate", {}, ["--slo-ttft", "soon"], ["--slo-ttft", "'soon'", "number"]),
    ("simulate", {}, ["--slo-tpot", "0"], ["tpot is 0", "positive"]),
    ("simulate", {}, ["--price-per-hour", "inf"], ["price_per_hour is inf", "0 or more"]),
    ("simulate", {"--policy": "FCSF"}, [], ["'FCSF'", "'fcfs'"]),
    ("simulate", {"--policy": "fcfs,static"}, [], ["'fcfs,static'", "--policy fcfs --policy static"]),
    ("simulate", {"--policy": "fcfs + sjf"}, [], ["'fcfs + sjf'", "--policy fcfs --policy sjf"]),
    ("simulate", {"--policy": "static:relase"}, [], ["'relase'", "'release'"]),
    ("simulate", {}, ["--policy", "fcfs"], ["'fcfs'", "twice"]),
    ("simulate", {"--policy": "no.py:Mine"}, [], ["no file 'no.py'", "give its path"]),
    ("simulate", {"--policy": "x" * 300 + ".py:A"}, [], ["there is no file 'xxx", "give its path"]),
    ("simulate", {"--policy": "several.py"}, [], ["A, B", "several.py:A or several.py:B"]),
    ("simulate", {"--policy": "several.py:C"}, [], ["no Policy 'C'", "'A'"]),
    ("simulate", {"--policy": "none.py"}, [], ["defines no Policy", "derive a class"]),
    ("simulate", {"--policy": "syntax.py:A"}, [], ["SyntaxError", "syntax.py, line 2"]),
    ("simulate", {"--policy": "raises.py:A"}, [], ["ValueError: math domain error", "raises.py, line 3"]),
    ("simulate", {"--policy": "exits.py:A"}, [], ["SystemExit: go away", "exits.py, line 2"]),
    ("simulate", {"--policy": "refuses.py:A"}, [], ["'refuses.py:A' cannot be built: SystemExit: no"]),
    ("simulate", {"--policy": "refuses.py:A:x=2"}, [], ["'refuses.py:A:x=2'", "'no'", "refuses.py, line 4"]),
    ("simulate", {"--policy": "refuses.py:A:x=4"}, [], ["'refuses.py:A:x=4'", "KeyError: 4", "line 4"]),
    ("simulate", {"--output": "x" * 300}, [], ["--output 'xxx", "cannot be written (File name too long)"]),
    ("simulate", {"--output": "new/" + "x" * 300}, [], ["(File name too long); name another folder"]),
    ("compare", {}, ["--device", "cpu:9"], ["--device", "'cpu:9' is no device; give cpu, cuda"]),
    ("simulate", {"--workload": "chat42"}, [], ["'chat42'", "'chat24'"]),
    ("simulate", {"--workload": "~/no such.jsonl"}, [], ["'~/no such.jsonl'", "chat24"]),
    ("simulate", {"--workload": "."}, [], ["'.'", "name a file"]),
    ("simulate", {"--workload": "bad.jsonl"}, [], ["no line of 2 can be read", "line 1", "line 2"]),
    ("simulate", {"--workload": "chat:n=many"}, [], ["option n is 'many'", "whole number"]),
    ("simulate", {"--cost": "0.5"}, [], ["'0.5'", "linear:T0,T_TOKEN,T_CONTEXT", "h100"]),
    ("simulate", {"--cost": "h101"}, [], ["'h101'", "h100-sxm", "linear:T0"]),
    ("simulate", {"--cost": "h100:model=llama"}, [], ["'llama'", "'llama-3-8b'"]),
    ("simulate", {"--cost": "h100:overhed=1"}, [], ["'overhed'", "'overhead'"]),
    ("simulate", {"--cost": "linear:-1"}, [], ["-1.0", "none negative"]),
    ("compare", {"--model": "tyny"}, [], ["'tyny'", "'tiny'"]),
    ("compare", {}, ["--dtype", "float13"], ["'float13'", "bfloat16"]),
    ("compare", {}, ["--device", "gpu"], ["'gpu'", "cuda"]),
    ("simulate", {"--output": ""}, [], ["--output is ''", "name a folder"]),
    ("simulate", {"--output": "taken"}, [], ["'taken'", "File exists", "name another folder"]),
    ("simulate", {"--output": "taken/deeper"}, [], ["taken", "Not a directory", "name another folder"]),
    ("simulate", {"--output": "out"}, [], ["report.html", "name another"]),
    ("compare", {"--model": "org/nowhere"}, ["--num-blocks", "0"], ["num_blocks is 0", "at least 1"]),
    ("compare", {"--model": "org/nowhere"}, ["--host-blocks", "-1"], ["num_host_blocks is -1", "at least 0"]),
    ("compare", {"--model": "org/nowhere"}, ["--seed", "-1"], ["seed is -1", "at least 0"]),
]


def written(command, changes, more):
    options = {**GOOD.get(command, {}), **changes}
    if "--output" not in changes and options:
        options["--output"] = "new"
    pairs = [part for name, value in options.items() if value is not None for part in (name, value)]
    return [*filter(None, [command]), *pairs, *more]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judge(folder, status, out, error, parts):
    assert status == 2
    assert out == ""
    assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1, error
    assert "usage:" not in error
    for part in parts:
        assert part in error, (part, error)
    left = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(FILES)


@pytest.mark.parametrize(
    ("command", "changes", "more", "parts"), LINES, ids=[" ".join(written(*line[:3])) for line in LINES]
)
def test_a_wrong_command_line_is_answered_by_one_line_with_the_remedy(
    folder, capsys, command, changes, more, parts
):
    began = time.process_time()
    status = main(written(command, changes, more))
    assert time.process_time() - began < 2
    judge(folder, status, *capsys.readouterr(), parts)


@pytest.mark.parametrize("place", [0, 9, 40, 56])
def test_a_wrong_command_line_is_answered_soon_by_a_new_process(folder, place):
    command, changes, more, parts = LINES[place]
    before = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-m", "cbresearch", *written(command, changes, more)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert os.times().children_user - before < 2
    judge(folder, done.returncode, done.stdout, done.stderr, parts)
