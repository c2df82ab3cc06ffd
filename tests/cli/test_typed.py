"""What a person types: policies and costs by name, paths with `~`, places and types of models."""

import json
import sys
import tomllib

import pytest
from hygiene import ROOT

from cbresearch import CARDS, Linear, Request, Roofline, __version__, compare, costs, policies
from cbresearch.__main__ import main
from cbresearch.trace import load

POLICY = """
from cbresearch.policies import Policy, Ranked

class Last(Policy):
    '''Serve the last first.'''
    def __init__(self, alpha: float = 0.5):
        self.alpha = alpha
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "my policies").mkdir()
    (tmp_path / "my policies" / "mine.py").write_text(POLICY)
    (tmp_path / "w.jsonl").write_text('{"prompt": 5, "max_tokens": 3, "ignore_eos": true}\n' * 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    "policy",
    [
        "my policies/mine.py",
        "my policies/mine.py:Last",
        "./my policies/mine.py:Last:alpha=1",
        "~/my policies/mine.py",
        "~/my policies/mine.py::alpha=0.25",
    ],
)
def test_a_policy_of_a_file_is_served_under_the_name_that_was_typed(home, policy):
    line = ["simulate", "--workload=~/w.jsonl", f"--policy={policy}", "--cost=h100", "--output=~/out"]
    assert main(line) == 0
    (run,) = results(home / "out")["runs"]
    assert run["policy"] == policy
    assert run["metrics"]["num_finished"] == 4


def test_policies_are_listed_with_their_rules_and_options_in_80_columns(capsys):
    assert main(["policies"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for name, rule in policies.available().items():
        assert f"\n{name} " in f"\n{out}"
        assert " ".join(rule.split()[:3]) in out
    assert "reserved=" in out and "release=False" in out
    assert "values=" not in out and "_empty" not in out


@pytest.mark.parametrize("command", ["compare", "simulate"])
def test_help_is_read_in_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "cbresearch policies" in out


def test_the_version_is_told_and_the_command_is_installed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cbresearch {__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"cbresearch": "cbresearch.__main__:script"}


def test_a_model_is_served_in_the_type_and_at_the_place_that_were_asked_for(home):
    line = ["compare", "--model", "tiny", "--workload", "w.jsonl", "--policy", "fcfs", "--output", "out"]
    assert main([*line, "--dtype", "bfloat16", "--device", "cpu"]) == 0
    environment = results(home / "out")["environment"]
    assert (environment["dtype"], environment["device"]) == ("torch.bfloat16", "cpu")


@pytest.mark.parametrize("device", ["xpu:99", "mps"])
def test_a_device_that_is_not_here_is_refused_with_the_reason(home, capsys, device):
    line = ["compare", "--model", "tiny", "--workload", "w.jsonl", "--policy", "fcfs", "--output", "out"]
    assert main([*line, "--device", device]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: device is '{device}', which cannot be used (")
    assert said.endswith("); choose cpu\n") and said.count("\n") == 1 and len(said) < 200


SMALL = costs.SHAPES["smollm2-135m"]


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("linear:0.5,0.1", Linear(0.5, 0.1)),
        ("linear:step=0.5", Linear(0.5)),
        ("h100", Roofline(costs.SHAPES["llama-3-8b"], CARDS["h100-sxm"])),
        ("H100-SXM", Roofline(costs.SHAPES["llama-3-8b"], CARDS["h100-sxm"])),
        (" l4:model=smollm2-135m,overhead=0.001 ", Roofline(SMALL, CARDS["l4"], 0.001)),
        ("roofline:l4,model=smollm2-135m", Roofline(SMALL, CARDS["l4"])),
        ("a100:model=smollm2-135m,flops_efficiency=0.5", Roofline(SMALL, CARDS["a100-80gb"], 0.0, 0.5)),
    ],
)
def test_a_cost_is_built_from_its_name(text, cost):
    assert costs.parse(text) == cost


@pytest.mark.parametrize("model", ["", "./nothere", "~/nothere", "a/b/c", "/nothere/at/all"])
def test_a_path_that_is_no_model_is_refused_before_torch_is_imported(home, capsys, monkeypatch, model):
    # The package has a function of the same name.
    monkeypatch.setattr(sys.modules["cbresearch.experiments.compare"], "_loaded", None)
    line = ["compare", f"--model={model}", "--workload=classic60", "--policy=fcfs", "--output=out"]
    assert main(line) == 2
    assert capsys.readouterr().err.startswith("error: unknown model ")


def test_an_option_without_its_value_is_refused_with_a_remedy(capsys):
    assert main(["simulate", "--max-num-seqs"]) == 2
    assert "expected one argument; write its value behind it; see" in capsys.readouterr().err


def test_results_are_written_below_the_home_folder(home):
    comparison = compare([Request("a", 5, 3)], "fcfs", cost=Linear(0.01))
    comparison.write("~/results")
    assert results(home / "results")["runs"]
    comparison.traces["fcfs"].save("~/run.jsonl")
    assert load("~/run.jsonl") == comparison.traces["fcfs"]
