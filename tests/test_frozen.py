"""A quicker constructor of frozen dataclasses does what theirs does."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from cbresearch.frozen import quickly_built


@dataclass(frozen=True, slots=True)
class Usual:
    number: int
    name: str = "x"
    values: list[int] = field(default_factory=list)
    ignored: float = field(default=0.0, compare=False)


@quickly_built
@dataclass(frozen=True, slots=True)
class Quick:
    number: int
    name: str = "x"
    values: list[int] = field(default_factory=list)
    ignored: float = field(default=0.0, compare=False)


CALLS = [
    ((1,), {}),
    ((1, "y"), {"ignored": 2.0}),
    ((), {"values": [1], "number": 3}),
    ((1, None, None, None), {}),
]
WRONG = [((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"other": 2}), ((1,), {"number": 2})]


@pytest.mark.parametrize(("values", "named"), CALLS)
def test_it_sets_the_same_fields(values, named):
    usual, quick = Usual(*values, **named), Quick(*values, **named)
    assert repr(quick) == repr(usual).replace("Usual", "Quick")


@pytest.mark.parametrize(("values", "named"), WRONG)
def test_it_refuses_the_same_calls_in_the_same_words(values, named):
    with pytest.raises(TypeError) as usual:
        Usual(*values, **named)
    with pytest.raises(TypeError) as quick:
        Quick(*values, **named)
    assert str(quick.value) == str(usual.value).replace("Usual", "Quick")


def test_its_parameters_are_the_same_ones():
    usual, quick = (inspect.signature(kind).parameters for kind in (Usual, Quick))
    assert [*quick] == [*usual]
    for name, parameter in usual.items():
        assert quick[name].annotation == parameter.annotation
        assert quick[name].kind == parameter.kind
        assert quick[name].default == parameter.default or name == "values"


def test_each_has_a_default_of_its_own():
    assert Quick(1).values is not Quick(1).values


def test_it_is_frozen_compared_copied_and_pickled_like_any_other():
    quick = Quick(1, "y", [2], 3.0)
    with pytest.raises(FrozenInstanceError):
        quick.number = 2
    with pytest.raises(FrozenInstanceError):
        del quick.name
    assert quick == Quick(1, "y", [2], 4.0) != Quick(2, "y", [2], 3.0)
    for other in (copy.copy(quick), copy.deepcopy(quick), pickle.loads(pickle.dumps(quick)), replace(quick)):
        assert other == quick
        assert other.ignored == 3.0
