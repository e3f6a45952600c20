"""One update of weights: in their own type, and through float32 masters, all at once or in portions."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from echelon.ownership import MASTER, LocalParameter
from echelon.precision import DirectStepper, MasterStepper, stepper

SIZES = (3, 5, 2)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of the user, which may look at all parameters in one step."""


def own_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OwnAdamW(parameters, lr=0.1)


def weights(dtype: torch.dtype) -> list[LocalParameter]:
    generator = torch.Generator().manual_seed(0)
    values = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    return [LocalParameter(str(index), value, value) for index, value in enumerate(values)]


def set_gradients(local: list[LocalParameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for each in local:
        gradient = torch.randn(each.tensor.shape, generator=generator)
        each.tensor.grad = gradient.to(each.tensor.dtype)
    local[step % len(local)].tensor.grad = None  # not used in this step


def expected_masters(dtype: torch.dtype, factor: float, steps: int) -> list[Tensor]:
    """The same in plain torch: an optimizer over float32 copies."""
    local = weights(dtype)
    masters = [nn.Parameter(each.tensor.detach().float()) for each in local]
    optimizer = adamw(masters)
    for step in range(steps):
        set_gradients(local, step)
        for each, master in zip(local, masters, strict=True):
            master.grad = None if each.tensor.grad is None else each.tensor.grad.float() * factor
        optimizer.step()
    return [master.detach() for master in masters]


@pytest.mark.parametrize("at_once", [1, 4 * (SIZES[0] + 1), 1 << 20], ids=["each", "two", "all"])
def test_masters_are_updated_once_in_each_step_whatever_the_portions(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Planted once: the gradients of a portion stayed, and the next portion updated it again."""
    monkeypatch.setattr(stepper, "_BYTES_AT_ONCE", at_once)
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local, in_parts=False)
    for step in range(4):
        set_gradients(local, step)
        masters.step(0.5)
    for each, expected in zip(local, expected_masters(torch.bfloat16, 0.5, steps=4), strict=True):
        state = masters.state(each)
        assert torch.equal(state[MASTER], expected)
        assert torch.equal(each.tensor.detach(), expected.bfloat16())
        assert int(state["step"]) == sum(step % len(local) != int(each.name) for step in range(4))


def test_an_optimizer_that_may_look_at_all_parameters_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "_BYTES_AT_ONCE", 1)
    for make, hooked, calls_per_step in ((adamw, False, 3), (own_adamw, False, 1), (adamw, True, 1)):
        local = weights(torch.bfloat16)
        masters = MasterStepper(make, [each.parameter for each in local], local, in_parts=False)
        calls: list[int] = []
        step = masters.optimizer.step
        masters.optimizer.step = lambda calls=calls, step=step: (calls.append(1), step())  # type: ignore[method-assign]
        if hooked:
            masters.optimizer.register_step_post_hook(lambda *_: None)
        set_gradients(local, 0)
        masters.step(1.0)
        assert len(calls) == calls_per_step


def test_without_masters_the_weights_themselves_are_updated_by_the_scaled_gradient() -> None:
    local = weights(torch.float32)
    direct = DirectStepper(adamw, [each.parameter for each in local], local, in_parts=False)
    for step in range(4):
        set_gradients(local, step)
        direct.step(0.5)
    for each, expected in zip(local, expected_masters(torch.float32, 0.5, steps=4), strict=True):
        torch.testing.assert_close(each.tensor.detach(), expected, rtol=1e-6, atol=1e-7)
        assert set(direct.state(each)) == {"step", "exp_avg", "exp_avg_sq"}
