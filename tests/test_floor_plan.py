"""Imports go down only: the floor plan of the package, checked on its syntax trees."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hygiene import ROOT

import cbresearch

PACKAGE = ROOT / "cbresearch"
MAX_LINES = 450

ABOVE = "anything above"
COMPUTED = "a computed name"

# Top to bottom. Each row: what the module may import, of this package and of others. A row may stand for a
# whole sub-package, whose modules may import one another.
FLOOR_PLAN: dict[str, set[str]] = {
    "request": {"numpy"},
    "config": {"numpy"},
    "blocks": {"request", "config", "numpy"},
    "reservation": {"request", "config", "numpy"},
    "policies": {"request", "numpy"},
    "plan": {"request"},
    "leap": {"plan"},
    "scheduler": {"request", "config", "blocks", "reservation", "policies", "plan", "leap", "numpy"},
    "trace": {"request", "config", "plan", "leap", "numpy", "pandas"},
    "serve": {"scheduler", "trace", "plan", "leap", "request", "config", "numpy", "tqdm"},
    "formulas": {"config", "numpy"},
    "claims": set(),
    "metrics": {"trace", "config", "numpy", "pandas", "scipy"},
    "streaming": {"trace", "leap", "metrics"},
    "workloads": {"request", "numpy", "pandas", "pooch"},
    "costs": {"config", "formulas", "trace", "plan", "numpy", "pandas", "scipy"},
    "simulator": {"request", "config", "policies", "plan", "scheduler", "trace", "serve", "costs", "numpy"},
    "cluster": {
        "request",
        "config",
        "policies",
        "plan",
        "scheduler",
        "trace",
        "serve",
        "costs",
        "simulator",
        "numpy",
    },
    "kernels.reference": {"torch"},
    "kernels.layout": {"torch", "numpy"},
    "kernels.float8": {"torch", "triton"},
    "kernels.checks": {"torch", "kernels.layout", "kernels.float8"},
    "kernels.paged_attention": {"torch", "triton", "kernels.layout", "kernels.float8", "kernels.checks"},
    "kernels.kv_cache": {"torch", "triton", "kernels.layout", "kernels.float8", "kernels.checks"},
    "kernels": {
        "torch",
        "kernels.reference",
        "kernels.layout",
        "kernels.paged_attention",
        "kernels.kv_cache",
    },
    "attention": {"torch", "transformers", "kernels", "config", "plan", "numpy"},
    "models": {"torch", "transformers", "safetensors", "gguf", "huggingface_hub", "config", "numpy"},
    "engine": {
        "torch",
        "transformers",
        "request",
        "config",
        "policies",
        "plan",
        "scheduler",
        "trace",
        "serve",
        "formulas",
        "attention",
        "models",
        "numpy",
        "tqdm",
    },
    "experiments": {ABOVE, "numpy", "pandas", "tqdm", "joblib", "cloudpickle"},
    "export": {"trace", "plan", "metrics"},
    "viz": {
        "plan",
        "trace",
        "formulas",
        "metrics",
        "costs",
        "matplotlib",
        "jinja2",
        "numpy",
        "pandas",
    },
    "__main__": {ABOVE, "tqdm"},
}

# The packages that make a start slow or that a small machine lacks, and where alone they may appear.
HEAVY = {
    "torch": {"kernels", "attention", "models", "engine"},
    "triton": {"kernels.float8", "kernels.paged_attention", "kernels.kv_cache"},
    "transformers": {"models", "attention", "engine"},
    "matplotlib": {"viz"},
}
HEAVY_ROWS = {row for row, may_import in FLOOR_PLAN.items() if may_import & set(HEAVY)}

# Imported by the function that needs it, and by nothing before.
LAZY = {"cloudpickle", "joblib", "pandas", "pooch", "scipy"}

# A simulation from nothing, as a user would type it.
SIMULATION = """
import cbresearch

