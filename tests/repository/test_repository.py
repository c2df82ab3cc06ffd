"""The repository's own files agree with one another."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import budget
import pytest
import yaml
from hygiene import ROOT, machine_paths

TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "LICENSE",
    "Makefile",
    "README.md",
    "cbresearch",
    "environment.yml",
    "notebooks",
    "pyproject.toml",
    "tests",
}

TESTS = ROOT / "tests"
ROOMS = {room for names in (*budget.CORE, *budget.LAB) for room in names.split()}
# Folders of tests that belong to no room of the package.
OTHER_FOLDERS = {"bench", "browser", "cli", "data", "gpu", "helpers", "notebooks", "repository"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
HOOKS = [
    hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = git("ls-files", "-z").split("\0")[:-1]
    assert names, "git tracks no file yet: git add them"
    return names


def recipe(target: str) -> tuple[list[str], str]:
    """Return a make target's prerequisites and its commands."""
    rule = re.search(rf"^{target}:(.*)\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert rule, f"the Makefile has no target {target}"
    return rule[1].split(), rule[2]


def made_by(commands: str) -> set[str]:
    return set(re.findall(r"\bmake +([a-z]+)", commands))


def test_top_level_holds_only_what_a_reader_expects(tracked):
    assert {Path(name).parts[0] for name in tracked} == TOP_LEVEL


def test_folders_of_tests_are_rooms_of_the_package_or_named_exceptions():
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert folders <= ROOMS | OTHER_FOLDERS


def test_names_of_test_files_are_unique():
    # In folders without an __init__.py, two files of one name cannot be imported in one run.
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def imported(text: str) -> set[str]:
    """Return the last names of the modules that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {part for name in found for part in name.split(".")}


def test_no_file_imports_from_a_test_file():
    found = {}
    for path in TESTS.rglob("*.py"):
        if from_tests := {name for name in imported(path.read_text()) if name.startswith("test_")}:
            found[str(path.relative_to(TESTS))] = from_tests
    assert not found, "move what they share to tests/helpers or a conftest.py"


@pytest.mark.parametrize(
    "text",
    ["import test_scheduler", "from test_scheduler import run", "def f():\n    from .kv import test_blocks"],
)
def test_an_import_from_a_test_file_is_found(text):
    assert any(name.startswith("test_") for name in imported(text))


def test_no_tracked_text_names_a_path_of_one_machine(tracked):
    found = {}
    for name in tracked:
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content and (paths := machine_paths(content.decode(errors="replace"))):
            found[name] = paths
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/ada/x",
        'open("/' + 'Users/ada")',
        "/" + "root/.cache",
        r"C:\Us" + r"ers\ada",
        r"C:\\Us" + r"ers\\ada",
        "/srv/check" + "out/cbresearch/x.py",
    ],
)
def test_a_path_of_one_machine_is_noticed(text):
    assert machine_paths(text, root=Path("/srv/check" + "out"))


@pytest.mark.parametrize(
    "text", ["~/.cache/cbresearch", "https://example.org/home/x", "out/run", "$HOME/x", "/srv/checkouts"]
)
def test_a_portable_path_passes(text):
    assert not machine_paths(text, root=Path("/srv/checkout"))


def test_environment_repeats_nothing_that_pyproject_says():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, from_pip = environment["dependencies"]
    assert python == f"python{PROJECT['project']['requires-python']}"
    assert pip == "pip"
    (package,) = from_pip["pip"]
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", package)
    assert extras
    # The browser's tests skip without their extra, which "make browser" installs.
    assert set(extras[1].split(",")) == set(PROJECT["project"]["optional-dependencies"]) - {"browser"}


def test_set_up_installs_the_extras_of_the_environment():
    (package,) = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    assert package.removeprefix("-e ") in MAKEFILE


def test_every_caller_goes_through_make():
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    callers = {
        ".ci/run": (ROOT / ".ci/run").read_text(),
        "workflow": "\n".join(steps),
        "pre-commit": "\n".join(hook["entry"] for hook in HOOKS),
    }
    assert {name: made_by(commands) for name, commands in callers.items()} == {
        ".ci/run": {"test"},
        "workflow": {"test"},
        "pre-commit": {"lint"},
    }
    for name, commands in callers.items():
        direct = re.findall(r"\b(?:ruff|mypy|pytest|nbconvert|pip)\b", commands)
        assert not direct, f"{name} calls {direct} beside make"


def test_test_includes_lint():
    prerequisites, _ = recipe("test")
    assert "lint" in prerequisites


def test_ci_script_is_executable():
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_workflow_tries_the_oldest_python_that_the_package_accepts():
    versions = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


@pytest.mark.parametrize("target", ["run", "test", "lab", "notebooks", "bench", "lint"])
def test_targets_set_up_first_and_name_no_python_of_their_own(target):
    prerequisites, commands = recipe(target)
    assert prerequisites in (["$(READY)"], ["lint"])
    assert commands
    for line in commands.replace("\\\n", " ").splitlines():
        assert re.match(r"\t(?:\$\(CHECKED\) |TRITON_INTERPRET=1 )?\$\(PY\) ", line), line


def test_notebooks_are_saved_and_checked_under_the_same_settings():
    checked = [line for target in ("test", "notebooks") for line in recipe(target)[1].splitlines()]
    assert len(checked) == 3
    assert all(line.startswith("\t$(CHECKED) ") for line in checked)


@pytest.mark.parametrize("name", ["py.typed", "viz/style.mplstyle", "data/chat24.jsonl", "viz/report.html"])
def test_data_files_are_not_ignored_so_the_wheel_has_them(name):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["cbresearch"]
    ignored = subprocess.run(["git", "check-ignore", "-q", f"cbresearch/{name}"], cwd=ROOT, check=False)
    assert ignored.returncode == 1


def test_readme_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert examples
    # In a process of its own: the examples register a policy, which other tests must not see.
    command = [sys.executable, "-c", "\n".join(examples)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_names_only_files_that_exist():
    named = re.findall(r"\b(?:cbresearch|tests|notebooks)/[\w./]+\.(?:py|ipynb|jsonl)", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_names_only_functions_that_exist_where_it_says():
    named = re.findall(r"`(\w+(?:/\w+)*\.py)`\s+`([\w.]+)", README)
    assert named
    missing = []
    for file, name in named:
        path = ROOT / "cbresearch" / file
        text = path.read_text() if path.exists() else ""
        for part in name.split("."):
            if not re.search(rf"^ *(?:class|def) {part}\b", text, re.MULTILINE):
                missing.append(f"{part} in {file}")
    assert not missing


def test_readme_names_only_targets_that_exist():
    targets = re.findall(r"(?:^ {4}|`)make ([a-z]+)\b", README, re.MULTILINE)
    assert {"run", "test", "lab", "notebooks", "bench"} <= set(targets)
    for target in targets:
        recipe(target)
