"""What optimizers need of a parameter, as they say or as it is known of torch's."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.update.optim import SM3, Adafactor, Need
from echelon.update.optim.needs import check_parts, need_of, works_by_element


class Rowwise(torch.optim.SGD):
    """Its update of an element depends on its neighbours."""


class Declared(torch.optim.SGD):
    elementwise = True


def declaring(needs: object) -> torch.optim.Optimizer:
    return make(type("Declaring", (torch.optim.SGD,), {"needs": needs}))


def make(kind: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(2, 2))])
    return made


@pytest.mark.parametrize(
    ("kind", "need"),
    [
        (torch.optim.AdamW, Need.ELEMENT),
        (Declared, Need.ELEMENT),
        (Adafactor, Need.SUMS),
        (SM3, Need.SUMS),
        (torch.optim.Adafactor, Need.WHOLE),
        (torch.optim.Muon, Need.WHOLE),
        (Rowwise, None),
        (type("AdamW", (Rowwise,), {}), None),  # has only the name of torch's
    ],
)
def test_what_optimizers_need(kind: Any, need: Need | None) -> None:
    assert need_of(make(kind)) is need


def test_an_optimizer_says_it_by_an_attribute() -> None:
    assert need_of(declaring("whole")) is Need.WHOLE
    assert need_of(declaring(Need.ELEMENT)) is Need.ELEMENT


@pytest.mark.parametrize(
    ("needs", "says"),
    [("rows", "needs='rows': must be 'element' or 'whole'"), ("sums", "only a subclass of .*SumOptimizer")],
)
def test_a_need_that_does_not_exist(needs: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        need_of(declaring(needs))


def test_parts_need_an_optimizer_that_says_what_it_needs() -> None:
    for kind in (torch.optim.SGD, torch.optim.Muon, Declared, Adafactor):
        check_parts(make(kind), "zero=1")
    with pytest.raises(UserError, match=r'optimizer Rowwise with zero=1: .*set `needs = "element"`.*"whole"'):
        check_parts(make(Rowwise), "zero=1")


def test_portions_are_for_torch_s_own_alone() -> None:
    assert works_by_element(make(torch.optim.Adam))
    assert not works_by_element(make(Declared)), "its state may be of all parameters together"
    assert not works_by_element(make(type("AdamW", (Declared,), {})))
