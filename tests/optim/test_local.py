"""The user's optimizer over the parts of parameters that a rank holds."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.optim.local import make_local, works_by_element


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As users write it: matrices are decayed, vectors are not."""
    every = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0},
        ]
    )


def test_rules_see_the_parameters_and_the_groups_hold_the_parts() -> None:
    matrix, vector, elsewhere = (nn.Parameter(torch.ones(shape)) for shape in ((4, 2), (4,), (2, 2)))
    parts = {matrix: [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], vector: [vector]}
    optimizer = make_local(grouped, [matrix, vector, elsewhere], parts, in_parts=True)
    decayed, plain = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(part) for part in parts[matrix]], "flat, but a matrix's"
    assert [id(p) for p in plain["params"]] == [id(vector)]
    for part in (*parts[matrix], vector):
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(part) for part in (*parts[matrix], vector)}


def test_a_stage_without_parameters_has_an_optimizer_that_does_nothing() -> None:
    optimizer = make_local(lambda parameters: torch.optim.SGD(parameters, lr=0.1), [], {}, in_parts=True)
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    optimizer.step()


class Rowwise(torch.optim.SGD):
    """Its update of an element depends on its neighbours."""


class Declared(torch.optim.SGD):
    elementwise = True


def test_parts_need_an_optimizer_that_works_by_element() -> None:
    weight = nn.Parameter(torch.ones(2))

    def local(kind: Any, in_parts: bool) -> torch.optim.Optimizer:
        return make_local(
            lambda parameters: kind(parameters, lr=0.1), [weight], {weight: [weight]}, in_parts=in_parts
        )

    with pytest.raises(UserError, match=r"optimizer Rowwise with zero=1 or more.*zero=0 without shard"):
        local(Rowwise, in_parts=True)
    for kind, in_parts in ((Rowwise, False), (Declared, True), (torch.optim.SGD, True)):
        assert isinstance(local(kind, in_parts), kind)


def test_which_optimizers_work_by_element() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert works_by_element(torch.optim.Adam([weight]))
    assert not works_by_element(torch.optim.Adafactor([weight])), "its moments are of rows and columns"
    assert not works_by_element(Declared([weight], lr=0.1)), "of torch's own alone"


def with_state(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that makes its state at once, of whole parameters."""
    return torch.optim.Adagrad(parameters)


def test_state_of_whole_parameters_is_forgotten() -> None:
    whole = [nn.Parameter(torch.ones(2))]
    assert with_state(whole).state
    assert not make_local(with_state, whole, {}, in_parts=False).state


def test_a_class_with_the_name_of_torch_s_is_not_torch_s() -> None:
    namesake = type("AdamW", (Declared,), {})
    assert not works_by_element(namesake([nn.Parameter(torch.ones(2))], lr=0.1))
