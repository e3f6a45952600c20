"""Adam over masters in one pass is torch's Adam over masters, and reads nothing from the device."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.state.ownership import LocalParameter
from echelon.update.precision.fused_adam import FusedAdam
from echelon.update.precision.stepper import MasterStepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1,), (7, 3), (2048,), (5000, 33), (300, 1000)]


def make(
    optimizer: Any, weight_type: torch.dtype, *, fuses: bool
) -> tuple[MasterStepper, list[nn.Parameter]]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, device="cuda").to(weight_type)) for shape in SHAPES]
    local = [LocalParameter(f"w{number}", weight, weight, 0) for number, weight in enumerate(weights)]

    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return optimizer([{"params": [first], "lr": 1e-2, "weight_decay": 0.0}, {"params": rest}])

    stepper = MasterStepper(groups(weights), local, deferred=True)
    if not fuses:
        stepper._fused = None
    return stepper, weights


def train(stepper: MasterStepper, weights: list[nn.Parameter], gradient_type: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(6):
        for weight in weights:
            weight.grad_dtype = gradient_type
            weight.grad = torch.randn(weight.shape, device="cuda", generator=generator).to(gradient_type)
        skip = torch.full((), step == 3, device="cuda")
        stepper.step(torch.full((), 0.5, device="cuda", dtype=torch.float64), skip)


def states(stepper: MasterStepper) -> list[Tensor]:
    return [value for local in stepper._local for _, value in sorted(stepper.state(local).items())]


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_type", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_it_is_the_update_of_torch(
    optimizer: Any, weight_type: torch.dtype, gradient_type: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_steps = []
    step = FusedAdam.step
    monkeypatch.setattr(
        FusedAdam, "step", lambda self, *given: (fused_steps.append(given), step(self, *given))
    )

    def options(groups: Any) -> torch.optim.Optimizer:
        return optimizer(groups, lr=1e-3, weight_decay=0.1)

    found = []
    for fuses in (False, True):
        stepper, weights = make(options, weight_type, fuses=fuses)
        train(stepper, weights, gradient_type)
        found.append([*weights, *states(stepper)])
    assert len(fused_steps) == 5, "all but the first, which makes the state"
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=1e-2 if ours.itemsize == 2 else 1e-5, atol=1e-6
        )
    differing = [
        (ours != theirs).float().mean().item()
        for ours, theirs in zip(*found, strict=True)
        if ours.itemsize == 2
    ]
    assert max(differing) < 1e-2, "weights are rounded from masters to the nearest"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_skipped_update_changes_nothing_and_nobody_waits() -> None:
    stepper, weights = make(lambda groups: torch.optim.AdamW(groups, lr=1e-3), torch.bfloat16, fuses=True)
    train(stepper, weights, torch.float32)
    before = [value.clone() for value in [*weights, *states(stepper)]]
    factor, skip = torch.ones((), device="cuda"), torch.ones((), device="cuda").bool()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for weight in weights:
            weight.grad = torch.ones_like(weight, dtype=torch.float32)
        stepper.step(factor, skip)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for now, then in zip([*weights, *states(stepper)], before, strict=True):
        assert torch.equal(now, then)


def test_schedulers_of_torch_see_the_steps() -> None:
    stepper, weights = make(lambda groups: torch.optim.AdamW(groups, lr=1e-3), torch.bfloat16, fuses=True)
    train(stepper, weights, torch.float32)
    scheduler = torch.optim.lr_scheduler.LambdaLR(stepper.optimizer, lambda _: 0.5)
    train(stepper, weights, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
