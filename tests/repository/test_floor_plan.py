"""Imports go down only: the floor plan of the package, drawn from the syntax trees of its files."""

import ast
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import budget
import pytest
from hygiene import ROOT

import cbresearch

PACKAGE = "cbresearch"
COMPUTED = "a computed name"

# Rows of rooms from the lowest floor up: a room imports from its own row and from the rows before.
ROWS = [names.split() for names in (*budget.CORE, *budget.LAB) if names != "__init__"]
FLOOR = {room: floor for floor, row in enumerate(ROWS) for room in row}

# Packages that make a start slow or that a small machine lacks, and the modules that alone may import them.
HEAVY = {
    "torch": ("kernels", "attention", "models", "engine", "cpu", "experiments.batch_variance"),
    "triton": ("kernels",),
    "transformers": ("attention", "models", "engine", "cpu", "bridges", "experiments.batch_variance"),
    "vllm": ("bridges",),
    "matplotlib": ("viz",),
    "seaborn": ("viz",),
}
MOST_TRITON_MODULES = 2

# What a simulation must not load: a function that needs it imports it.
LAZY = ("cloudpickle", "jinja2", "joblib", "pandas", "pooch", "pydantic", "scipy")
LIGHT = ("simulator", "experiments", "metrics", "formulas", "workloads", "cluster", "export", "costs", "")

# transformers requires huggingface_hub, and a Hub id means nothing without it.
UNDECLARED = {"huggingface_hub"}


@dataclass(frozen=True)
class Module:
    """A file of the package: its dotted name without the package's own, and its text."""

    name: str
    text: str
    is_package: bool = False


@dataclass(frozen=True)
class Import:
    """An imported name, the line, and whether loading the module runs the import."""

    target: str
    line: int
    at_start: bool


def read_tree(folder: Path) -> dict[str, Module]:
    """Return each Python file below a folder by its dotted name; the folder's own `__init__` is ""."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, path.read_text(), is_package)
    return modules


def tree(**texts: str) -> dict[str, Module]:
    """Make modules for a test: `kv__paged="..."` is `kv/paged.py`; one with others below it is a package."""
    names = {"" if key == "__init__" else key.replace("__", "."): text for key, text in texts.items()}
    packages = {name.rpartition(".")[0] for name in names}
    return {name: Module(name, text, name in packages) for name, text in names.items()}


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def imports_of(module: Module) -> list[Import]:
    """Return all imports of a module, those in functions and under TYPE_CHECKING included."""
    full_name = f"{PACKAGE}.{module.name}".rstrip(".")
    package = full_name if module.is_package or not module.name else full_name.rpartition(".")[0]
    return list(_imports(ast.parse(module.text), package, True))


def _imports(node: ast.AST, package: str, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from (Import(f"{base}.{alias.name}", child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(
            ("import_module", "__import__")
        ):
            name = child.args[0] if child.args else None
            known = isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value[0] != "."
            yield Import(name.value if known else COMPUTED, child.lineno, at_start)
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), package, False)
            yield from _imports(ast.Module(child.orelse, []), package, at_start)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, at_start and not is_function)


def module_of(target: str, modules: Mapping[str, Module]) -> str | None:
    """Return the file that a dotted name of the package lies in; None for another package's."""
    top, _, rest = target.partition(".")
    if top != PACKAGE:
        return None
    while rest and rest not in modules:
        rest = rest.rpartition(".")[0]
    return rest


def arrows(modules: Mapping[str, Module], at_start: bool = False) -> dict[str, set[str]]:
    """Return the files of the package that each file imports, or those that loading it imports."""
    drawn: dict[str, set[str]] = {name: set() for name in modules}
    for name, module in modules.items():
        for entry in imports_of(module):
            target = module_of(entry.target, modules)
            if target is not None and target != name and (entry.at_start or not at_start):
                drawn[name].add(target)
    return drawn


def room_of(name: str) -> str:
    return name.partition(".")[0]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the names along one circle of a graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for name, targets in arrows(modules).items():
        if name:
            rooms.setdefault(room_of(name), set()).update(room_of(target) for target in targets - {""})
    return {room: targets - {room} for room, targets in rooms.items()}


def breaches(modules: Mapping[str, Module]) -> list[str]:
    """Return a line for each import against the floor plan."""
    found = []
    for name, module in modules.items():
        room = room_of(name)
        if name and room not in FLOOR:
            found.append(f"{name}: it is in no room; give its room a row and a budget in tests/budget.py")
            continue
        for entry in imports_of(module):
            where = f"{name or '__init__'}, line {entry.line}"
            top = entry.target.partition(".")[0]
            target = module_of(entry.target, modules)
            if entry.target == COMPUTED:
                if name:
                    found.append(f"{where} computes what it imports, which hides it from the floor plan")
            elif target == "" and name:
                found.append(f"{where} imports {entry.target}; name the module that defines it")
            elif target and name and FLOOR.get(room_of(target), -1) > FLOOR[room]:
                found.append(f"{where} imports {target}, which is a floor above {room}")
            elif top in HEAVY and not is_below(name, HEAVY[top]):
                found.append(f"{where} imports {top}, which is for {', '.join(HEAVY[top])}")
    return found


