"""Errors for the user: one message with every error of an input, which can be written and sent on."""

import copy

import pytest

from echelon.errors import DamagedError, UserError, did_you_mean, raise_errors


def test_all_errors_of_an_input_are_in_one_message() -> None:
    raise_errors("plan 'data=1'", [])
    with pytest.raises(UserError) as one:
        raise_errors("plan 'data=0'", ["data=0: must be an integer, at least 1"])
    assert str(one.value) == "1 error in plan 'data=0':\n  - data=0: must be an integer, at least 1"
    with pytest.raises(UserError) as many:
        raise_errors("the file", [f"line {number}" for number in range(105)])
    assert (many.value.title, len(many.value.errors)) == ("105 errors in the file:", 101)
    assert many.value.errors[-1] == "and 5 more"


@pytest.mark.parametrize("kind", [UserError, DamagedError])
def test_an_error_is_the_same_on_another_rank(kind: type[UserError]) -> None:
    error = copy.copy(kind("title", ["a", "b"]))
    assert (type(error), error.title, error.errors, str(error)) == (
        kind,
        "title",
        ("a", "b"),
        "title\n  - a\n  - b",
    )


def test_half_a_character_is_shown_so_that_it_can_be_written() -> None:
    error = UserError("key \ud800", ["\udfff"])
    assert (error.title, error.errors) == ("key \\ud800", ("\\udfff",))


def test_a_word_close_to_an_option_is_guessed() -> None:
    assert did_you_mean("dat", ["data", "tensor"]) == " (did you mean 'data'?)"
    assert did_you_mean("x", iter(["data", "tensor"])) == "; known: data, tensor"
