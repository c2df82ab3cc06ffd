"""The notebooks are saved as a reader should meet them; nbval checks what the cells print."""

import io
import json
import re
import tokenize
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hygiene import ROOT, machine_paths

from cbresearch import Claims
from cbresearch.experiments.claims import MIME_TYPE

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 500_000
NUM_CELLS = range(15, 26)
# Twenty questions, an answer and a proof each, which are read one at a time.
NUM_CELLS_OF = {"18_interview_questions": range(42, 54)}
CODE_CELLS_PER_IGNORED_ONE = 5
MIN_WORDS = 4

MARKERS = {"NBVAL_IGNORE_OUTPUT", "NBVAL_SKIP"}
TAGS = {marker.lower().replace("_", "-") for marker in MARKERS}
FIGURES = {"image/png", "image/svg+xml", "image/jpeg"}


def source(cell: dict) -> str:
    return "".join(cell["source"])


def comments(cell: dict) -> list[str]:
    return [
        line.strip().lstrip("#").strip() for line in source(cell).splitlines() if line.strip().startswith("#")
    ]


def prose(cell: dict) -> str:
    """Return a markdown cell's text without fenced code, where `#` is no heading."""
    return re.sub(r"^(```|~~~).*?^\1", "", source(cell), flags=re.MULTILINE | re.DOTALL)


def all_markdown(cells: list[dict]) -> str:
    return "\n".join(prose(cell) for cell in cells if cell["cell_type"] == "markdown")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.replace("_", " ").casefold())


def titles(cell: dict) -> int:
    return len(re.findall(r"^# \S", prose(cell), re.MULTILINE))


def is_ignored(cell: dict) -> bool:
    return bool(MARKERS & set(comments(cell)) or TAGS & set(cell["metadata"].get("tags", [])))


def shows_figure(cell: dict) -> bool:
    return any(FIGURES & set(output.get("data", {})) for output in cell["outputs"])


def is_sentence(cell: dict) -> bool:
    """Return whether a cell is markdown with at least one full sentence outside headings and tables."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^#.*$", "", prose(cell), flags=re.MULTILINE))
    return cell["cell_type"] == "markdown" and any(
        len(text.split()) >= MIN_WORDS
        and not text.lstrip().startswith(("|", "<", "!"))
        and text.rstrip("*_) \n").endswith((".", "!", "?", ":"))
        for text in paragraphs
    )


def has_trailing_semicolon(text: str) -> bool:
    """Return whether a statement ends with `;`, which nbval's kernel does not take as "show nothing"."""
    python = "".join(
        line for line in text.splitlines(keepends=True) if not line.lstrip().startswith(("%", "!"))
    )
    skipped = (tokenize.COMMENT, tokenize.NL)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(python).readline) if t.type not in skipped]
    return any(
        first.string == ";" and second.type in (tokenize.NEWLINE, tokenize.ENDMARKER)
        for first, second in pairwise(tokens)
    )


def complaints(text: str, num_cells: range = NUM_CELLS) -> list[str]:
    """Return all that is wrong with one notebook file's text."""
    notebook = json.loads(text)
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    ignored = [cell for cell in code if is_ignored(cell)]
    markdown = all_markdown(cells)
    exercises = re.findall(r"^(?:#+|\*\*).*\bexercise\b", markdown, re.IGNORECASE | re.MULTILINE)
    solutions = re.findall(r"<details\b.*?</details>", markdown, re.DOTALL)

    found = [
        f"cell {number}: {complaint}"
        for number, (cell, following) in enumerate(zip(cells, [*cells[1:], None], strict=True))
        for complaint in cell_complaints(cell, following)
    ]
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed top to bottom in one go: make notebooks")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3: make notebooks")
    if len(text.encode()) >= MAX_BYTES:
        found.append(f"larger than {MAX_BYTES:,} bytes")
    if len(cells) not in num_cells:
        found.append(f"{len(cells)} cells, not {num_cells[0]} to {num_cells[-1]}")
    if not cells or cells[0]["cell_type"] != "markdown" or titles(cells[0]) != 1:
        found.append("the first cell is not markdown with one title")
    if sum(titles(cell) for cell in cells[1:] if cell["cell_type"] == "markdown"):
        found.append("a second title")
    if len(ignored) * CODE_CELLS_PER_IGNORED_ONE > len(code):
        found.append(f"{len(ignored)} of {len(code)} code cells ignored by nbval")
    if len(exercises) > len(solutions) or (re.search("exercise", markdown, re.IGNORECASE) and not solutions):
        found.append("an exercise without a solution in <details>")
    found.extend(claim_complaints(code))
    found.extend(f"names a path of one machine: {path}" for path in machine_paths(text))
    return found


