"""The script that counts code lines counts what it says, and finds what is over its budget."""

import budget
import pytest

SOURCE = '''
"""A module."""

import os  # one


class Thing:
    """A class
    of two lines."""

    size = 3
    """An attribute."""

    # A comment.
    def __init__(self):
        """A method."""
        self.text = """two
        lines"""
'''


def test_budget_counts_tokens_but_no_comments_docstrings_or_blank_lines():
    assert budget.count_code_lines(SOURCE) == 1 + 1 + 1 + 1 + 2


@pytest.fixture
def package(tmp_path):
    for name, text in {
        "__init__.py": "a = 1\n",
        "request.py": "a = 1\nb = 2\n",
        "names.py": "a = 1\n",
        "viz/__init__.py": "",
        "viz/figures/bars.py": "a = 1\nb = 2\nc = 3\n",
        "viz/player.js": "let a\n\nlet b\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_budget_adds_up_rooms_rings_and_package(package):
    lines = {name: number for name, number, _ in budget.budget_rows(package)}
    assert lines["request config model_shape names checks version"] == 3
    assert lines["viz export __main__"] == 3
    assert (lines["the core"], lines["the lab"], lines["the package"], lines["JavaScript"]) == (4, 3, 7, 3)
    assert budget.main(package) == 0


def test_budget_of_a_file_in_no_room_is_nothing(package, capsys):
    (package / "misc.py").write_text("a = 1\n")
    assert budget.main(package) == 1
    assert "misc, which is in no ring by 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "name"),
    [("MOST_ALL", "the package"), ("MOST_CORE", "the core"), ("MOST_JAVASCRIPT", "JavaScript")],
)
def test_budget_that_is_exceeded_is_named_with_the_excess(package, monkeypatch, capsys, limit, name):
    monkeypatch.setattr(budget, limit, 2)
    assert budget.main(package) == 1
    assert f"{name} by " in capsys.readouterr().err


def test_budget_of_a_room_that_is_exceeded_is_named(package, monkeypatch, capsys):
    monkeypatch.setitem(budget.LAB, "viz export __main__", 2)
    assert budget.main(package) == 1
    printed = capsys.readouterr()
    assert "viz export __main__ by 1" in printed.err
    assert "OVER" in printed.out


def test_budgets_of_the_package_the_lab_and_the_page_are_those_of_the_design():
    assert (budget.MOST_LAB, budget.MOST_ALL, budget.MOST_JAVASCRIPT) == (6000, 12_940, 1200)