def is_below(name: str, places: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def loaded(modules: Mapping[str, Module], start: str) -> dict[str, str]:
    """Return the other packages that loading a module imports, each with the file that does."""
    graph, seen, stack = arrows(modules, at_start=True), set(), [start]
    while stack:
        name = stack.pop()
        if name in seen or name not in modules:
            continue
        seen.add(name)
        # Loading a module loads the packages that it lies in first.
        stack += [*graph[name], name.rpartition(".")[0]]
    return {
        entry.target.partition(".")[0]: name
        for name in sorted(seen)
        for entry in imports_of(modules[name])
        if entry.at_start
    }


MODULES = read_tree(ROOT / PACKAGE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_floor_plan_finds_the_package():
    assert {"", "request", "config", "policies.base"} <= set(MODULES)


def test_files_import_one_another_in_no_circle():
    assert circle(arrows(MODULES)) == []


def test_rooms_import_one_another_in_no_circle():
    assert circle(room_graph(MODULES)) == []


def test_no_file_imports_from_a_floor_above_or_a_package_that_is_not_for_it():
    found = breaches(MODULES)
    assert not found, "\n".join(found)


def test_triton_is_imported_by_two_modules():
    importers = [
        name
        for name, module in MODULES.items()
        if any(entry.target.partition(".")[0] == "triton" for entry in imports_of(module))
    ]
    assert len(importers) <= MOST_TRITON_MODULES, importers


@pytest.mark.parametrize("start", LIGHT)
def test_loading_a_light_module_loads_nothing_heavy(start):
    heavy = {package: name for package, name in loaded(MODULES, start).items() if package in (*HEAVY, *LAZY)}
    assert not heavy


def test_every_other_package_is_a_declared_dependency():
    requirements = [*PROJECT["project"]["dependencies"]]
    requirements += [one for extra in PROJECT["project"]["optional-dependencies"].values() for one in extra]
    declared = {requirement.split(">=")[0].split("[")[0] for requirement in requirements}
    used = {entry.target.partition(".")[0] for module in MODULES.values() for entry in imports_of(module)}
    assert used - set(sys.stdlib_module_names) - {PACKAGE, COMPUTED} - UNDECLARED <= declared


def test_type_checker_is_strict_over_the_whole_package():
    settings = PROJECT["tool"]["mypy"]
    assert settings["strict"] is True
    assert settings["files"] == [PACKAGE]
    relaxed = [name for override in settings["overrides"] for name in override["module"]]
    assert not [name for name in relaxed if name.startswith(PACKAGE)]
    assert (ROOT / PACKAGE / "py.typed").exists()


def test_linter_forbids_private_names_of_other_modules_in_the_package():
    settings = PROJECT["tool"]["ruff"]["lint"]
    assert "SLF" in settings["select"]
    excused = [place for place, rules in settings["per-file-ignores"].items() if "SLF" in rules]
    assert not [place for place in excused if place.startswith(PACKAGE)]


# --- the tests' own tests, on small trees


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        (
            tree(scheduler="from cbresearch.serve import serve", serve=""),
            "imports serve, which is a floor above",
        ),
        (tree(scheduler="from .serve import serve", serve=""), "imports serve, which is a floor above"),
        (tree(scheduler="from . import serve", serve=""), "imports serve, which is a floor above"),
        (tree(scheduler="def f():\n    import cbresearch.serve", serve=""), "line 2 imports serve"),
        (
            tree(
                kv="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cbresearch.trace",
                trace="",
            ),
            "imports trace, which is a floor above kv",
        ),
        (
            tree(kv="import typing as t\nif t.TYPE_CHECKING:\n    import cbresearch.trace", trace=""),
            "imports trace, which is a floor above kv",
        ),
        (
            tree(kv="from importlib import import_module\nimport_module('cbresearch.serve')", serve=""),
            "imports serve, which is a floor above kv",
        ),
        (tree(kv="import importlib\nimportlib.import_module(name)"), "computes what it imports"),
        (tree(policies="", policies__size="from ..serve import Loop", serve=""), "policies.size, line 1"),
        (
            tree(costs="from cbresearch.formulas import kv", formulas=""),
            "imports formulas, which is a floor above",
        ),
        (tree(policies="from cbresearch import Request", __init__=""), "name the module that defines it"),
        (tree(policies="import cbresearch", __init__=""), "name the module that defines it"),
        (tree(scheduler="import torch.nn.functional as F"), "imports torch, which is for kernels"),
        (tree(experiments="def f():\n    import torch"), "imports torch, which is for kernels"),
        (tree(engine="import triton"), "imports triton, which is for kernels"),
        (tree(engine="import matplotlib"), "imports matplotlib, which is for viz"),
        (tree(enginery="import torch"), "in no room"),
        (tree(notions=""), "in no room"),
        (tree(__init__="try:\n    import torch\nexcept ImportError:\n    pass"), "imports torch"),
    ],
)
def test_a_breach_of_the_floor_plan_is_found(modules, complaint):
    (found,) = breaches(modules)
    assert complaint in found