def claim_complaints(code: list[dict]) -> list[str]:
    """Return what is wrong with the claims in some cells' outputs."""
    outputs = [output.get("data", {}).get(MIME_TYPE, {}) for cell in code for output in cell["outputs"]]
    rows = [row for output in outputs for row in output.get("claims", ())]
    if not rows:
        return ["no table of claims"]
    return [f"a claim that does not hold: {row['claim']}" for row in rows if not row["holds"]]


def link_complaints(text: str, before: str | None, after: str | None) -> list[str]:
    """Return what is wrong with the links in a notebook's last cell.

    The words of a link's title are those of the file's name, so `03_kv_cache_memory.ipynb` is
    `[03 · KV cache memory](03_kv_cache_memory.ipynb)`.

    Args:
        text: The notebook file's text.
        before: Name of the file before it; None for the first notebook.
        after: Name of the file after it; None for the last one.
    """
    last = source(json.loads(text)["cells"][-1])
    neighbours = {kind: name for kind, name in (("previous", before), ("next", after)) if name}
    parts = last.strip().split(" | ")
    if len(parts) != len(neighbours):
        return [f"the last cell has not just the links to {' and '.join(neighbours.values())}"]
    found = []
    for part, (kind, name) in zip(parts, neighbours.items(), strict=True):
        link = re.fullmatch(rf"{kind}: \[(\d\d) · ([^\]]+)\]\(([^)]+)\)", part)
        if link is None:
            found.append(f"{kind} is not a link as in '{kind}: [NN · Title](file)'")
        elif link[3] != name or link[1] != name[:2]:
            found.append(f"{kind} is not {name}")
        elif words(link[2]) != words(Path(name).stem[3:]):
            found.append(f"{kind} is not titled as {name}")
    return found


def unnamed(text: str, names: list[str]) -> list[str]:
    """Return the notebook files to which a notebook's prose has no link."""
    links = set(re.findall(r"\]\(([^)]+)\)", all_markdown(json.loads(text)["cells"])))
    return [name for name in names if name not in links]


def cell_complaints(cell: dict, following: dict | None) -> list[str]:
    """Return what is wrong with one cell, given the one after it."""
    found = []
    if not source(cell).strip():
        found.append("empty")
    if cell["cell_type"] != "code":
        return found
    if any(output["output_type"] == "error" for output in cell["outputs"]):
        found.append("a stored error")
    if any(output.get("name") == "stderr" for output in cell["outputs"]):
        found.append("a stored warning")
    if has_trailing_semicolon(source(cell)):
        found.append("a trailing ;")
    # nbval takes a comment for a marker only when it holds nothing else, and the test would then go unseen.
    if any("NBVAL" in comment and comment not in MARKERS for comment in comments(cell)):
        found.append("a comment that nbval does not recognise")
    if is_ignored(cell) and not set(comments(cell)) - MARKERS:
        found.append("ignored by nbval without a comment that says why")
    if "execution" in cell["metadata"]:
        found.append("a wall-clock time in its metadata: make notebooks")
    if shows_figure(cell) and not (following and is_sentence(following)):
        found.append("a figure without a sentence after it")
    return found


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_read(path: Path):
    found = complaints(path.read_text(encoding="utf-8"), NUM_CELLS_OF.get(path.stem, NUM_CELLS))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("stem", NUM_CELLS_OF)
