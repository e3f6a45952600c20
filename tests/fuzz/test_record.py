"""Records of random trainings: counts, refusals by text, failures, and the table of models and plan words."""

from collections.abc import Callable
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from tests.fuzz.matrix import Cell, cells
from tests.fuzz.pool import POOL
from tests.fuzz.random_training import RandomTraining
from tests.fuzz.record import merge, merge_cells, part_of
from tests.fuzz.refusal import run_or_refuse
from tests.fuzz.runner import EQUAL, FAILED, REFUSED, Attempt


def attempt(result: str, text: str = "", model: str = "gpt") -> Attempt:
    return Attempt(RandomTraining(Plan(), model=model), result, text, 1.0)


def test_parts_are_merged_into_counts_by_result_and_by_text() -> None:
    refusal = "plan 'data=2': 3 heads are not divisible by 2"
    parts = [
        part_of([attempt(EQUAL), attempt(REFUSED, refusal, "cnn")]),
        part_of([attempt(REFUSED, refusal.replace("3", "5"), "cnn"), attempt(FAILED, "KeyError: 1")]),
    ]
    record = merge(parts, "command", {"seed": 7})
    counts = {"pairs": 4, "equal": 1, "refused": 2, "failed": 1}
    assert record["settings"].items() >= ({"seed": 7} | counts).items()
    assert record["models"] == {"cnn": {"refused": 2}, "gpt": {"equal": 1, "failed": 1}}
    assert record["refusals"] == {"plan '…': N heads are not divisible by N": 2}
    assert [failure["texts"] for failure in record["failures"]] == [["KeyError: 1"]]


@pytest.mark.skipif("hf-llama" not in POOL, reason="transformers is not installed")
def test_a_cell_has_the_result_of_its_training() -> None:
    cell, training = next(cells())
    record = merge_cells([part_of([Attempt(training, REFUSED, "too few layers", 1.0)])], "command", {})
    assert record["cells"] == [{**cell._asdict(), "result": "refused", "text": "too few layers"}]


def test_every_cell_of_the_table_is_a_training_of_its_ranks() -> None:
    trainings: dict[Cell, RandomTraining] = dict(cells())
    assert [cell for cell, training in trainings.items() if cell.ranks != training.ranks] == []
    named = {name for plan in {training.plan for training in trainings.values()} for name in _words(plan)}
    if trainings:
        assert named == set(Plan.__dataclass_fields__) - {"graphs"}  # of which a CPU has none


def _words(plan: Plan) -> set[str]:
    """The fields that a plan sets."""
    simplest = Plan()
    return {name for name in Plan.__dataclass_fields__ if getattr(plan, name) != getattr(simplest, name)}


class Answers:
    """Ranks that answer one call, each with what its function returns or raises."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self._functions = functions

    def run(self, fn: Callable[..., Any], *_: Any) -> list[Any]:
        return [fn(function) for function in self._functions]


def call(function: Callable[[], Any]) -> Any:
    return function()


def refuse() -> None:
    raise UserError("no such plan")


def test_a_refusal_of_all_ranks_is_raised_and_one_of_some_is_an_error() -> None:
    ranks: Any = Answers(refuse, refuse)
    with pytest.raises(UserError, match="no such plan"):
        run_or_refuse(ranks, call)
    ranks = Answers(dict, refuse)
    with pytest.raises(AssertionError, match="1 of 2 ranks refuse: no such plan"):
        run_or_refuse(ranks, call)
    ranks = Answers(dict, dict)
    assert run_or_refuse(ranks, call) == [{}, {}]