cbresearch.simulate([cbresearch.Request(id="a", prompt=5, max_tokens=3)])
"""


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        target: Its dotted name.
        line: Where in the source.
        at_start: Whether loading the module runs the import.
    """

    target: str
    line: int
    at_start: bool


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(node: ast.AST, package: str, at_start: bool = True) -> Iterator[Import]:
    """Yield every import below `node`, those in functions and under TYPE_CHECKING included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_start)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, at_start)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(
            ("import_module", "__import__")
        ):
            name = child.args[0] if child.args else None
            absolute = isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value[0] != "."
            yield Import(name.value if absolute else COMPUTED, child.lineno, at_start)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_of(child, package, at_start=False)
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from imports_of(ast.Module([statement], []), package, at_start=False)
            yield from imports_of(ast.Module(child.orelse, []), package, at_start)
        else:
            yield from imports_of(child, package, at_start)


def row_of(module: str) -> str | None:
    """Return the floor plan's row for a module, named without the package's own name."""
    parts = module.split(".")
    return next((row for row in (".".join(parts[:2]), parts[0]) if row in FLOOR_PLAN), None)


def is_heavy(target: str) -> bool:
    top, _, rest = target.partition(".")
    return top in HEAVY or top in LAZY or (top == PACKAGE.name and row_of(rest) in HEAVY_ROWS)


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return what breaks the floor plan in one module's source.

    Args:
        module: Dotted name without the package's own, such as "policies.size"; "" for its `__init__`.
        source: Its text.
        is_package: Whether the text is an `__init__.py`.
    """
    name = f"{PACKAGE.name}.{module}".rstrip(".")
    found = list(imports_of(ast.parse(source), name if is_package else name.rpartition(".")[0]))
    if not module:
        return [
            f"line {entry.line}: {entry.target} is imported at once; name it lazily in __getattr__"
            for entry in found
            if entry.at_start and is_heavy(entry.target)
        ]
    row = row_of(module)
    if row is None:
        return [f"{name} is not in the floor plan: give it a row in FLOOR_PLAN, below all that it imports"]
    rows = list(FLOOR_PLAN)
    above = set(rows[: rows.index(row)])
    allowed = FLOOR_PLAN[row] | (above if ABOVE in FLOOR_PLAN[row] else set())
    bad = []
    for entry in found:
        top, _, rest = entry.target.partition(".")
        if top in sys.stdlib_module_names:
            continue
        target = row_of(rest) if top == PACKAGE.name else top
        where = f"line {entry.line}: {row}"
        if entry.target == COMPUTED:
            bad.append(f"{where} computes what it imports, which hides it from the floor plan")
        elif target is None:
            bad.append(f"{where} imports {entry.target}; name the module that defines it")
        elif target != row and not {target, target.partition(".")[0]} & allowed:
            bad.append(f"{where} may not import {target}")
        elif entry.at_start and row not in HEAVY_ROWS and is_heavy(entry.target):
            bad.append(f"{where} imports {entry.target} at once; import it in the function that needs it")
    return list(dict.fromkeys(bad))


