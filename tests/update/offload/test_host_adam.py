"""Adam in portions is Adam, and rounds the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.update.offload import host_adam
from echelon.update.offload.host_adam import update_in_portions
from echelon.update.optim import CombinedOptimizer

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def groups(kind: Any, **options: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        rates: Any = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.01}]
        optimizer: torch.optim.Optimizer = kind(rates, weight_decay=0.1, **options)
        return optimizer

    return make


def two_adams(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    adams = torch.optim.AdamW(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:], lr=0.01)
    return CombinedOptimizer(adams)


def masters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (3,), (40, 9), (1,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values[2] = values[2].t().contiguous().t()  # it lies in memory by columns
    return [nn.Parameter(value) for value in values]


def gradients_of(step: int, like: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.empty_like(p, dtype=dtype).copy_(torch.randn(p.shape, generator=generator)) for p in like]


def scratch(size: int) -> Tensor:
    return torch.full((size + 3,), torch.nan)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("portion", [1, 16, 2**16])
@pytest.mark.parametrize(
    "make",
    [
        groups(torch.optim.AdamW),
        groups(torch.optim.Adam),
        groups(torch.optim.AdamW, maximize=True),
        two_adams,
    ],
)
def test_it_is_the_step_of_the_optimizer(
    make: Make, portion: int, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adam, "_PORTION", portion)
    ours, theirs = masters(), masters()
    optimizer, reference = make(ours), make(theirs)
    weights = [torch.empty_like(master, dtype=torch.bfloat16) for master in ours]
    for step in range(3):
        for p, gradient in zip(theirs, gradients_of(step, theirs, dtype), strict=True):
            p.grad = gradient.float() * factor
        reference.step()
        given = gradients_of(step, ours, dtype)
        with torch.no_grad():
            is_done = update_in_portions(optimizer, ours, given, weights, factor, scratch)
        assert is_done is (step > 0), "the first step makes the state"
        if not is_done:
            for p, gradient in zip(ours, given, strict=True):
                p.grad = gradient.float() * factor
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for weight, master in zip(weights, ours, strict=True):
        assert torch.equal(weight, master.detach().bfloat16())
    states = zip(*(list(dict(each.state).values()) for each in (optimizer, reference)), strict=True)
    for one, other in states:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: CombinedOptimizer([torch.optim.AdamW(p[:2]), torch.optim.SGD(p[2:], lr=0.1)]),
    ],
)
def test_others_change_nothing(make: Make) -> None:
    parameters = masters()
    optimizer = make(parameters)
    for p, gradient in zip(parameters, gradients_of(0, parameters, torch.float32), strict=True):
        p.grad = gradient
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    weights = [torch.zeros_like(p, dtype=torch.bfloat16) for p in before]
    given = gradients_of(1, parameters, torch.float32)
    assert not update_in_portions(optimizer, parameters, given, weights, 1.0, scratch)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert not any(weight.any() for weight in weights)
