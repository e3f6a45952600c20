"""One update of weights: in their own type, and through float32 masters."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.ownership import MASTER, LocalParameter
from echelon.precision import DirectStepper, MasterStepper, stepper
from tests.peak_memory import PeakMemory

SIZES = (3, 5, 2)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def weights(dtype: torch.dtype) -> list[LocalParameter]:
    generator = torch.Generator().manual_seed(0)
    values = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    return [LocalParameter(str(index), value, value) for index, value in enumerate(values)]


def set_gradients(local: list[LocalParameter], step: int, dtype: torch.dtype | None = None) -> None:
    """Of the type of their weights, or of another one, with the same values."""
    generator = torch.Generator().manual_seed(100 + step)
    for each in local:
        gradient = torch.randn(each.tensor.shape, generator=generator)
        each.tensor.grad_dtype = dtype or each.tensor.dtype
        each.tensor.grad = gradient.to(each.tensor.dtype).to(each.tensor.grad_dtype)
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


def deferred_and_not(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("deferred", [False, True], ids=["direct", "deferred"])(test)


@deferred_and_not
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_masters_are_updated_once_in_each_step(deferred: bool, gradients: torch.dtype) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local, deferred=deferred)
    for step in range(4):
        set_gradients(local, step, gradients)
        masters.step(0.5)
    for each, expected in zip(local, expected_masters(torch.bfloat16, 0.5, steps=4), strict=True):
        state = masters.state(each)
        torch.testing.assert_close(state[MASTER], expected, rtol=1e-6 * deferred, atol=1e-6 * deferred)
        assert torch.equal(each.tensor.detach(), state[MASTER].bfloat16())
        assert int(state["step"]) == sum(step % len(local) != int(each.name) for step in range(4))


@deferred_and_not
def test_one_step_is_one_call(deferred: bool) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local, deferred=deferred)
    calls: list[int] = []
    masters.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    set_gradients(local, 0)
    masters.step(1.0)
    assert calls == [1]


class CountingSGD(torch.optim.SGD):
    """Counts its steps by itself, as optimizers do that change their rate."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_an_optimizer_of_the_user_s_own_is_called_once() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(CountingSGD, [each.parameter for each in local], local)
    set_gradients(local, 0)
    masters.step(1.0)
    assert isinstance(masters.optimizer, CountingSGD)
    assert masters.optimizer.steps == 1


def test_a_step_that_somebody_has_replaced_is_called_once() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local)
    steps: list[int] = []
    masters.optimizer.step = lambda: steps.append(1)  # type: ignore[method-assign, assignment]
    set_gradients(local, 0)
    masters.step(1.0)
    assert steps == [1]


@deferred_and_not
def test_gradients_in_bf16_and_their_copies_take_no_more_than_float32_gradients(deferred: bool) -> None:
    """All of them were copied at once: 6 bytes per parameter in all, where float32 gradients take 4."""
    local = [LocalParameter(str(size), p, p) for size in (640, 64, 320, 256) for p in [low_weight(size)]]
    masters = MasterStepper(sgd, [each.parameter for each in local], local, deferred=deferred)
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    masters.step(1.0)
    with PeakMemory() as memory:
        masters.step(1.0)
    gradients = sum(each.tensor.numel() for each in local)
    assert 2 * gradients + memory.peak <= 4 * gradients + 64, "and a few numbers"
    assert all(bool((each.tensor == -2).all()) for each in local)


def portioned(make: Callable[..., torch.optim.Optimizer], *, deferred: bool) -> MasterStepper:
    """Four weights with bf16 gradients, which are updated two at a time."""
    local = [LocalParameter(str(number), p, p) for number in range(4) for p in [low_weight(64)]]
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    return MasterStepper(make, [each.parameter for each in local], local, deferred=deferred)


