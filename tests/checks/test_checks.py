"""Numbers are taken whatever type they came as, and rejected with the value and the limits."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest

from cbresearch import checks


@dataclass(frozen=True)
class Settings:
    size: int
    spare: int = 0
    limit: int | None = None
    ratio: float = 0.5
    speed: float | None = None
    flag: bool = False
    ids: tuple[int, ...] = ()

    def __post_init__(self):
        checks.check_numbers(self, ratio=(0, 1))


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_count_becomes_a_plain_int(value):
    assert type(checks.count("n", value)) is int


@pytest.mark.parametrize("value", [0.5, 2, np.float32(0.5), np.int64(2)])
def test_real_becomes_a_plain_float(value):
    assert type(checks.real("x", value)) is float


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: checks.count("n", 0), "n is 0; it must be an integer of at least 1"),
        (lambda: checks.count("n", True), "n is True; it must be an integer of at least 1"),
        (lambda: checks.count("n", 2.0, 0), "n is 2.0; it must be an integer of at least 0"),
        (lambda: checks.count("n", 11, 1, 10), "n is 11; it must be an integer from 1 to 10"),
        (lambda: checks.real("x", "1"), "x is '1'; it must be a finite number, 0 or more"),
        (lambda: checks.real("x", math.nan), "x is nan; it must be a finite number, 0 or more"),
        (lambda: checks.real("x", math.inf, unit="seconds"), "must be a finite number of seconds, 0 or more"),
        (lambda: checks.real("x", -(10**400)), "it must be a finite number, 0 or more"),
        (lambda: checks.real("x", 0, positive=True), "x is 0; it must be a positive number"),
        (
            lambda: checks.real("x", -1, positive=True, unit="seconds"),
            "it must be a positive number of seconds",
        ),
        (lambda: checks.real("x", 2, 0, 1), "x is 2; it must be a number from 0 to 1"),
        (lambda: checks.real("x", math.nan, -math.inf), "x is nan; it must be a finite number"),
        (lambda: checks.count("n", 0.5, -math.inf), "n is 0.5; it must be an integer"),
        (lambda: checks.count("n", -(10**5000)), "n is an integer of 16610 bits; it must be an integer of"),
    ],
)
def test_a_number_out_of_range_is_rejected_with_the_value_and_the_limits(check, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check()


def test_check_numbers_makes_the_fields_of_a_dataclass_plain():
    made = Settings(np.int64(3), spare=np.int32(0), limit=np.int8(2), ratio=1, speed=np.float32(2))
    assert made == Settings(3, 0, 2, 1.0, 2.0)
    assert [type(value) for value in (made.size, made.spare, made.limit, made.ratio, made.speed)] == [
        int,
        int,
        int,
        float,
        float,
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size": 0}, "Settings: size is 0; it must be an integer of at least 1"),
        ({"size": None}, "Settings: size is None"),
        ({"spare": -1}, "Settings: spare is -1; it must be an integer of at least 0"),
        ({"spare": None}, "Settings: spare is None"),
        ({"limit": 0}, "Settings: limit is 0; it must be an integer of at least 1"),
        ({"ratio": 1.1}, "Settings: ratio is 1.1; it must be a number from 0 to 1"),
        ({"speed": 0}, "Settings: speed is 0; it must be a positive number"),
        ({"flag": "no"}, "Settings: flag is 'no'; it must be True or False"),
        ({"flag": 1}, "Settings: flag is 1; it must be True or False"),
    ],
)
def test_check_numbers_derives_limits_from_types_and_defaults(fields, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Settings(**{"size": 1, **fields})


@pytest.mark.parametrize("value", ["", "a", "a,b\n\0", "\U0001f600"])
def test_text_takes_every_text_that_can_be_written(value):
    checks.text("x", value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "x is None; it must be a text"),
        (b"a", "x is b'a'; it must be a text"),
        ("a\ud83d", "x has '\\ud83d', half a surrogate pair"),
    ],
)
def test_text_rejects_what_cannot_be_written(value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        checks.text("x", value)
    checks.text("x", None, optional=True)
