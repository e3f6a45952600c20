"""The user's optimizer over the parts of parameters that a rank holds."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from echelon.update.optim.local import Make, make_local


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
    optimizer = make_local(grouped, [matrix, vector, elsewhere], parts)
    decayed, plain = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(part) for part in parts[matrix]], "flat, but a matrix's"
    assert [id(p) for p in plain["params"]] == [id(vector)]
    for part in (*parts[matrix], vector):
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(part) for part in (*parts[matrix], vector)}


def matrices_alone(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


@pytest.mark.parametrize("make", [torch.optim.SGD, matrices_alone])
def test_a_stage_without_parameters_has_an_optimizer_that_does_nothing(make: Make) -> None:
    optimizer = make_local(make, [], {})
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    optimizer.step()


def with_state(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that makes its state at once, of whole parameters."""
    return torch.optim.Adagrad(parameters)


def test_state_of_whole_parameters_is_forgotten() -> None:
    whole = [nn.Parameter(torch.ones(2))]
    assert with_state(whole).state
    assert not make_local(with_state, whole, {}).state