@pytest.mark.parametrize(
    "modules",
    [
        tree(
            scheduler="import heapq\nfrom cbresearch.policies.base import Policy",
            policies="",
            policies__base="",
        ),
        tree(policies="", policies__base="", policies__size="from .base import Policy"),
        tree(serve="from cbresearch import trace", trace=""),
        tree(viz="import matplotlib.pyplot as plt", viz__figures="import cbresearch.viz"),
        tree(kernels="", kernels__attend="import triton\nimport torch"),
        tree(experiments="", experiments__batch_variance="import torch"),
        tree(__init__="import importlib\ndef __getattr__(name):\n    return importlib.import_module(name)"),
        tree(
            __init__="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cbresearch.engine",
            engine="",
        ),
    ],
)
def test_a_lawful_import_passes_the_floor_plan(modules):
    assert not breaches(modules)


@pytest.mark.parametrize(
    "modules",
    [
        tree(serve="from cbresearch.trace import Trace", trace="from cbresearch.serve import record_of"),
        tree(kv="from cbresearch.kv.paged import Paged", kv__paged="from cbresearch.kv import KVManager"),
        tree(viz="", viz__a="import cbresearch.viz.b", viz__b="def f():\n    import cbresearch.viz.a"),
        tree(
            viz="",
            viz__a="import cbresearch.viz.b",
            viz__b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cbresearch.viz.a import A",
        ),
    ],
)
def test_a_circle_of_files_is_found(modules):
    assert len(circle(arrows(modules))) >= 3


def test_a_circle_of_rooms_without_a_circle_of_files_is_found():
    modules = tree(
        trace="",
        trace__columns="import cbresearch.serve",
        trace__storage="",
        serve="import cbresearch.trace.storage",
    )
    assert not circle(arrows(modules))
    assert circle(room_graph(modules))


def test_what_loading_a_module_loads_is_followed_through_its_packages():
    modules = tree(
        metrics="from cbresearch.metrics.basic import a\ndef f():\n    import pandas",
        metrics__basic="from cbresearch.trace.run import Trace",
        trace="import scipy",
        trace__run="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    )
    assert loaded(modules, "metrics") == {PACKAGE: "metrics.basic", "typing": "trace.run", "scipy": "trace"}


# --- the face of the package


def test_dir_shows_exports_and_modules_and_no_helper():
    shown = set(dir(cbresearch))
    rooms = {room_of(name) for name in MODULES if name and not room_of(name).startswith("_")}
    assert shown - {name for name in shown if name.startswith("__")} == {*cbresearch.__all__, *rooms}
    assert {"simulate", "Engine", "Roofline", "CARDS", "kernels", "costs", "serve", "viz"} <= shown


def test_a_name_that_is_no_export_and_no_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cbresearch.nothing


def test_every_module_and_export_is_reachable_without_an_import_of_its_own():
    rooms = sorted({room_of(name) for name in MODULES} - {"", "__main__"}, reverse=True)
    code = f"""
        import cbresearch
        for name in {rooms}:
            assert getattr(cbresearch, name).__name__ == f"cbresearch.{{name}}", name
        for name in cbresearch.__all__:
            assert getattr(cbresearch, name) is not None, name
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SIMULATION = """
import cbresearch

cbresearch.simulate([cbresearch.Request(id="a", prompt=5, max_tokens=3)])
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_simulation_loads_and_needs_nothing_heavy(installed):
    heavy = [*HEAVY, *LAZY]
    report = """
        import json, sys
        print(json.dumps([name for name in {heavy} if sys.modules.get(name)]))
    """
    # None in sys.modules is how an import of a package that is not installed can be made to fail.
    absent = "" if installed else f"import sys\nsys.modules.update(dict.fromkeys({heavy}))\n"
    code = absent + SIMULATION + textwrap.dedent(report.format(heavy=heavy))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
