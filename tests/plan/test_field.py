"""Each field reads its values from text and from Python values, and prints them again."""

import math
import time
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.plan import AUTO, FIELDS, Plan
from tests.plan.examples import errors_of


def test_values_are_normalised() -> None:
    assert Plan.parse("recompute=budget:2GiB").recompute == "budget:2147483648"
    assert Plan.parse("recompute=budget:500M").recompute == "budget:500000000"
    assert Plan.parse("recompute=budget:1TiB").recompute == "budget:1099511627776"
    assert Plan.parse("offload=activations,optimizer").offload == ("optimizer", "activations")
    assert Plan(offload=("none",)).offload == ()
    assert Plan.parse("sync=async data=2").staleness == math.inf
    assert str(Plan.parse("data=2 sync=async staleness=2")) == "data=2 sync=async staleness=2"
    assert Plan.parse("schedule='my plans/a.txt'").schedule == "my plans/a.txt"


def test_the_text_of_a_plan_keeps_its_order() -> None:
    # A checkpoint holds the text of its plan, and loading compares it.
    words = (
        "data=4 tensor=2 pipeline=2 context=2 attention=all-to-all zero=2 shard=2 schedule=gpipe "
        "microbatches=2 sequence=true compile=true precision=bf16 gradients=same recompute=full "
        "contiguous=true masters=false offload=optimizer delay=1 debug=true graphs=auto"
    )
    assert str(Plan.parse(words)) == words
    assert str(Plan.parse("compress=gist offload=activations")) == "offload=activations compress=gist"


def test_every_option_of_a_field_is_read_and_every_entry_has_a_meaning() -> None:
    for name, field in FIELDS.items():
        assert field.meaning, name
        for option in field.options:
            assert field.show(field.read(option)) == option, name


@pytest.mark.parametrize("budget", ["9" * 400, "9" * 5000, "0", "0.4", "1e-3", "2PiB", "", "elephants"])
def test_budgets_that_are_none(budget: str) -> None:
    (error,) = errors_of(f"recompute=budget:{budget}")
    assert "like budget:2GiB" in error


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("data", "4", 4),
        ("pipeline", "3", 3),
        ("pipeline", "3-1", (3, 1)),
        ("pipeline", "auto", AUTO),
        ("sync", "async", "async"),
        ("staleness", "inf", math.inf),
        ("staleness", "2", 2),
        ("zero", "3", 3),
        ("shard", "4", 4),
        ("shard", "0", 0),
        ("schedule", "a b.txt", "a b.txt"),
        ("sequence", "true", True),
        ("precision", "bf16", "bf16"),
        ("gradients", "same", "same"),
        ("recompute", "budget:1024", "budget:1024"),
        ("checkpoints", "split", "split"),
        ("contiguous", "true", True),
        ("debug", "true", True),
        ("update", "last-backward", "last-backward"),
        ("masters", "false", False),
        ("offload", "optimizer,activations", ("optimizer", "activations")),
        ("delay", "1", 1),
    ],
)
def test_text_is_read_and_shown_again(field: str, text: str, value: Any) -> None:
    assert FIELDS[field].read(text) == value
    assert FIELDS[field].show(value) == text
    assert FIELDS[field].read(value) == value, "a value that was read is read again"


@pytest.mark.parametrize(
    "word",
    [
        "data=1.5",
        "data=",
        "pipeline=3-0",
        "pipeline=2-",
        "sync=never",
        "staleness=-1",
        "zero=4",
        "zero=-1",
        "shard=1",
        "shard=-2",
        "schedule=gpipe2",
        "chunks=0",
        "sequence=yes",
        "precision=fp4",
        "gradients=bf16",
        "recompute=some",
        "checkpoints=host",
        "contiguous=1",
        "update=forward",
        "masters=none",
        "offload=weights",
        "delay=2",
        "compress=zip",
        "debug=all",
    ],
)
def test_other_text_is_refused_with_what_is_allowed(word: str) -> None:
    (error,) = errors_of(word)
    assert error.startswith(f"{word}: must be ")


def test_digits_of_other_scripts_are_refused() -> None:
    # int('２') is 2: the plan was read as data=2.
    for word in ["data=２", "pipeline=٣-1", "staleness=２", "zero=１", "shard=４", "recompute=budget:２GiB"]:
        (error,) = errors_of(word)
        assert error == f"{word}: numbers must be written with the digits 0 to 9"
    assert Plan.parse("schedule=計画２.txt").schedule == "計画２.txt", "a file may have any name"


def test_a_number_beyond_reason_is_refused_at_once() -> None:
    # pipeline=99999999 made tuples of that length, one for each rule.
    began = time.process_time()
    for word in ["pipeline=99999999", "pipeline=1000000-1", "data=1000000", f"tensor={'9' * 5000}"]:
        (error,) = errors_of(word)
        assert error == f"{word}: must be below 1,000,000"
    with pytest.raises(UserError, match="data=1000000000000: must be below 1,000,000"):
        Plan(data=10**12)
    assert Plan.parse("data=999999 microbatches=000004").ranks == 999_999
    assert time.process_time() - began < 5
