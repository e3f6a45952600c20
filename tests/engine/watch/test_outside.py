"""The model outside of a step: whether the engine is at work, and attributes of modules of other stages."""

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.watch.outside import (
    AbsentAttributeError,
    AbsentReads,
    Inside,
    adds_unseen,
    mark_absent,
    part_of_weights,
    waiting_gradient,
)
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.plan import Plan


def test_an_engine_is_inside_in_its_calls_and_in_other_threads() -> None:
    inside = Inside()
    assert not inside
    with inside(), inside():
        assert inside
    assert not inside
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(bool(inside)))
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_copy_belongs_to_no_engine() -> None:
    assert copy.deepcopy(Inside())
    assert pickle.loads(pickle.dumps(Inside()))


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.ones(2)), "a word"
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.sum()
        return x * self.weight


def absent() -> tuple[Penalised, AbsentReads, Inside]:
    module, inside = Penalised(), Inside()
    reads = AbsentReads(Plan.parse("pipeline=2"), inside)
    mark_absent({"layers.1": module}, reads, Wrapping())
    return module, reads, inside


def test_outside_of_a_step_attributes_are_what_they_were_and_calls_are_refused() -> None:
    module, _, _ = absent()
    assert module.penalty is None
    assert not hasattr(module, "other")
    with pytest.raises(UserError, match=r"module layers.1 is called on a rank that does not hold it"):
        module(torch.ones(2))


def test_the_first_step_notes_a_read_and_later_ones_raise() -> None:
    module, reads, inside = absent()
    with inside():
        assert module.name == "a word", "no result of a forward"
        assert torch.equal(module.weight, torch.ones(2))
        assert module.penalty == 0, "noted, to go on with"
        with pytest.raises(UserError, match=r"layers.1.penalty is read on a rank that does not run"):
            reads.check_first_step()
        reads.check_first_step()  # the step was refused; this one is not
        with pytest.raises(AbsentAttributeError, match=r"layers\.1\.penalty"):
            _ = module.penalty
        with pytest.raises(AbsentAttributeError, match=r"layers\.1\.other"):
            _ = module.other


def test_a_copy_of_a_module_of_another_stage_is_of_its_own_class() -> None:
    module, _, inside = absent()
    with inside():
        assert type(copy.deepcopy(module)) is Penalised


def test_a_weight_of_another_stage_is_refused_between_steps() -> None:
    module, inside = nn.Linear(2, 2, bias=False), Inside()
    module._parameters["weight"] = None
    reads = AbsentReads(Plan.parse("pipeline=2"), inside)
    mark_absent({"layers.1": module}, reads, Wrapping(), {"layers.1.weight"})
    with pytest.raises(AbsentAttributeError, match=r"layers.1.weight: with pipeline=2 this rank has"):
        _ = module.weight
    assert module.bias is None, "it never had one"
    with inside():
        assert module.weight is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("data=1", None),
        ("data=2", "ranks have parts"),
        ("tensor=2", "ranks have parts"),
        ("precision=fp16", "scales it"),
        ("precision=bf16", None),
    ],
)
def test_gradients_that_wait(plan: str, words: str | None) -> None:
    text = waiting_gradient(Plan.parse(plan))
    assert text is None if words is None else words in str(text)
    assert adds_unseen(Plan.parse(plan)) is (plan in ("tensor=2", "precision=fp16"))


def test_parts_of_weights() -> None:
    assert part_of_weights(Plan.parse("tensor=2"), False) is None
    assert "this rank has a part of it" in str(part_of_weights(Plan.parse("tensor=2"), True))
    assert "of its own stage alone" in str(part_of_weights(Plan.parse("pipeline=2"), False))
