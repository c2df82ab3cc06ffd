"""Names with options: what is read, what is suggested, and what is rejected with the remedy."""

import re
from collections.abc import Callable
from typing import Annotated, Literal

import pytest

from cbresearch import names
from cbresearch.checks import Bounds


class Animal:
    def __init__(
        self, legs: int = 4, weight: float = 1.0, label="x", tame: bool = False, age: float | None = None
    ):
        self.options = (legs, weight, label, tame, age)


def strict(share: float, key: Callable | None = None, *more, **others):
    return share, key, more, others


FACTORIES = {"animal": Animal, "strict": strict, "nothing": lambda: "nothing"}


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sjf", "sjf", {}),
        ("sjf:", "sjf", {}),
        ("static:release", "static", {"release": True}),
        (
            "a:b=1, c=-2.5 ,d=False,e=TRUE,f=abc,g=a=b,h=None",
            "a",
            dict(b=1, c=-2.5, d=False, e=True, f="abc", g="a=b", h=None),
        ),
        ("mine.py:Mine", "mine.py:Mine", {}),
        ("lib/mine.py:Mine:alpha=0.5,fast", "lib/mine.py:Mine", {"alpha": 0.5, "fast": True}),
        ("mine.py", "mine.py:", {}),
        (r"C:\my policies\mine.py:Mine:a=1", r"C:\my policies\mine.py:Mine", {"a": 1}),
        ("a.b/mine.py::a=1", "a.b/mine.py:", {"a": 1}),
    ],
)
def test_parse_splits_a_name_from_its_options(text, name, options):
    assert names.parse(text) == (name, options)


def test_parse_rejects_an_option_that_is_given_twice():
    with pytest.raises(ValueError, match="'chat:n=3,n=4': option n is given twice; give it once"):
        names.parse("chat:n=3,n=4")


def test_suggestion_names_near_misses_or_all_that_is_known_or_nothing():
    assert names.suggestion("fcsf", ["sjf", "fcfs"]) == "did you mean 'fcfs' or 'sjf'?"
    assert names.suggestion("zz", ["sjf", "fcfs"]) == "there is 'sjf', 'fcfs'"
    assert names.suggestion("zz", []) == "it has none"
    many = names.suggestion("request", [str(number) for number in range(1000)])
    assert many.endswith("and 960 more")
    assert len(many) < 400


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("animal", (4, 1.0, "x", False, None)),
        ("animal:legs=2,weight=3,label=cat,tame", (2, 3, "cat", True, None)),
        ("animal:age=2,tame=false", (4, 1.0, "x", False, 2)),
        ("animal:age=None", (4, 1.0, "x", False, None)),
    ],
)
def test_build_gives_the_factory_its_options(text, built):
    assert names.build("animal", text, FACTORIES).options == built


def test_build_takes_any_value_where_the_signature_does_not_say():
    assert names.build("thing", "strict:share=0.5,key=len", FACTORIES) == (0.5, "len", (), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("anmal", "unknown thing 'anmal'; did you mean 'animal'?"),
        ("zz", "unknown thing 'zz'; there is 'animal', 'strict', 'nothing'"),
        ("animal:leg=4", "thing 'animal' has no option 'leg'; did you mean 'legs'"),
        ("nothing:much=1", "thing 'nothing' has no option 'much'; it has none"),
        ("strict:share=1,others=2", "thing 'strict' has no option 'others'; there is 'share', 'key'"),
        ("strict", "thing 'strict' needs the option 'share'; write strict:share=…"),
        ("animal:tame=maybe", "thing 'animal': option tame is 'maybe'; it must be True or False"),
        ("animal:legs=2.5", "option legs is 2.5; it must be a whole number, such as 4"),
        ("animal:legs", "option legs is True; it must be a whole number"),
        ("animal:weight=heavy", "option weight is 'heavy'; it must be a number"),
        ("animal:label=5", "option label is 5; it must be a text, such as x"),
        ("animal:age=old", "option age is 'old'; it must be a number"),
        ("strict:share=half", "option share is 'half'; it must be a number"),
    ],
)
def test_build_rejects_what_the_factory_does_not_take_with_the_remedy(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        names.build("thing", text, FACTORIES)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from test_names import Animal\nclass Cat(Animal): pass\nclass Table: pass\nNUMBER = 3\n"
    )
    return tmp_path / "mine.py"


def test_load_returns_the_class_that_a_file_defines(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    for name in ("mine.py:Cat", f"{file}:Cat", "mine.py:", f"~/{file.name}:Cat"):
        loaded = names.load("animal", name, Animal)
        assert issubclass(loaded, Animal)
        assert loaded.__name__ == "Cat"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("your.py:Cat", "animal 'your.py:Cat': there is no file 'your.py' in "),
        ("mine.py:Cta", "'mine.py' defines no Animal 'Cta'; did you mean 'Cat'?"),
        ("mine.py:Table", "'mine.py' defines no Animal 'Table'"),
        ("mine.py:NUMBER", "'mine.py' defines no Animal 'NUMBER'"),
    ],
)
def test_load_rejects_a_file_or_a_class_that_is_not_there(file, name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        names.load("animal", name, Animal)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ranged:share=1.5", "option share is 1.5; it must be a number from 0 to 1"),
        ("ranged:share=1e999", "option share is inf; it must be a number from 0 to 1"),
        ("ranged:most=0", "option most is 0; it must be an integer of at least 1"),
        ("ranged:most=2.0", "option most is 2.0; it must be a whole number, such as 3"),
        ("ranged:kind=c", "option kind is 'c'; choose a or b"),
        ("ranged:free=1e999", "option free is inf; it must be a finite number"),
        ("ranged:rest=1", "has no option 'rest'; did you mean"),
        ("ranged:share={[]}", "option share is '{[]}'; it must be a number"),
        ("ranged:share=" + "-" * 100_000, "option share is '---"),
    ],
)
def test_an_option_is_held_against_the_range_of_its_annotation(text, said):
    def ranged(
        share: Annotated[float, Bounds(0, 1)] = 0.5,
        most: Annotated[int, Bounds(1)] = 3,
        kind: Literal["a", "b"] = "a",
        free: float = 1.0,
        *more: int,
        **rest: int,
    ):
        return share, most, kind, free

    with pytest.raises(ValueError, match=re.escape(said)):
        names.build("thing", text, {"ranged": ranged})
    assert names.build("thing", "ranged:share=1,most=9,kind=b,free=-2", {"ranged": ranged}) == (1, 9, "b", -2)


def test_with_options_names_what_is_not_the_default_and_builds_the_same_again():
    made = names.with_options("animal", "animal", Animal.__init__, (2, 3.5), {"tame": True, "label": "x"})
    assert made == "animal:legs=2,weight=3.5,tame"
    assert names.build("animal", made, FACTORIES).options == (2, 3.5, "x", True, None)
