"""The kernels' machine code: the recorded table of the whole grid, and a sample of it compiled again."""

import csv
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_report
import pytest
from kernel_report import EXTRA, OPTIONS, TABLE, TARGETS, Code, grid, read_table, source_hash, tile_of

SCRIPT = Path(kernel_report.__file__)
STAMP, TABLE_ROWS = read_table() if TABLE.exists() else ({}, {})

# What a well-known production kernel takes for the same decode; KB are 1000 bytes.
PRODUCTION = {"registers": 92, "shared": 12_900, "instructions": 808}
DECODE = "sm_90/bf16/d128/g4/narrow"

# One row of each target, dtype and kernel, none of them slow to compile.
SAMPLE = [DECODE, "sm_80/fp16/d80/g7/narrow", "gfx942/bf16/d64/g4/wide", "sm_90/bf16/d64/g8/wide"]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Code]:
    """Compile the sample in a process of its own, since this one imported Triton as an interpreter."""
    pattern = "^({})$".format("|".join(map(re.escape, SAMPLE)))
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", pattern],
        env={**os.environ, "TRITON_INTERPRET": "0", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = csv.DictReader(io.StringIO(done.stdout.partition("\n")[2]))
    codes = [
        Code(row.pop("name"), row.pop("tile"), **{key: int(value) for key, value in row.items()})
        for row in rows
    ]
    return {code.name: code for code in codes}


def faults(code: Code) -> list[str]:
    """Return what a kernel's code has that it should not have, or lacks."""
    found = []
    if code.spills or code.stack:
        found.append(f"{code.spills} spills and a stack of {code.stack} bytes")
    if not code.wide_loads:
        found.append("no loads of 16 bytes")
    if code.name.startswith("sm_") and code.odd_loads:
        found.append(f"{code.odd_loads} loads of 1, 2 or 8 bytes")
    if not code.tensor and "/fp32/" not in code.name:
        found.append("no tensor-core instruction")
    return [f"{code.name}: {fault}" for fault in found]


def test_the_table_is_of_this_source_and_whole():
    assert STAMP["source"] == source_hash(), f"the kernels changed: run python tests/{SCRIPT.name}"
    assert list(TABLE_ROWS) == list(grid())
    stale = [name for name, code in TABLE_ROWS.items() if code.tile != tile_of(name)]
    assert not stale, f"the launch choices changed: run python tests/{SCRIPT.name}"
    assert len(TABLE_ROWS) == len(TARGETS) * 2 * (2 * 5 * 4 + len(EXTRA) + len(OPTIONS))


def test_the_whole_grid_is_free_of_spills_and_loads_16_bytes_at_a_time():
    assert [fault for code in TABLE_ROWS.values() for fault in faults(code)] == []


def test_the_split_decode_is_no_larger_than_a_production_kernel():
    ours = TABLE_ROWS[DECODE]
    assert {name: getattr(ours, name) for name in PRODUCTION if getattr(ours, name) > PRODUCTION[name]} == {}


def test_what_is_compiled_here_has_the_same_virtues(compiled):
    assert set(compiled) == set(SAMPLE)
    assert [fault for code in compiled.values() for fault in faults(code)] == []


def test_what_is_compiled_here_by_the_same_triton_is_the_same_code(compiled):
    import triton

    if triton.__version__ != STAMP["triton"]:
        pytest.skip(f"the table was made by Triton {STAMP['triton']}")
    assert compiled == {name: TABLE_ROWS[name] for name in SAMPLE}


def test_faults_are_noticed():
    good = TABLE_ROWS[DECODE]
    assert faults(good) == []
    values = {name: getattr(good, name) for name in Code.__dataclass_fields__}
    for change in ({"spills": 1}, {"stack": 8}, {"wide_loads": 0}, {"odd_loads": 1}, {"tensor": 0}):
        assert len(faults(Code(**{**values, **change}))) == 1
