"""When the entries of an audit are asked, and what of them is kept."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.audit import AuditResult, held, skipped
from echelon.engine.first_step import Audit
from echelon.errors import UserError
from tests.cases import mean_loss, sgd, vectors


class Entry:
    """Cannot tell the first times."""

    def __init__(self, *, undecided: int = 0, always: bool = False) -> None:
        self.undecided, self.asked = 10 if always else undecided, 0

    def __call__(self, batch: Any) -> AuditResult:
        self.asked += 1
        if self.asked <= self.undecided:
            return skipped("entry", f"batch {batch} is small", is_final=False)
        return held("entry")


def test_an_entry_is_asked_once_or_always() -> None:
    once, always = Entry(), Entry()
    audits = Audit([once], "first"), Audit([always], "always")
    for _ in range(3):
        for audit in audits:
            if not audit.is_over:
                audit.ask(None)
    assert (once.asked, always.asked) == (1, 3)
    assert [audit.is_over for audit in audits] == [True, False]


def test_an_entry_that_cannot_tell_is_asked_in_three_steps_at_most() -> None:
    entry, never = Entry(undecided=1), Entry(always=True)
    audit = Audit([entry, never], "first")
    while not audit.is_over:
        audit.ask(7)
    assert (entry.asked, never.asked) == (2, 3)
    assert [str(result) for result in audit.results] == ["entry: held", "entry: skipped (batch 7 is small)"]


def test_a_refused_step_is_asked_again() -> None:
    def refuse(batch: Any) -> AuditResult:
        if batch:
            raise UserError("no")
        return held("entry")

    audit = Audit([refuse], "first")
    with pytest.raises(UserError):
        audit.ask(1)
    audit.ask(0)
    assert audit.is_over


def test_weights_that_are_no_numbers_are_named_before_the_first_step() -> None:
    model = nn.Linear(6, 5)
    nn.init.constant_(model.bias, float("nan"))
    with echelon.parallelize(model, "data=1", optimizer=sgd, loss=mean_loss) as engine:
        with pytest.raises(UserError, match="before the first step: bias, on rank 0"):
            engine.step(vectors(0))
        with torch.no_grad():
            model.bias.zero_()
        engine.step(vectors(0))
    assert engine.steps == 1


def test_an_engine_shows_what_was_skipped() -> None:
    engine = echelon.parallelize(nn.Linear(6, 5), "microbatches=2", optimizer=sgd, loss=mean_loss)
    engine.step(vectors(0, samples=1))
    assert "  audit of samples: skipped (a replica has less than two samples" in repr(engine)
    engine.step(vectors(1))
    assert "audit" not in repr(engine)
