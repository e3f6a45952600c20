"""One update of weights: in their own type, and through float32 masters, all at once or in portions."""

from collections.abc import Callable, Iterable

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


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW, its updates are as large as the gradients."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def expected_masters(
    dtype: torch.dtype, factor: float, steps: int, make: Callable[..., torch.optim.Optimizer] = adamw
) -> list[Tensor]:
    """The same in plain torch: an optimizer over float32 copies."""
    local = weights(dtype)
    masters = [nn.Parameter(each.tensor.detach().float()) for each in local]
    optimizer = make(masters)
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
    direct = DirectStepper(momentum, [each.parameter for each in local], local, in_parts=False)
    for step in range(4):
        set_gradients(local, step)
        direct.step(0.5)
    masters = expected_masters(torch.float32, 0.5, steps=4, make=momentum)
    for each, expected in zip(local, masters, strict=True):
        torch.testing.assert_close(each.tensor.detach(), expected, rtol=1e-6, atol=1e-7)
        assert set(direct.state(each)) == {"momentum_buffer"}


def two_weights() -> list[LocalParameter]:
    values = [nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) for _ in range(2)]
    return [LocalParameter(str(index), value, value) for index, value in enumerate(values)]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_updates_that_are_too_small_for_the_weight_add_up_in_the_master() -> None:
    """Added to the weight itself, 1e-3 would be lost each time: bf16 has steps of 1/128 there."""
    local = two_weights()[:1]
    masters = MasterStepper(sgd, [local[0].parameter], local, in_parts=False)
    for _ in range(10):
        local[0].tensor.grad = torch.full((2,), -1e-3, dtype=torch.bfloat16)
        masters.step(1.0)
    assert masters.state(local[0])[MASTER].tolist() == pytest.approx([1.01, 2.01], rel=1e-5)
    assert local[0].tensor.tolist() == [1.0078125, 2.015625]


def test_a_step_leaves_the_gradient_as_it_was_and_none_at_the_masters() -> None:
    """Its memory is a bucket's; that of the masters' gradients would stay until the next step."""
    local = two_weights()
    masters = MasterStepper(sgd, [each.parameter for each in local], local, in_parts=False)
    gradient = torch.tensor([4.0, 8.0], dtype=torch.bfloat16)
    local[0].tensor.grad = gradient
    masters.step(0.25)
    assert local[0].tensor.grad is gradient
    assert gradient.tolist() == [4.0, 8.0]
    assert [p.grad for group in masters.optimizer.param_groups for p in group["params"]] == [None, None]


def test_a_weight_without_a_gradient_keeps_its_value_and_has_no_state_but_its_master() -> None:
    first, second = local = two_weights()
    masters = MasterStepper(adamw, [each.parameter for each in local], local, in_parts=False)
    first.tensor.grad = torch.ones(2, dtype=torch.bfloat16)
    masters.step(1.0)
    assert masters.state(first).keys() == {MASTER, "step", "exp_avg", "exp_avg_sq"}
    assert masters.state(second).keys() == {MASTER}
    assert second.tensor.tolist() == [1.0, 2.0]


def test_runs_of_one_parameter_each_have_their_own_state() -> None:
    whole = nn.Parameter(torch.arange(6.0))
    local = [
        LocalParameter("w", whole, nn.Parameter(whole.detach()[begin:end]), begin)
        for begin, end in ((0, 4), (4, 6))
    ]
    direct = DirectStepper(adamw, [whole], local, in_parts=True)
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    direct.step(1.0)
    assert [direct.state(each)["exp_avg"].shape for each in local] == [(4,), (2,)]
