"""The checks that the whole package shares: numbers and their limits, known names, errors of other kinds."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullettrain.errors import UserError, raised_as
from bullettrain.validation import check_count, check_known, check_limits, check_number, limits

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(NUMBERS, st.floats(-10, 10), st.floats(-10, 10))
def test_a_number_is_returned_if_it_is_finite_and_within_its_limits(value, low, high):
    if math.isfinite(value) and low <= value < high:
        assert check_number(value, "x", least=low, below=high) == value
    else:
        with pytest.raises(ValueError, match=f"^x is .*; it has to be at least {low:g} and below {high:g}$"):
            check_number(value, "x", least=low, below=high)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_limits_are_finite(value):
    with pytest.raises(ValueError, match="it has to be finite"):
        check_number(value, "x")


@pytest.mark.parametrize("value", [True, None, "1", 1j, [1]])
def test_what_is_no_number_is_refused_by_its_type(value):
    for check in (check_number, check_count):
        with pytest.raises(TypeError, match=r"x is .*; it has to be a .*number"):
            check(value, "x")


def test_a_count_is_a_whole_number_of_any_length():
    assert check_count(10**400, "x") == 10**400
    with pytest.raises(TypeError, match=r"x is 3\.0; it has to be a whole number"):
        check_count(3.0, "x")
    with pytest.raises(ValueError, match="x is 0; it has to be at least 1 and at most 9"):
        check_count(0, "x", least=1, most=9)


@dataclass
class Settings:
    """Fields with limits, of all the types that have them."""

    steps: int = field(default=1, metadata=limits(least=1))
    size: float | None = field(default=None, metadata=limits(above=0))
    share: bool | float = field(default=False, metadata=limits(least=0, most=1))
    epochs: tuple[int, ...] = field(default=(), metadata=limits(least=1))
    name: str = "free"


def test_limits_are_checked_where_they_are_declared():
    for right in ({}, {"size": 0.1}, {"share": True}, {"share": 0.5}, {"epochs": (1, 2)}, {"name": ""}):
        check_limits(Settings(**right))
    for wrong, message in (
        ({"steps": 0}, "own.steps is 0; it has to be at least 1"),
        ({"steps": None}, "own.steps is None; it has to be a whole number"),
        ({"steps": True}, "own.steps is True; it has to be a whole number"),
        ({"size": 0}, "own.size is 0; it has to be above 0"),
        ({"share": 2}, "own.share is 2; it has to be at least 0 and at most 1"),
        ({"epochs": (3, 0)}, "own.epochs is 0; it has to be at least 1"),
    ):
        with pytest.raises((UserError, TypeError), match=message):
            check_limits(Settings(**wrong), "own.", UserError)


def test_an_unknown_name_is_told_the_known_ones():
    assert check_known("l2", {"linf": 1, "l2": 2}, "there is no norm") == "l2"
    with pytest.raises(UserError, match=r"^there is no norm 'l3'; there are linf, l2$"):
        check_known("l3", ("linf", "l2"), "there is no norm", error=UserError)
    with pytest.raises(ValueError, match=r"^--norm is 'lnif'; a page lists them; did you mean 'linf'.$"):
        check_known("lnif", ("linf", "l2"), "--norm is", listed="a page lists them")


def test_expected_errors_become_one_kind_and_others_pass():
    with (
        pytest.raises(UserError, match=r"^a\{b\}: first line; again$") as caught,
        raised_as(UserError, "a{b}: {error}; again", KeyError, ValueError),
    ):
        raise ValueError("first line\nsecond line")
    assert caught.value.__suppress_context__
    with (
        pytest.raises(UserError, match=r"^it says 3$"),
        raised_as(UserError, lambda error: f"it says {error.args[0]}", ValueError),
    ):
        raise ValueError(3)
    with pytest.raises(OSError, match="full"), raised_as(UserError, "{error}", ValueError):
        raise OSError("full")
