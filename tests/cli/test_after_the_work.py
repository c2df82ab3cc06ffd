"""What was computed is not lost to what comes behind it: a report, a disk, a console that fails."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hygiene import ROOT

from cbresearch.__main__ import main

RESULTS = ["requests.csv", "results.json", "steps.csv"]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"id": "–é…", "prompt": 5, "max_tokens": 3}, {"prompt": 4, "max_tokens": 9}]
    Path("w.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    Path("mine.py").write_text(
        "from cbresearch.policies import Policy\n"
        "class Fails(Policy):\n"
        "    def propose(self, view):\n"
        "        if view.now > 2:\n"
        "            raise KeyError('lost')\n"
        "        yield from super().propose(view)\n"
    )
    parts = "simulate --workload w.jsonl --policy static --policy fcfs --cost linear:1 --output out"
    return parts.split()


def module(name):
    """Return a module of the experiments, whose package has functions of the same names."""
    return sys.modules[f"cbresearch.experiments.{name}"]


def made():
    return sorted(path.name for path in Path("out").rglob("*")) if Path("out").exists() else []


def fail(error):
    def raises(*_, **__):
        raise error

    return raises


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def a_process(arguments, code="from cbresearch.__main__ import script; script()", **settings):
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", **settings}
    return subprocess.run(command, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize("error", [ImportError("No module named 'seaborn'"), RuntimeError("first\nsecond")])
def test_a_report_that_cannot_be_made_takes_nothing_with_it(arguments, monkeypatch, capsys, error):
    Path("out").mkdir()
    Path("out/report.html").write_text("of an earlier run")
    monkeypatch.setattr("cbresearch.viz.write_report", fail(error))
    assert main(arguments) == 1
    # An old report would pass for one of these results.
    assert made() == RESULTS
    printed = capsys.readouterr()
    assert "steps" in printed.out and "report.html" not in printed.out
    assert printed.err.startswith("error: the report cannot be given out: ") and printed.err.count("\n") == 1


@pytest.mark.parametrize("name", RESULTS)
def test_a_disk_that_is_full_at_one_file_keeps_the_others(arguments, monkeypatch, capsys, name):
    from cbresearch.trace import files

    def write(path, content, whole=files.write_whole):
        full() if path.name == name else whole(path, content)

    monkeypatch.setattr(files, "write_whole", write)
    monkeypatch.setattr(module("compare"), "write_whole", write)
    assert main(arguments) == 1
    assert made() == sorted({*RESULTS, "report.html"} - {name})
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "No space left on device" in printed.err
    assert "mean occupancy" in printed.out


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.EROFS, "Read-only file system")],
)
@pytest.mark.parametrize("where", [(Path, "mkdir"), (module("environment"), "TemporaryFile")])
def test_an_output_folder_that_cannot_be_written_is_found_out_first(
    arguments, monkeypatch, capsys, error, where
):
    monkeypatch.setattr(*where, fail(error))
    monkeypatch.setattr("cbresearch.__main__.compare", fail(AssertionError("the work began")))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said == f"error: --output 'out' cannot be written ({error.strerror}); name another folder\n"
    assert made() == []


def test_a_disk_that_is_full_is_found_out_first(arguments, monkeypatch, capsys):
    class Full:
        def __init__(self, **_):
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731
        write = full

    monkeypatch.setattr(module("environment"), "TemporaryFile", Full)
    assert main(arguments) == 2
    assert "(No space left on device); name another folder" in capsys.readouterr().err


def test_a_policy_that_fails_keeps_the_runs_of_the_others(arguments, capsys, caplog):
    assert main([*arguments, "--policy", "mine.py"]) == 1
    assert made() == sorted([*RESULTS, "report.html"])
    results = json.loads(Path("out/results.json").read_text())
    assert [run["policy"] for run in results["runs"]] == ["static", "fcfs"]
    (said,) = results["failed"].values()
    assert "policy 'mine.py'" in said and "KeyError: 'lost'" in said and said.endswith("(mine.py, line 5)")
    assert said in caplog.text


def test_a_policy_that_fails_alone_is_named_with_its_line(arguments, capsys):
    assert main([*arguments[:3], "--policy", "mine.py", *arguments[7:]]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "KeyError: 'lost'" in said and said.endswith("(mine.py, line 5)\n")
    assert made() == []


def test_policies_that_all_fail_are_each_named_in_one_line(arguments, capsys):
    policies = ["--policy", "mine.py", "--policy", "mine.py:Fails"]
    assert main([*arguments[:3], *policies, *arguments[7:]]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.count("(mine.py, line 5)") == 2
    assert "policy 'mine.py' failed" in said and "policy 'mine.py:Fails' failed" in said
    assert made() == []


@pytest.mark.parametrize(
    "settings",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_console_in_ascii_shows_the_table(arguments, settings):
    done = a_process(arguments, **settings)
    assert done.returncode == 0 and done.stderr == b""
    assert b"mean occupancy" in done.stdout and b"report.html" in done.stdout
    assert made() == sorted([*RESULTS, "report.html"])


@pytest.mark.parametrize("backend", ["nonsense", "TkAgg", "module://not.there"])
def test_a_plotting_backend_that_is_not_there_is_not_asked(arguments, backend):
    done = a_process(arguments, MPLBACKEND=backend)
    assert done.returncode == 0 and done.stderr == b""
    assert "report.html" in made()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_of_the_report_the_results_are_there(arguments, package):
    code = "import sys; sys.modules[sys.argv.pop(1)] = None; from cbresearch.__main__ import script; script()"
    done = a_process([package, *arguments], code)
    assert done.returncode == 1
    assert made() == RESULTS
    assert b"mean occupancy" in done.stdout
    assert done.stderr.count(b"\n") == 1 and package.encode() in done.stderr


@pytest.mark.parametrize("command", ["the run", "policies", "simulate --help"])
def test_a_reader_that_goes_away_is_no_error(arguments, command):
    reader, writer = os.pipe()
    os.close(reader)
    parts = arguments if command == "the run" else command.split()
    process = [sys.executable, "-m", "cbresearch", *parts]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    done = subprocess.run(process, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert made() == (sorted([*RESULTS, "report.html"]) if command == "the run" else [])


def test_a_process_without_an_output_stream_ends_well(arguments):
    code = "import sys; sys.stdout = None; from cbresearch.__main__ import script; script()"
    done = a_process(arguments, code)
    assert (done.returncode, done.stderr) == (0, b"")
    assert set(made()) > set(RESULTS)


@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
def test_a_line_that_asks_for_more_tokens_than_int64_holds_costs_itself_alone(arguments, capsys, field):
    with open("w.jsonl", "a") as file:
        file.write(json.dumps({"prompt": 5, "max_tokens": 3, field: 10**20}) + "\n")
    assert main(arguments) == 0
    assert "rejected: request '2': " in capsys.readouterr().err
    assert set(made()) > set(RESULTS)
