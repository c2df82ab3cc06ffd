"""The command line: its files, its exit status, and what it says to bad input."""

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hygiene import ROOT

from cbresearch import Request, SamplingParams, SchedulerConfig
from cbresearch.__main__ import main
from cbresearch.experiments import compare

POLICIES = ["static", "static:release", "fcfs"]
FILES = ["report.html", "requests.csv", "results.json", "steps.csv"]
REQUEST_KEYS = {"id", "tokens", "arrival", "first_token", "finish", "preemptions", "error"}
LINES = [
    '{"id": "a", "prompt": 5, "max_tokens": 3}',
    '{"id": "b", "prompt": "some text", "max_tokens": 6, "arrival": 0.5, "client": "c1"}',
    '{"id": "broken", "prompt": ',
    '{"prompt": [1, 2, 3], "max_tokens": 1}',
]


def workload(folder, lines=LINES, name="workload.jsonl"):
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def simulate_arguments(folder, output=None, **changes):
    """Return a command line of the simulator; a change to None leaves an option out."""
    options = {
        "workload": folder / "workload.jsonl",
        "policy": POLICIES,
        "cost": "linear:0.5,0.01,0.001",
        "output": folder / "output" if output is None else output,
        **changes,
    }
    arguments = ["simulate"]
    for name, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def read(folder):
    """Return the parsed files of an output folder."""

    def rows(name):
        with (folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return SimpleNamespace(
        results=results,
        runs={run["policy"]: run for run in results["runs"]},
        requests=rows("requests.csv"),
        steps=rows("steps.csv"),
        report=(folder / "report.html").read_text(encoding="utf-8"),
    )


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file()) if folder.exists() else []


def judge_shape(output, policies, num_requests):
    """Hold an output folder against what design.md lets others rely on."""
    assert {"environment", "runs"} <= set(output.results)
    assert [run["policy"] for run in output.results["runs"]] == policies
    for run in output.results["runs"]:
        assert {"policy", "metrics", "requests"} <= set(run)
        assert len(run["requests"]) == num_requests
        for request in run["requests"]:
            assert set(request) == REQUEST_KEYS
            assert (request["error"] is None) == bool(request["tokens"])
            assert (request["finish"] is None) == (request["error"] is not None)
        of_policy = [row for row in output.requests if row["policy"] == run["policy"]]
        assert [row["id"] for row in of_policy] == [request["id"] for request in run["requests"]]
        assert [int(row["num_output_tokens"]) for row in of_policy] == [
            len(r["tokens"]) for r in run["requests"]
        ]
        assert [row["error"] or None for row in of_policy] == [r["error"] for r in run["requests"]]
        steps = [row for row in output.steps if row["policy"] == run["policy"]]
        assert run["metrics"]["num_steps"] == len(steps)
        if steps:
            seconds = (
                float(steps[-1]["start_s"]) + float(steps[-1]["duration_s"]) - float(steps[0]["start_s"])
            )
            num_tokens = sum(len(request["tokens"]) for request in run["requests"])
            assert run["metrics"]["output_throughput_tokens_per_s"] == pytest.approx(num_tokens / seconds)
    for name in policies:
        assert name in output.report


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Run the simulator's command line once."""
    folder = tmp_path_factory.mktemp("simulated")
    workload(folder)
    status = main(simulate_arguments(folder))
    return SimpleNamespace(folder=folder, status=status, **vars(read(folder / "output")))


def test_simulate_writes_the_files_that_others_script_against(simulated):
    assert simulated.status == 0
    assert files(simulated.folder / "output") == FILES
    judge_shape(simulated, POLICIES, len(LINES))


def test_a_malformed_line_of_a_workload_is_rejected_alone_by_its_number(simulated):
    for run in simulated.runs.values():
        assert [request["id"] for request in run["requests"]] == ["a", "b", "2", "3"]
        assert [request["error"] is None for request in run["requests"]] == [True, True, False, True]
        assert "line 3" in run["requests"][2]["error"]
        assert [len(request["tokens"]) for request in run["requests"]] == [3, 6, 0, 1]