def test_a_flag_that_must_be_read_is_read_once_for_all_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = portioned(partial(torch.optim.SGD, lr=0.1, foreach=True), deferred=True)
    masters.step(1.0)  # the first update of each weight reads it by itself
    reads: list[int] = []
    read = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(1) or read(self))
    masters.step(1.0, torch.tensor(False))
    assert len(reads) == 1


def test_a_scheduler_of_rates_does_not_make_one_portion_of_all() -> None:
    optimizer = portioned(partial(torch.optim.SGD, lr=0.1), deferred=False).optimizer
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert "step" in vars(optimizer)
    assert stepper.takes_portions(optimizer)


def low_weight(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))


def test_masters_share_one_memory_and_each_has_a_place_of_its_own() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local)
    assert not any(masters.state(each) for each in local), "before an update they are what the weights are"
    masters.step(1.0)
    views = [masters.state(each)[MASTER] for each in local]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert [view.data_ptr() % 256 for view in views] == [views[0].data_ptr() % 256] * len(views)
    for view, each in zip(views, local, strict=True):
        assert torch.equal(view, each.tensor.detach().float())


@deferred_and_not
def test_a_gradient_that_lies_unlike_its_master_is_copied(deferred: bool) -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = gradient = torch.arange(6.0).view(3, 2).t()
    local = [LocalParameter("w", weight, weight)]
    masters = MasterStepper(sgd, [weight], local, deferred=deferred)
    masters.step(2.0)
    assert torch.equal(masters.state(local[0])[MASTER], -2 * torch.arange(6.0).view(3, 2).t())
    assert gradient.flatten().tolist() == [0, 2, 4, 1, 3, 5], "the copy was scaled"


@deferred_and_not
def test_a_skipped_step_changes_neither_weights_nor_masters(deferred: bool) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw, [each.parameter for each in local], local, deferred=deferred)
    for step, skip in ((3, False), (4, False), (5, False), (6, True)):
        set_gradients(local, step)
        before = [(each.tensor.detach().clone(), copy.deepcopy(masters.state(each))) for each in local]
        masters.step(torch.tensor(0.5, dtype=torch.float64), torch.tensor(skip))
        same = [
            torch.equal(each.tensor.detach(), weight)
            and masters.state(each).keys() == state.keys()
            and all(torch.equal(value, state[key]) for key, value in masters.state(each).items())
            for each, (weight, state) in zip(local, before, strict=True)
        ]
        assert all(same) == skip


def test_without_masters_the_weights_themselves_are_updated_by_the_scaled_gradient() -> None:
    local = weights(torch.float32)
    direct = DirectStepper(momentum, [each.parameter for each in local], local)
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
    masters = MasterStepper(sgd, [local[0].parameter], local)
    for _ in range(10):
        local[0].tensor.grad = torch.full((2,), -1e-3, dtype=torch.bfloat16)
        masters.step(1.0)
    assert masters.state(local[0])[MASTER].tolist() == pytest.approx([1.01, 2.01], rel=1e-5)
    assert local[0].tensor.tolist() == [1.0078125, 2.015625]


def test_a_step_leaves_no_gradient_at_the_masters() -> None:
    """It would keep memory until the next step, a bucket's or that of a float32 copy."""
    local = two_weights()
    masters = MasterStepper(sgd, [each.parameter for each in local], local)
    gradient = torch.tensor([4.0, 8.0], dtype=torch.bfloat16)
    local[0].tensor.grad = gradient
    masters.step(0.25)
    assert local[0].tensor.tolist() == [0.0, 0.0]
    assert local[0].tensor.grad is gradient
    assert [p.grad for group in masters.optimizer.param_groups for p in group["params"]] == [None, None]


def test_a_weight_without_a_gradient_keeps_its_value_and_has_no_state_but_its_master() -> None:
    first, second = local = two_weights()
    masters = MasterStepper(adamw, [each.parameter for each in local], local)
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
    direct = DirectStepper(adamw, [whole], local)
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    direct.step(1.0)
    assert [direct.state(each)["exp_avg"].shape for each in local] == [(4,), (2,)]
