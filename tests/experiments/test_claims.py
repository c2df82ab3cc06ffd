"""Claims are held against their tolerance, and what a notebook shows of them can be collected again."""

import csv
import json
import math
import subprocess
import sys

import pytest
from hygiene import ROOT

from cbresearch import Claims, formulas
from cbresearch.experiments.claims import MIME_TYPE


def made(*claims: dict) -> Claims:
    found = Claims()
    for claim in claims:
        found.check(**claim)
    return found


EXACT = {"name": "steps", "predicted": 91, "measured": 91, "within": 0}
CLOSE = {"name": "wait", "predicted": 2.0, "measured": 2.05, "within": 0.03, "unit": "s"}
ZERO = {"name": "flips", "predicted": 0, "measured": 1, "within": 2, "absolute": True, "unit": "tokens"}


def test_errors_are_fractions_of_the_prediction_or_differences():
    steps, wait, flips = made(EXACT, CLOSE, ZERO)
    assert steps.error == 0 and steps.holds
    assert wait.error == pytest.approx(0.025)
    assert flips.error == 1
    assert [row["error"] for row in made(EXACT, CLOSE, ZERO).rows()] == ["0 %", "+2.5 %", "+1 tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": 2.07}, r"'wait': predicted 2 s, measured 2.07 s; the error is \+3.5 %, more than 3 %"),
        ({"measured": 1.9}, "-5 %"),
        ({"predicted": -2.0, "measured": -1.9}, r"\+5 %"),
        ({"measured": None}, "nothing was measured"),
        ({"measured": math.nan}, "nothing was measured"),
    ],
)
def test_a_claim_that_does_not_hold_fails(change, message):
    with pytest.raises(AssertionError, match=message):
        made(CLOSE | change)


def test_a_claim_of_a_clock_that_does_not_hold_is_shown_instead():
    timed = Claims(raises=False)
    timed.check(**CLOSE | {"measured": 3.0})
    assert [row["holds"] for row in timed.rows()] == [False]
    assert "NO" in timed._repr_mimebundle_()["text/plain"]
    with pytest.raises(AssertionError, match="nothing was measured"):
        timed.check(**EXACT | {"measured": None})


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([CLOSE, CLOSE], "a name of its own"),
        ([CLOSE | {"predicted": 0}], "absolute=True"),
        ([CLOSE | {"predicted": math.inf}], "finite"),
        ([CLOSE | {"within": -0.1}], "finite"),
    ],
)
def test_a_claim_that_means_nothing_is_rejected(claims, message):
    with pytest.raises(ValueError, match=message):
        made(*claims)


def test_rounding_of_floats_does_not_show():
    rows = made(EXACT | {"predicted": 0.3, "measured": 0.1 + 0.2, "within": 1e-9}).rows()
    assert rows[0]["measured"] == "0.3"
    assert rows[0]["error"] == "0 %"


def test_small_quantities_keep_their_errors_and_none_is_rounded_to_a_power():
    (row,) = made(EXACT | {"predicted": 1e-12, "measured": 3e-12, "within": 5e-12, "absolute": True}).rows()
    assert (float(row["error"]), float(row["tolerance"])) == (2e-12, 5e-12)
    (row,) = made(EXACT | {"predicted": 9999.96, "measured": 9999.4, "within": 0.01}).rows()
    assert (row["predicted"], row["measured"]) == ("10,000", "9999")


def test_every_form_of_the_table_shows_every_claim_and_escapes_it():
    bundle = made(EXACT, CLOSE | {"name": "<b>wait</b>"})._repr_mimebundle_()
    assert bundle["text/plain"].splitlines()[2].split()[:2] == ["<b>wait</b>", "s"]
    assert "&lt;b&gt;wait" in bundle["text/html"] and "<b>" not in bundle["text/html"]
    assert [row["claim"] for row in bundle[MIME_TYPE]["claims"]] == ["steps", "<b>wait</b>"]
    json.dumps(bundle)


def collect(tmp_path, *notebooks: list[dict]) -> subprocess.CompletedProcess:
    for place, rows in enumerate(notebooks):
        outputs = [{"data": {MIME_TYPE: {"claims": rows}}}] if rows else []
        cells = [{"cell_type": "code", "outputs": outputs}, {"cell_type": "markdown"}]
        (tmp_path / f"0{place}_a.ipynb").write_text(json.dumps({"cells": cells}))
    files = sorted(tmp_path.glob("*.ipynb"))
    script = ROOT / "tests/collect_claims.py"
    command = [sys.executable, script, *files, "--csv", tmp_path / "all.csv"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_claims_of_all_notebooks_are_collected(tmp_path):
    done = collect(tmp_path, made(EXACT).rows(), made(CLOSE, ZERO).rows())
    assert done.returncode == 0, done.stderr
    assert "3 claims in 2 notebooks, 0 of which do not hold" in done.stdout
    with (tmp_path / "all.csv").open() as file:
        assert [(row["notebook"], row["claim"]) for row in csv.DictReader(file)] == [
            ("00", "steps"),
            ("01", "wait"),
            ("01", "flips"),
        ]


def test_a_claim_that_does_not_hold_and_a_silent_notebook_fail_the_collection(tmp_path):
    false = [{**row, "holds": False} for row in made(EXACT).rows()]
    assert collect(tmp_path, false).returncode == 1
    silent = collect(tmp_path, made(EXACT).rows(), [])
    assert silent.returncode == 1
    assert "without a table of claims: 01_a" in silent.stdout


@pytest.mark.parametrize("no_function", [len, Claims])
def test_what_is_no_function_has_no_code_to_show(no_function):
    with pytest.raises(TypeError):
        formulas.code(no_function)


def test_a_formula_is_shown_by_its_own_code():
    text = formulas.code(formulas.kv_bytes_per_token, formulas.graham_bounds)
    assert text.count("def ") == 2
    assert '"""' not in text
    namespace = dict(vars(sys.modules[formulas.graham_bounds.__module__]))
    exec(formulas.code(formulas.graham_bounds), namespace)
    assert namespace["graham_bounds"]([3, 5, 2], 2) == formulas.graham_bounds([3, 5, 2], 2)
