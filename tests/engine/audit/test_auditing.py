"""When steps are audited, and what is said of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit import AuditResult, Mode, auditing, held, skipped
from echelon.engine.audit.audit_batch import GivenBatch, sample_traits
from echelon.engine.audit.auditing import Audit
from echelon.errors import UserError
from tests.cases import mean_loss, sgd, vectors

Answer = Callable[[Any], AuditResult]


class Gradients:
    """Remembers in which steps it was asked."""

    replica = 0

    def __init__(self, answer: Answer) -> None:
        self.answer, self.steps = answer, list[int]()

    def __call__(self, batch: Any, step: int, **_: Any) -> AuditResult:
        self.steps.append(step + 1)
        return self.answer(batch)


def audit_of(gradients: Gradients, mode: Mode, *, watches: bool = False) -> Audit:
    agreement = RankAgreement(None, torch.device("cpu"))
    return Audit(mode, gradients, lambda: held("finite weights"), agreement, watches=watches)  # type: ignore[arg-type]


def asked(mode: Mode, steps: int, answer: Answer = lambda _: held("gradients")) -> list[int]:
    gradients = Gradients(answer)
    audit = audit_of(gradients, mode)
    for step in range(steps):
        audit.ask(None, step, is_empty=True)
    return gradients.steps


def test_the_steps_of_each_mode() -> None:
    assert asked("first", 20) == [1]
    assert asked("sampled", 1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert asked("always", 4) == [1, 2, 3, 4]


def test_a_batch_that_cannot_tell_is_followed_by_another_three_times_at_most() -> None:
    assert asked("first", 9, lambda _: skipped("gradients", "no sample", is_final=False)) == [1, 2, 3, 4]
    assert asked("sampled", 9, lambda _: skipped("gradients", "no sample", is_final=False)) == [1, 2, 3, 4, 8]


def test_a_refused_step_is_asked_again() -> None:
    def refuse(batch: Any) -> AuditResult:
        if batch == 1:
            raise UserError("no")
        return held("gradients")

    audit = audit_of(Gradients(refuse), "first")
    with pytest.raises(UserError):
        audit.ask(1, 0, is_empty=True)
    audit.ask(0, 1, is_empty=True)
    assert [str(each) for each in audit.results] == ["finite weights: held", "gradients: held"]
    assert not audit.is_on


def test_a_pipeline_that_is_not_empty_is_asked_later() -> None:
    gradients = Gradients(lambda _: held("gradients"))
    audit = audit_of(gradients, "sampled")
    for step, is_empty in enumerate([True, False, False, True, False]):
        audit.ask(None, step, is_empty=is_empty)
    assert gradients.steps == [1, 4]


def test_batches_with_new_traits_are_asked_once() -> None:
    gradients = Gradients(lambda _: held("gradients"))
    audit = audit_of(gradients, "sampled", watches=True)
    plain, padded = torch.tensor([[1, 2], [3, 1]]), torch.tensor([[1, 2], [3, -100]])
    for step in range(9):
        pair = (torch.zeros(2, 3), padded if step in (4, 5) else plain)
        audit.ask(GivenBatch(pair, pair, lambda given: given), step, is_empty=True)
    assert gradients.steps == [1, 2, 4, 5, 8]


def test_a_rank_whose_batches_are_known_counts_no_traits_and_hears_of_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_counts, others_new = 0, 0

    def count(batch: Any) -> Tensor | None:
        nonlocal num_counts
        num_counts += 1
        return sample_traits(batch)

    def largest(_: RankAgreement, flag: Tensor) -> Tensor:
        return flag.clamp(min=others_new)

    monkeypatch.setattr(auditing, "sample_traits", count)
    monkeypatch.setattr(RankAgreement, "largest", largest)
    gradients = Gradients(lambda _: held("gradients"))
    audit = audit_of(gradients, "sampled", watches=True)
    monkeypatch.setattr(audit._agreement, "group", object())
    monkeypatch.setattr(audit._agreement, "gather", lambda value: [value])
    pair = torch.tensor([[0.5, 1.0, 1.5], [1.0, 0.5, 0.5]]), torch.tensor([[1, 2], [3, 1]])
    for step in range(7):
        others_new = int(step == 5)
        audit.ask(GivenBatch(pair, pair, lambda given: given), step, is_empty=True)
    assert (gradients.steps, num_counts) == ([1, 2, 4, 6], 4)


def test_all_samples_of_a_batch_that_took_another_way_are_compared_by_the_next_step() -> None:
    class Compared(Gradients):
        def __call__(self, batch: Any, step: int, *, all_samples: bool = False, **_: Any) -> AuditResult:
            self.others += [(batch, step + 1)] if all_samples else []
            return super().__call__(batch, step)

        others: list[tuple[Any, int]] = []  # noqa: RUF012

    gradients = Compared(lambda _: held("gradients"))
    audit = audit_of(gradients, "sampled")
    for step in range(20):
        audit.ask(step + 1, step, is_empty=True, took_other_way=step in (3, 5, 6) or step > 8)
    assert gradients.others == [(5, 6), (6, 7), (9, 10), (10, 11), (16, 17)], "as many as were due"
    assert gradients.steps == [1, 2, 4, 6, 7, 8, 10, 11, 16, 17]
    off = audit_of(gradients, "first")
    off.ask(None, 0, is_empty=True)
    off.ask(None, 1, is_empty=True, took_other_way=True)
    assert len(gradients.others) == 5


def test_what_could_not_be_compared_is_said_once() -> None:
    audit = audit_of(Gradients(lambda _: skipped("gradients", "too large")), "always")
    with pytest.warns(UserWarning, match="was skipped: too large; nothing shows that this plan trains"):
        audit.ask(None, 0, is_empty=True)
    audit.ask(None, 1, is_empty=True)  # a warning would be an error


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
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(output, targets, reduction="sum"), (targets >= 0).sum()

    engine = echelon.parallelize(nn.Linear(6, 5), "microbatches=2", optimizer=sgd, loss=loss)
    inputs, targets = vectors(0)
    with pytest.raises(UserError, match="no replica had a sample"):
        engine.step((inputs, torch.full_like(targets, -100)))
    assert "  audit of gradients: skipped (the loss counts none of its samples)" in repr(engine)
    engine.step(vectors(1))
    assert "audit" not in repr(engine)
