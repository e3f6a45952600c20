"""A few hundred of the inputs of `make fuzz`."""

import os

import pytest

from echelon.errors import UserError
from tests.fuzz_parsers.mutate import RAW, to_json
from tests.fuzz_parsers.runner import FAILED, OK, run_input
from tests.fuzz_parsers.targets import Target, targets


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    os.chdir(folder)
    return targets(folder)


def test_valid_inputs_are_read(known: list[Target]) -> None:
    for target in known:
        for data in target.valid:
            target.parse(data)


def test_random_inputs_are_read_or_refused(known: list[Target]) -> None:
    outcomes = [run_input(known, 0, number) for number in range(300)]
    assert not [outcome for outcome in outcomes if outcome.result == FAILED]
    assert sum(outcome.result == OK for outcome in outcomes) >= 10  # changes are not all of them large


def test_another_exception_fails() -> None:
    def wrong(data: bytes) -> None:
        raise KeyError(data)

    outcome = run_input([Target("wrong", wrong, lambda _: b"x", 1, [])], 0, 0)
    assert outcome.result == FAILED
    assert "KeyError" in outcome.text


def test_an_error_without_words_fails() -> None:
    def wordless(data: bytes) -> None:
        raise UserError("")

    assert run_input([Target("wordless", wordless, lambda _: b"x", 1, [])], 0, 0).result == FAILED


def test_marked_texts_are_written_raw() -> None:
    assert to_json({"a": RAW + "1e999", "b": RAW + '"', "c": "d"}) == b'{"a": 1e999, "b": ", "c": "d"}'