def test_results_say_what_they_depend_on(simulated):
    environment = simulated.results["environment"]
    assert {"workload", "seed", "cost", "python", "cbresearch", "torch", "numpy"} <= set(environment)
    assert all(isinstance(value, str) and value for value in environment.values())


def test_csv_columns_have_units_and_undefined_cells_are_empty(simulated):
    assert {"policy", "id", "arrival_s", "first_token_s", "finish_s", "error"} <= set(simulated.requests[0])
    assert {"policy", "step", "start_s", "duration_s", "num_tokens", "num_running"} <= set(simulated.steps[0])
    rejected = next(row for row in simulated.requests if row["error"])
    assert rejected["first_token_s"] == rejected["finish_s"] == rejected["ttft_s"] == ""
    single = next(row for row in simulated.requests if row["num_output_tokens"] == "1")
    assert single["tpot_s"] == "" != single["ttft_s"]


def test_simulate_writes_the_same_bytes_in_another_process(simulated, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "cbresearch", *simulate_arguments(simulated.folder, tmp_path / "again")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "TQDM_DISABLE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert "|" not in result.stderr
    assert [line for line in result.stderr.splitlines() if not line.startswith("rejected: ")] == []
    assert "throughput" in result.stdout
    assert str(tmp_path / "again" / "report.html") in result.stdout
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (
            simulated.folder / "output" / name
        ).read_bytes(), name


@pytest.mark.parametrize(
    ("options", "moves", "computes_again"),
    [
        ({}, False, True),
        ({"preemption": "swap"}, True, False),
        ({"preemption": "swap", "host_blocks": 0}, False, True),
        ({"host_blocks": 8}, False, True),
    ],
    ids=["recompute", "swap", "swap to no pool", "a pool without swap"],
)
def test_a_victim_is_swapped_only_where_it_is_asked_for_and_there_is_a_pool(
    tmp_path, options, moves, computes_again
):
    lines = [json.dumps({"prompt": 8, "max_tokens": 24}) for _ in range(4)]
    workload(tmp_path, lines)
    tight = {"policy": "fcfs", "num_blocks": 8, "block_size": 4, **options}
    assert main(simulate_arguments(tmp_path, **tight)) == 0
    measured = read(tmp_path / "output").runs["fcfs"]["metrics"]
    assert measured["num_preemptions"] > 0
    assert (measured["num_swapped_out_blocks"] > 0) == moves
    assert measured["num_swapped_in_blocks"] == measured["num_swapped_out_blocks"]
    assert (measured["num_recomputed_tokens"] > 0) == computes_again


def test_a_promise_and_a_price_add_goodput_and_costs_everywhere(simulated, tmp_path, capsys):
    workload(tmp_path)
    options = {"slo_ttft": 1.0, "slo_tpot": 0.6, "price_per_hour": 7.2, "currency": "CHF"}
    assert main(simulate_arguments(tmp_path, **options)) == 0
    table = capsys.readouterr().out
    assert "goodput (requests/s)" in table and "cost per million output tokens (CHF)" in table
    output = read(tmp_path / "output")
    for policy, run in output.runs.items():
        measured = run["metrics"]
        assert measured["cost_per_million_output_tokens"] == pytest.approx(
            7.2 / 3600 / measured["output_throughput_tokens_per_s"] * 1e6
        )
        kept = 0
        for row in (row for row in output.requests if row["policy"] == policy):
            kept += bool(row["finish_s"]) and float(row["ttft_s"]) <= 1 and float(row["tpot_s"] or 0) <= 0.6
        assert measured["slo_attainment"] == kept / len(LINES)
        assert measured["goodput_requests_per_s"] == pytest.approx(kept / measured["makespan_s"])
    assert "million output tokens</th><td>CHF" in output.report
    # Without them nothing is assumed.
    for run in simulated.runs.values():
        assert not {"slo_attainment", "cost_per_million_output_tokens"} & set(run["metrics"])
    assert "No price of an hour was given" in simulated.report


# --- bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "fcsf"}, ["'fcsf'", "'fcfs'"]),
        ({"policy": "static:relase"}, ["'relase'", "'release'"]),
        ({"policy": ["fcfs", "sjf", "fcfs"]}, ["'fcfs'", "twice"]),
        ({"workload": "chat42"}, ["'chat42'", "'chat24'"]),
        ({"workload": "no/such/file.jsonl"}, ["no/such/file.jsonl", "chat24"]),
        ({"max_num_seqs": 0}, ["max_num_seqs is 0", "at least 1"]),
        ({"max_num_batched_tokens": -3}, ["max_num_batched_tokens is -3", "at least 1"]),
        ({"block_size": 0}, ["block_size is 0", "at least 1"]),
        ({"num_blocks": 0}, ["num_blocks is 0", "at least 1"]),
        ({"block_size": 0, "num_blocks": 4}, ["block_size is 0", "at least 1"]),
        ({"cost": "linear:fast"}, ["'linear:fast'", "linear:T0,T_TOKEN,T_CONTEXT"]),
        ({"cost": "linear:-1,0,0"}, ["-1.0", "none negative"]),
        ({"cost": "linear:0"}, ["not all 0"]),
        ({"seed": -1}, ["seed is -1", "at least 0"]),
        ({"host_blocks": -1}, ["host_blocks is -1", "at least 0"]),
        ({"slo_ttft": 0}, ["ttft is 0.0", "positive number of seconds"]),
        ({"slo_tpot": "nan"}, ["tpot is nan", "positive number of seconds"]),
        ({"price_per_hour": -2}, ["price_per_hour is -2.0", "0 or more"]),
        ({"price_per_hour": "inf"}, ["price_per_hour is inf", "0 or more"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_input_ends_with_status_2_the_value_the_remedy_and_no_file(tmp_path, capsys, changes, said):
    workload(tmp_path)
    assert main(simulate_arguments(tmp_path, **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for part in said:
        assert part in error
    assert [path.name for path in tmp_path.iterdir()] == ["workload.jsonl"]


@pytest.mark.parametrize("inside", [False, True])
def test_an_output_folder_that_is_a_file_is_rejected_before_the_work(tmp_path, capsys, inside):
    workload(tmp_path)
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(simulate_arguments(tmp_path, taken / "deeper" if inside else taken)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --output ") and captured.err.endswith("name another folder\n")
    assert "taken" in captured.err
    assert captured.out == ""
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("what", ["cbresearch.__main__.compare", "cbresearch.viz.write_report"])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_interrupted_command_leaves_no_file_of_its_own_and_ends_with_130(
    tmp_path, capsys, monkeypatch, what, is_there
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    workload(tmp_path)
    monkeypatch.setattr(what, interrupt)
    output = tmp_path / "results" / "output"
    if is_there:
        output.mkdir(parents=True)
        (output / "mine.txt").write_text("mine")
        (output / "steps.csv").write_text("of an earlier run")
    assert main(simulate_arguments(tmp_path, output)) == 130
    error = capsys.readouterr().err
    assert error.endswith(f"interrupted; nothing was written to {output}\n")
    if is_there:
        assert [path.name for path in sorted(output.iterdir())] == ["mine.txt", "steps.csv"]
        assert (output / "steps.csv").read_text() == "of an earlier run"
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["workload.jsonl"]


def test_other_files_in_the_output_folder_stay(tmp_path):
    workload(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine.txt").write_text("mine")
    (tmp_path / "output" / "report.html").write_text("of an earlier run")
    assert main(simulate_arguments(tmp_path)) == 0
    assert files(tmp_path / "output") == sorted([*FILES, "mine.txt"])
    assert (tmp_path / "output" / "mine.txt").read_text() == "mine"
    assert "fcfs" in (tmp_path / "output" / "report.html").read_text()


def test_the_files_have_a_progress_bar(tmp_path, capsys, monkeypatch):
    workload(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "0")
    assert main(simulate_arguments(tmp_path)) == 0
    error = capsys.readouterr().err
    assert "results: 100%" in error and "4/4" in error


def test_a_workload_without_requests_is_bad_input(tmp_path, capsys):
    assert main(simulate_arguments(tmp_path, workload="chat:n=0")) == 2
    assert "no requests" in capsys.readouterr().err


def test_of_many_rejected_requests_a_few_are_shown_and_the_number_of_the_others(tmp_path, capsys):
    lines = ['{"prompt": 5, "max_tokens": 3}'] * 25
    arguments = simulate_arguments(
        tmp_path, num_blocks=1, block_size=1, policy="fcfs", workload=workload(tmp_path, lines)
    )
    assert main(arguments) == 1
    error = capsys.readouterr().err
    shown = error.count("rejected: ")
    assert 0 < shown < len(lines)
    assert f"{len(lines) - shown} more" in error
    assert sum(bool(row["error"]) for row in read(tmp_path / "output").requests) == len(lines)


def test_counts_are_printed_whole(capsys, tmp_path):
    workload(tmp_path, ['{"prompt": 5, "max_tokens": 3000}'])
    assert main(simulate_arguments(tmp_path, policy=["static", "fcfs"])) == 0
    (steps,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("static: steps")]
    assert steps.split()[-3:] == ["3,000", "3,000", "0.000"]


@pytest.fixture(scope="module")
def none_fits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("none")
    workload(folder)
    status = main(
        simulate_arguments(folder, num_blocks=1, block_size=1, workload=workload(folder, LINES[:3]))
    )
    return SimpleNamespace(folder=folder, status=status, **vars(read(folder / "output")))


def test_a_pool_too_small_for_any_request_ends_with_status_1_and_the_reasons_in_the_results(none_fits):
    assert none_fits.status == 1
    assert files(none_fits.folder / "output") == FILES
    judge_shape(none_fits, POLICIES, 3)
    for run in none_fits.runs.values():
        assert [len(request["error"]) > 0 for request in run["requests"]] == [True] * 3
        for request in run["requests"][:2]:
            assert "num_blocks" in request["error"]
            assert repr(request["id"]) in request["error"]


def test_a_metric_of_no_request_is_null_and_its_count_is_zero(none_fits):
    for run in none_fits.runs.values():
        numbers = {name: value for name, value in run["metrics"].items() if value is not None}
        assert numbers.pop("num_requests") == numbers.pop("num_rejected") == 3
        assert set(numbers.values()) == {0}
        assert all(name.startswith("num_") or name.endswith("_n") for name in numbers)
        assert "output_throughput_tokens_per_s" in set(run["metrics"]) - set(numbers)


def test_a_csv_without_rows_still_has_its_header(none_fits, simulated):
    with (none_fits.folder / "output" / "steps.csv").open() as file:
        assert next(csv.reader(file), None) == list(simulated.steps[0])


# --- with a model


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Run the command line once on the tiny model, with every kind of request that a model rejects."""
    folder = tmp_path_factory.mktemp("compared")
    path = workload(
        folder,
        [
            '{"id": "text", "prompt": "héllo", "max_tokens": 5, "ignore_eos": true}',
            '{"id": "ids", "prompt": [5, 6, 7, 8, 9, 10, 11], "max_tokens": 2, "ignore_eos": true}',
            '{"id": "length", "prompt": 9, "max_tokens": 4, "ignore_eos": true}',
            '{"id": "outside", "prompt": [4096], "max_tokens": 4}',
            '{"id": "too long", "prompt": 2000, "max_tokens": 49}',
            '{"id": "too much", "prompt": 30, "max_tokens": 30}',
            "nonsense",
            '{"id": "empty", "prompt": "", "max_tokens": 4}',
        ],
    )
    arguments = ["compare", "--model", "tiny", "--workload", path, "--policy", "static", "--policy", "fcfs"]
    arguments += ["--output", folder / "output", "--max-num-seqs", 2, "--max-num-batched-tokens", 6]
    arguments += ["--block-size", 3, "--num-blocks", 8, "--no-prefix-caching", "--preemption", "recompute"]
    status = main([str(argument) for argument in arguments])
    return SimpleNamespace(folder=folder, status=status, **vars(read(folder / "output")))


def test_compare_writes_the_files_that_others_script_against(compared):
    assert compared.status == 0
    assert files(compared.folder / "output") == FILES
    judge_shape(compared, ["static", "fcfs"], 8)
    assert compared.results["environment"]["model"] == "tiny"


@pytest.mark.parametrize("compiles", [False, True])
def test_the_compile_flag_reaches_the_executor(tmp_path, capsys, monkeypatch, compiles):
    from cbresearch import engine

    def executor(*_, compile, **__):
        raise ValueError(f"compile is {compile}")

    monkeypatch.setattr(engine, "ModelExecutor", executor)
    arguments = ["compare", "--model", "tiny", "--workload", "classic60", "--policy", "fcfs"]
    flags = ["--compile"] if compiles else []
    assert main([*arguments, "--output", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err == f"error: compile is {compiles}\n"


def test_what_a_model_cannot_serve_is_rejected_with_the_value_and_the_others_are_served(compared):
    said = {
        "outside": ["4096", "4095"],
        "too long": ["2000", "49", "2048"],
        "too much": ["30", "59", "8"],
        "6": ["line 7"],
        "empty": ["line 8"],
    }
    for run in compared.runs.values():
        errors = {request["id"]: request["error"] for request in run["requests"]}
        assert [name for name, error in errors.items() if error is None] == ["text", "ids", "length"]
        for name, parts in said.items():
            assert all(part in errors[name] for part in parts), errors[name]


def test_every_policy_gives_the_same_tokens(compared):
    tokens = [
        {request["id"]: request["tokens"] for request in run["requests"]} for run in compared.runs.values()
    ]
    assert tokens[0] == tokens[1]
    assert {name: len(ids) for name, ids in tokens[0].items() if ids} == {"text": 5, "ids": 2, "length": 4}
    assert all(0 <= token < 4096 for ids in tokens[0].values() for token in ids)


def test_predictions_stand_beside_measurements_with_their_error(compared):
    predictions = {row["quantity"]: row for row in compared.results["predictions"]}
    for row in predictions.values():
        if row["relative_error"] is not None:
            assert row["predicted"] * (1 + row["relative_error"]) == pytest.approx(row["measured"])
        else:
            assert row["measured"] is None or not row["predicted"]
    pool = predictions["KV pool (bytes)"]
    # Keys and values of 4 layers with 4 KV heads of 32 floats, for 8 blocks of 3 tokens.
    assert pool["predicted"] == pool["measured"] == 2 * 4 * 4 * 32 * 4 * 8 * 3


def test_measured_steps_take_time_and_respect_the_limits(compared):
    for row in compared.steps:
        assert float(row["duration_s"]) > 0
        assert int(row["num_tokens"]) <= 6
        assert int(row["num_held_blocks"]) <= 8


@pytest.mark.parametrize(
    ("model", "near"),
    [("tyny", "'tiny'"), ("smollm", "'smollm2-135m'"), ("zzzzzz", "there is 'tiny', 'smollm2-135m'")],
)
def test_an_unknown_model_is_answered_with_the_near_miss_and_no_file(tmp_path, capsys, model, near):
    arguments = ["compare", "--model", model, "--workload", workload(tmp_path), "--policy", "fcfs"]
    assert main([str(argument) for argument in [*arguments, "--output", tmp_path / "output"]]) == 2
    error = capsys.readouterr().err
    assert f"error: unknown model {model!r}" in error
    assert near in error
    assert files(tmp_path) == ["workload.jsonl"]


# --- models of our own


def small_model(spoil=None):
    """Return a random Llama with a vocabulary of 64, with NaN in the embeddings of `spoil`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    if spoil is not None:
        model.model.embed_tokens.weight.data[spoil] = torch.nan
    return model


def save_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"w{place}": place for place in range(1, 64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def compare_folder(model, folder, *options):
    path = workload(folder, ['{"prompt": "w5 w6 w7", "max_tokens": 3, "ignore_eos": true}'])
    arguments = ["compare", "--model", model, "--workload", path, "--policy", "fcfs"]
    return main([str(argument) for argument in [*arguments, "--output", folder / "output", *options]])


def test_a_local_folder_with_safetensors_is_served_with_its_tokenizer(tmp_path):
    model = tmp_path / "model"
    original = small_model()
    original.save_pretrained(model)
    save_tokenizer(model)
    assert compare_folder(model, tmp_path) == 0
    ((request,),) = [run["requests"] for run in read(tmp_path / "output").results["runs"]]
    import torch

    expected = original.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    assert request["tokens"] == expected[0, 3:].tolist()


def test_a_local_folder_of_weights_alone_serves_token_ids(tmp_path):
    from cbresearch import models

    small_model().save_pretrained(tmp_path)
    assert models.load(str(tmp_path)).shape.vocab_size == 64


class Trap:
    """Leave a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_folder_with_pickled_weights_alone_is_rejected_and_they_are_not_opened(tmp_path, capsys):
    model, mark = tmp_path / "model", tmp_path / "mark"
    small_model().config.save_pretrained(model)
    save_tokenizer(model)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    assert compare_folder(model, tmp_path) == 2
    error = capsys.readouterr().err
    assert str(model) in error
    assert "safetensors" in error
    assert not mark.exists()
    assert not files(tmp_path / "output")
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert mark.exists()


def test_a_hub_id_is_asked_for_safetensors_without_code_and_its_failure_is_named(monkeypatch):
    from cbresearch import models

    asked = []

    def reject(source, **arguments):
        asked.append((source, arguments))
        raise OSError("no such repository")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", reject)
    with pytest.raises(ValueError, match=r"'org/model' could not be loaded.*no such repository"):
        models.load("org/model")
    ((source, arguments),) = asked
    assert source == "org/model"
    assert arguments["use_safetensors"] is True
    assert arguments["trust_remote_code"] is False


def test_code_that_lies_beside_the_weights_does_not_run_unasked(tmp_path, capsys):
    model, mark = tmp_path / "model", tmp_path / "mark"
    small_model().save_pretrained(model)
    save_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Own: pass\n")
    assert compare_folder(model, tmp_path) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert not mark.exists()
    assert not files(tmp_path / "output")


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_a_request_that_meets_weights_that_are_not_finite_fails_alone(policy):
    from cbresearch import models

    spoilt = models.wrap("spoilt", small_model(spoil=7))
    to_the_end = SamplingParams(ignore_eos=True)
    requests = [
        Request("healthy", [1, 2, 3], 4, sampling=to_the_end),
        Request("sick", [1, 7], 4, sampling=to_the_end),
        Request("next", [1, 2, 3], 4, sampling=to_the_end),
    ]
    # One seat, so that the second request begins after the four steps of the first, if it did not sample 7.
    comparison = compare(requests, [policy], model=spoilt, scheduler=SchedulerConfig(max_num_seqs=1))
    healthy, sick, following = comparison.traces[policy].requests
    assert "'sick' failed in step 4" in sick.error
    assert (sick.finish_reason, sick.tokens, sick.finish) == ("error", (), None)
    assert healthy.error is following.error is None
    assert len(healthy.tokens) == 4
    assert following.tokens == healthy.tokens


def test_requests_without_a_token_leave_static_and_others_to_be_compared():
    from cbresearch import models

    spoilt = models.wrap("spoilt", small_model(spoil=7))
    requests = [Request("sick", [7], 4), *(Request(str(n), [n, 2], 4) for n in range(2, 5))]
    comparison = compare(requests, ["static", "fcfs"], model=spoilt)
    for trace in comparison.traces.values():
        assert trace.requests[0].tokens == ()
        assert [record.error is None for record in trace.requests[1:]] == [True] * 3
    rows = {row.quantity: row for row in comparison.predictions}
    assert rows["static: steps, sum of batch maxima"].predicted == max(
        len(record.tokens) for record in comparison.traces["static"].requests
    )
    only_sick = compare(requests[:1], ["static", "fcfs"], model=spoilt)
    assert [row.quantity for row in only_sick.predictions] == ["KV pool (bytes)"]


def test_a_run_in_which_every_request_fails_says_so_and_ends_with_1(tmp_path, capsys):
    model = tmp_path / "model"
    small_model(spoil=slice(None)).save_pretrained(model)
    save_tokenizer(model)
    assert compare_folder(model, tmp_path, "--policy", "sjf") == 1
    error = capsys.readouterr().err
    assert "failed: request '0' failed in step 0" in error
    assert "no logit is finite" in error
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    assert all("no logit is finite" in request["error"] for request in results["runs"][0]["requests"])