def modules() -> dict[str, str]:
    """Return each file of the package by its dotted name, without the package's own."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def test_the_package_is_where_the_test_looks():
    assert {"", "request", "scheduler", "policies.base"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_to_the_floor_plan(module):
    path = MODULES[module]
    found = violations(module, path.read_text(), is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_module_reads_in_one_sitting(module):
    num_lines = MODULES[module].read_text().count("\n")
    assert num_lines <= MAX_LINES


def test_every_row_imports_from_rows_above_only():
    rows = list(FLOOR_PLAN)
    for position, row in enumerate(rows):
        assert FLOOR_PLAN[row] & set(rows) <= set(rows[:position]), row


def test_heavy_packages_stay_in_their_rows():
    for package, where in HEAVY.items():
        for row, may_import in FLOOR_PLAN.items():
            assert package not in may_import or {row, row.partition(".")[0]} & where, (package, row)


def test_every_third_party_package_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    declared = {requirement.split(">=")[0] for requirement in requirements}
    used = set().union(*FLOOR_PLAN.values()) - set(FLOOR_PLAN) - {ABOVE}
    # transformers requires huggingface_hub, and a Hub id means nothing without it.
    assert used - {"huggingface_hub"} <= declared


def test_mypy_reads_every_light_module_up_to_the_cluster():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    rows = list(FLOOR_PLAN)
    light = rows[: rows.index("cluster") + 1]
    present = {row for row in light if any(row_of(module) == row for module in MODULES if module)}
    assert {file.removeprefix("cbresearch/").removesuffix(".py") for file in files} == present


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("scheduler", "import torch", "may not import torch"),
        ("scheduler", "import torch.nn.functional as F", "may not import torch"),
        ("scheduler", "def f():\n    from cbresearch.engine import Engine", "may not import engine"),
        ("scheduler", "from .serve import serve", "may not import serve"),
        ("scheduler", "from . import serve", "may not import serve"),
        (
            "scheduler",
            "from importlib import import_module\nimport_module('cbresearch.serve')",
            "may not import serve",
        ),
        ("scheduler", "import importlib\nimportlib.import_module(name)", "computes what it imports"),
        (
            "blocks",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cbresearch.trace",
            "not import trace",
        ),
        ("request", "import pandas", "may not import pandas"),
        ("config", "import pandas", "may not import pandas"),
        ("policies.size", "from ..blocks import BlockManager", "may not import blocks"),
        ("policies.size", "from cbresearch import Request", "name the module that defines it"),
        ("policies.size", "import cbresearch", "name the module that defines it"),
        ("trace", "import pandas as pd", "imports pandas at once"),
        ("trace", "class Trace:\n    import pandas", "imports pandas.* at once"),
        ("workloads.public", "import pooch", "imports pooch at once"),
        ("trace", "def f():\n    import pooch", "may not import pooch"),
        ("experiments", "from cbresearch.engine import Engine", "imports cbresearch.engine.Engine at once"),
        ("experiments", "import joblib", "imports joblib at once"),
        ("experiments", "def f():\n    from cbresearch import viz", "may not import viz"),
        ("experiments", "def f():\n    import torch", "may not import torch"),
        (
            "kernels.paged_attention",
            "from cbresearch.kernels.reference import attend",
            "may not import kernels.reference",
        ),
        (
            "kernels.paged_attention",
            "from cbresearch.kernels import reference",
            "may not import kernels.reference",
        ),
        ("kernels.reference", "import triton", "may not import triton"),
        ("notions", "", "is not in the floor plan"),
        ("", "from cbresearch.engine import Engine", "imported at once"),
        ("", "try:\n    import torch\nexcept ImportError:\n    pass", "imported at once"),
    ],
)
def test_a_breach_is_noticed(module, source, complaint):
    (found,) = violations(module, source, is_package=not module)
    assert re.search(complaint, found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "scheduler",
            "import heapq\nfrom cbresearch.policies.base import Policy\nfrom .blocks import BlockManager",
        ),
        ("policies.size", "from .base import Policy\nfrom cbresearch.policies import batching"),
        ("trace", "def to_pandas():\n    import pandas"),
        ("trace", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas"),
        ("viz.figures", "import matplotlib.pyplot as plt\nimport pandas\nfrom cbresearch.viz import style"),
        ("attention", "from cbresearch.kernels import reference\nimport torch"),
        (
            "experiments",
            "from cbresearch.simulator import simulate\ndef f():\n    from cbresearch import engine",
        ),
        ("", "def __getattr__(name):\n    import importlib\n    return importlib.import_module(name)"),
    ],
)
def test_a_lawful_import_passes(module, source):
    assert not violations(module, source, is_package=not module)


def test_every_exported_name_exists():
    assert cbresearch.__all__
    for name in cbresearch.__all__:
        assert getattr(cbresearch, name).__name__ == name


@pytest.mark.parametrize("installed", [True, False])
def test_a_simulation_loads_and_needs_nothing_heavy(installed):
    heavy = [*HEAVY, *sorted(LAZY)]
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