def test_an_exception_is_for_a_notebook_that_needs_it(stem: str):
    text = (ROOT / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8")
    assert any("cells, not" in found for found in complaints(text))


@pytest.mark.parametrize("place", range(len(NOTEBOOKS)), ids=lambda place: NOTEBOOKS[place].stem)
def test_notebook_links_to_its_neighbours(place: int):
    names = [None, *(path.name for path in NOTEBOOKS), None]
    text = NOTEBOOKS[place].read_text(encoding="utf-8")
    assert not link_complaints(text, names[place], names[place + 2])


def test_the_first_notebook_names_every_other():
    text = NOTEBOOKS[0].read_text(encoding="utf-8")
    assert not unnamed(text, [path.name for path in NOTEBOOKS])


def markdown_cell(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code_cell(text: str, count: int, **data: Any) -> dict:
    outputs = [{"output_type": "display_data", "data": data, "metadata": {}}] if data else []
    return {"cell_type": "code", "metadata": {}, "source": text, "execution_count": count, "outputs": outputs}


def sound_notebook() -> dict:
    """Build the smallest notebook with nothing to complain of.

    Cell 1 draws a figure, cell 9 shows the claims, cell 13 is ignored.
    """
    claims = Claims()
    claims.check("steps", 4, 4, within=0)
    cells = [
        markdown_cell("# A claim in one sentence\n\n```python\n# no title\n```"),
        code_cell("plot()  # x; y", 1, **{"image/png": "AAAA"}),
        markdown_cell("## Results\nThe curve rises with the batch and then\nstays flat."),
        *(code_cell(f"print({count})\n%time f('a;')", count) for count in range(2, 8)),
        code_cell("claims", 8, **{MIME_TYPE: {"claims": claims.rows()}}),
        *(markdown_cell("Some more text.") for _ in range(3)),
        code_cell("# NBVAL_IGNORE_OUTPUT\n# Versions differ.\nversions()", 9),
        markdown_cell("## Exercise\n\n<details>\n<summary>Solution</summary>\n\nIt is 4.\n\n</details>"),
    ]
    return {
        "cells": cells,
        "metadata": {"kernelspec": {"name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_a_sound_notebook_passes():
    assert complaints(json.dumps(sound_notebook())) == []


def _set(index: int, **fields):
    return lambda notebook: notebook["cells"][index].update(fields)


def _claims_of(notebook: dict) -> list[dict]:
    return notebook["cells"][9]["outputs"][0]["data"][MIME_TYPE]["claims"]


@pytest.mark.parametrize(
    ("complaint", "spoil"),
    [
        ("not executed top to bottom", _set(3, execution_count=7)),
        ("not executed top to bottom", _set(3, execution_count=None)),
        ("a stored error", _set(3, outputs=[{"output_type": "error", "ename": "ValueError"}])),
        (
            "a stored warning",
            _set(3, outputs=[{"output_type": "stream", "name": "stderr", "text": "Careful"}]),
        ),
        ("kernel is not python3", lambda notebook: notebook["metadata"].clear()),
        ("a trailing ;", _set(3, source="ax.plot(x);")),
        ("a trailing ;", _set(3, source="%matplotlib inline\nax.plot(x);  # draw\n\n")),
        ("a path of one machine", _set(3, source="open('/" + "home/ada/x')")),
        ("larger than", _set(3, source="#" * MAX_BYTES)),
        ("14 cells", lambda notebook: notebook["cells"].pop(10)),
        ("26 cells", lambda notebook: notebook["cells"].extend(markdown_cell("Text.") for _ in range(11))),
        ("the first cell", _set(0, source="## No title")),
        ("the first cell", _set(0, source="# One\n# Two")),
        ("a second title", _set(2, source="# Another title\n\nThe curve rises and falls.")),
        ("2 of 9 code cells ignored", _set(3, source="# NBVAL_SKIP\n# Slow.\nf()")),
        ("2 of 9 code cells ignored", _set(3, source="# Slow.\nf()", metadata={"tags": ["nbval-skip"]})),
        ("does not recognise", _set(3, source="# NBVAL_IGNORE_OUTPUT because it differs\nf()")),
        ("without a comment", _set(13, source="# NBVAL_IGNORE_OUTPUT\nversions()")),
        ("a wall-clock time", _set(3, metadata={"execution": {"iopub.status.idle": "2024-01-01T00:00:00Z"}})),
        ("a figure without a sentence", _set(2, source="## Results of all four runs.")),
        ("a figure without a sentence", _set(2, source="| a | b | c | d |.")),
        ("a figure without a sentence", _set(2, **code_cell("print('A long enough sentence here.')", 2))),
        ("an exercise without a solution", _set(14, source="## Exercise\n\nWhat is 2 + 2?")),
        ("an exercise without a solution", _set(10, source="## Exercise 2\n\nWhat is 3 + 3?")),
        ("no table of claims", _set(9, outputs=[])),
        ("no table of claims", lambda notebook: _claims_of(notebook).clear()),
        ("a claim that does not hold: steps", lambda notebook: _claims_of(notebook)[0].update(holds=False)),
        ("empty", _set(10, source="\n")),
    ],
)
def test_an_unfit_notebook_is_noticed(complaint, spoil):
    notebook = sound_notebook()
    spoil(notebook)
    assert any(complaint in found for found in complaints(json.dumps(notebook)))


FIRST, SECOND, THIRD = "00_start_here.ipynb", "03_kv_cache_memory.ipynb", "08_swap_or_not.ipynb"
TO_FIRST, TO_THIRD = f"previous: [00 · Start here]({FIRST})", f"next: [08 · Swap, or not]({THIRD})"


def ending(text: str) -> str:
    return json.dumps({"cells": [markdown_cell("# Title"), markdown_cell(text)]})


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (f"{TO_FIRST} | {TO_THIRD}", FIRST, THIRD),
        (TO_THIRD, None, THIRD),
        (TO_FIRST, FIRST, None),
    ],
)
def test_links_to_the_neighbours_pass(text, before, after):
    assert link_complaints(ending(text), before, after) == []


@pytest.mark.parametrize(
    ("complaint", "text"),
    [
        ("not just the links", "The end."),
        ("not just the links", TO_FIRST),
        ("not just the links", f"{TO_FIRST} | {TO_THIRD} | {TO_THIRD}"),
        ("previous is not a link", f"The end.\n\n{TO_FIRST} | {TO_THIRD}"),
        ("next is not a link", f"{TO_FIRST} | first: [00 · Start here]({FIRST})"),
        ("next is not a link", f"{TO_FIRST} | next:\n[08 · Swap, or not]({THIRD})"),
        ("next is not a link", f"{TO_FIRST} | next: [Swap, or not]({THIRD})"),
        ("next is not 08", f"{TO_FIRST} | next: [03 · KV cache memory]({SECOND})"),
        ("next is not 08", f"{TO_FIRST} | next: [09 · Swap, or not]({THIRD})"),
        ("next is not titled", f"{TO_FIRST} | next: [08 · KV cache memory]({THIRD})"),
    ],
)
def test_a_wrong_link_is_noticed(complaint, text):
    assert any(complaint in found for found in link_complaints(ending(text), FIRST, THIRD))


def test_a_notebook_without_a_link_in_the_map_is_noticed():
    text = ending(f"| `{SECOND}` | [08_swap_or_not]({THIRD}) |")
    assert unnamed(text, [SECOND, THIRD]) == [SECOND]
