"""What a request for a plan says: words that stay, and limits that are no words of a plan."""

import pytest

from echelon.errors import UserError
from echelon.planner.searching.request import Request, is_request


def test_a_request_begins_with_auto() -> None:
    assert is_request("auto")
    assert is_request("auto precision=bf16")
    assert not any(map(is_request, ("data=2", "pipeline=auto", "", None, "automatic")))


def test_limits_are_no_words_of_a_plan() -> None:
    request = Request.parse("auto memory=100MiB precision=bf16 ranks=4 tensor=2")
    assert (request.memory, request.ranks) == (100 * 2**20, 4)
    assert request.words == "precision=bf16 tensor=2"
    assert request.fixed == {"tensor": 2}
    assert request.others == "precision=bf16"
    assert request.base.weight_bytes == 2


def test_nothing_else_than_the_choice_differs_from_a_plan_without_words() -> None:
    request = Request.parse("auto")
    assert (request.fixed, request.others, request.base.precision) == ({}, "", "fp32")


def test_fields_may_be_fixed_that_no_word_says() -> None:
    request = Request.parse("auto zero=1").fixing(tensor=1, offload=frozenset())
    assert request.fixed == {"zero": 1, "tensor": 1, "offload": frozenset()}
    assert Request.parse("auto offload=optimizer").fixed == {"offload": frozenset({"optimizer"})}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "auto memory=much ranks=0 zero=9",
            ["memory=much", "ranks=0: must be an integer", "zero=9: must be"],
        ),
        ("auto memory=1GB memory=2GB", ["memory is given 2 times"]),
        ("auto teensor=2", ["there is no field 'teensor'"]),
        ("auto pipeline=auto", ["pipeline=auto"]),
        ("auto auto", ["auto: "]),
    ],
)
def test_every_error_is_listed(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Request.parse(text)
    assert len(caught.value.errors) == len(parts)
    for part, error in zip(parts, caught.value.errors, strict=True):
        assert part in error
