"""When masters are updated in one pass, and that it is then the update of torch; see tests/gpu too."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.state.ownership import LocalParameter
from echelon.update.precision.fused_adam import FusedAdam, Prepared
from echelon.update.precision.stepper import MasterStepper
from tests.update.precision.adam_on_cpu import adam_on_cpu

SHAPES = [(3,), (4, 5), (600,), (2, 3)]


@pytest.fixture(autouse=True)
def kernel() -> Iterator[Any]:
    with adam_on_cpu() as module:
        yield module


def adam(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, **options)


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, **options)


class Training:
    """Masters of half-precision weights, in two groups of parameters."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *, fuses: bool = True) -> None:
        torch.manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(shape).half()) for shape in SHAPES]
        local = [LocalParameter(f"w{number}", weight, weight) for number, weight in enumerate(self.weights)]

        def groups(parameters: Any) -> torch.optim.Optimizer:
            first, *rest = parameters
            return make([{"params": [first], "lr": 1e-1, "weight_decay": 0.0}, {"params": rest}])

        self.stepper = MasterStepper(groups(self.weights), local, deferred=True)
        if not fuses:
            self.stepper._fused = None
        for weight in self.weights:
            weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
            weight.grad = torch.zeros(weight.shape)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, *, skip: bool = False) -> None:
        for weight in self.weights:
            assert weight.grad is not None
            weight.grad.copy_(torch.randn(weight.shape, generator=self.generator))
        self.stepper.step(torch.tensor(0.5, dtype=torch.float64), torch.tensor(skip))

    def masters(self) -> list[nn.Parameter]:
        return [self.stepper.updated(local) for local in self.stepper._local]

    def numbers(self) -> list[Tensor]:
        states = [self.stepper.state(local) for local in self.stepper._local]
        return [*self.weights, *(value for state in states for _, value in sorted(state.items()))]

    def prepare(self) -> Prepared | None:
        return FusedAdam(self.stepper.optimizer).prepare(self.weights, self.masters())


@pytest.mark.parametrize("make", [adam, adamw])
def test_it_is_the_update_of_torch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = FusedAdam.step, []
    monkeypatch.setattr(FusedAdam, "step", lambda self, *given: (steps.append(given[0]), step(self, *given)))
    fused, plain = Training(make), Training(make, fuses=False)
    for number in range(5):
        for training in (fused, plain):
            training.step(skip=number == 3)
    assert len(steps) == 4, "all but the first, which makes the state"
    assert len(set(map(id, steps))) == 1, "prepared once"
    for ours, theirs in zip(fused.numbers(), plain.numbers(), strict=True):
        tolerance = 2e-3 if ours.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)
    assert fused.stepper.optimizer._opt_called  # type: ignore[attr-defined]


def test_a_skipped_update_changes_nothing() -> None:
    training = Training(adamw)
    training.step()
    training.step()
    before = [value.clone() for value in training.numbers()]
    training.step(skip=True)
    assert all(map(torch.equal, training.numbers(), before))


def test_only_torch_s_own_adam_with_its_defaults_is_fused() -> None:
    class Other(torch.optim.AdamW):
        pass

    def suits(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
        return FusedAdam(make([nn.Parameter(torch.ones(1))]))._suits()

    assert suits(lambda groups: adam(groups, fused=True))
    assert suits(lambda groups: adamw(groups, fused=True))
    assert not suits(adam)
    assert not suits(lambda groups: Other(groups, fused=True))
    assert not suits(lambda groups: torch.optim.SGD(groups, fused=True))
    for option in ("amsgrad", "maximize"):
        assert not suits(lambda groups, option=option: adam(groups, fused=True, **{option: True}))
    for option in ("capturable", "differentiable"):
        optimizer = adam([nn.Parameter(torch.ones(1))], fused=True)
        optimizer.param_groups[0][option] = True
        assert not FusedAdam(optimizer)._suits()
    rate = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(1e-3), fused=True)
    assert not FusedAdam(rate)._suits()
    mixed = adam(
        [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}], fused=True
    )
    mixed.param_groups[1]["fused"] = None
    assert not FusedAdam(mixed)._suits()


def test_the_first_update_is_torch_s_and_later_ones_are_prepared() -> None:
    training = Training(adamw)
    assert training.prepare() is None, "there is no state"
    training.step()
    prepared = training.prepare()
    assert prepared is not None
    assert [part.group for part in prepared.parts] == [0, 1]
    assert [len(part.steps) for part in prepared.parts] == [1, 3]
    assert FusedAdam(training.stepper.optimizer).prepare([], []) is None


def test_groups_without_a_gradient_have_no_table() -> None:
    training = Training(adamw)
    training.step()
    fused = FusedAdam(training.stepper.optimizer)
    prepared = fused.prepare(training.weights[1:], training.masters()[1:])
    assert prepared is not None
    assert [part.group for part in prepared.parts] == [1]
    before = training.masters()[0].clone()
    fused.step(prepared, 1.0, False)
    assert torch.equal(training.masters()[0], before)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: setattr(weight, "grad", None),
        lambda weight: setattr(weight, "grad", weight.grad.to_sparse()),
        lambda weight: setattr(weight, "grad", weight.grad.t().contiguous().t()),
        lambda weight: setattr(weight, "grad", torch.zeros(21)[1:].view(4, 5)),  # at an odd address
    ],
    ids=["no gradient", "sparse", "another layout", "an odd address"],
)
def test_what_the_kernel_cannot_take_is_left_to_torch(change: Callable[[nn.Parameter], object]) -> None:
    training = Training(adamw)
    training.step()
    assert training.prepare() is not None
    change(training.weights[1])
    assert training.prepare() is None


def test_what_lies_elsewhere_now_is_looked_for_again() -> None:
    training = Training(adamw)
    training.step()
    fused = FusedAdam(training.stepper.optimizer)
    first = fused.prepare(training.weights, training.masters())
    assert first is not None
    assert fused.prepare(training.weights, training.masters()) is first
    second = first
    state = training.stepper.optimizer.state[training.masters()[3]]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        state[key] = state[key].clone()
        assert fused.prepare(training.weights, training.masters()) not in (None, second)
        second = fused.prepare(training.weights, training.masters())
    fused.forget()
    assert fused.prepare(training.weights, training.masters()) not in (None, second)


def test_gradients_that_move_leave_the_large_tables_as_they_are(kernel: Any) -> None:
    """Autograd makes new gradients in each step. Their addresses alone are uploaded, and only where one of
    the table has moved."""
    training, still = Training(adamw), Training(adamw)
    uploads: list[int] = []
    upload = kernel._upload
    for each in (training, still):
        each.step()
        each.step()
    assert training.stepper._fused is not None
    (prepared,) = training.stepper._fused._prepared.values()
    tables = [part.table for part in prepared.parts]
    before = [(table.rows, table.parameters, table.tiles) for table in tables]
    weight = training.weights[2]
    assert weight.grad is not None
    kept = weight.grad  # its memory is not used again
    kept.fill_(torch.nan)
    weight.grad = torch.zeros(weight.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kernel, "_upload", lambda tensor, device: (uploads.append(len(tensor)), upload(tensor, device))[1]
        )
        for each in (training, still):
            each.step()
    assert training.stepper._fused._prepared == {training.masters()[0]: prepared}
    assert [(table.rows, table.parameters, table.tiles) for table in tables] == before
    assert uploads == [3], "of the second group alone"
    assert all(map(torch.equal, training.numbers(), still.numbers()))


def test_gradients_may_have_several_types() -> None:
    """Those to which nothing was added are of their weights' type, others float32. The update is the same."""
    mixed, wide = Training(adamw), Training(adamw)
    for training in (mixed, wide):
        for number in range(4):
            for place, weight in enumerate(training.weights):
                low = training is mixed and (place + number) % 2 == 0
                gradient = torch.randn(weight.shape, generator=training.generator).half()
                weight.grad, weight.grad_dtype = None, None  # type: ignore[attr-defined]
                weight.grad = gradient if low else gradient.float()
            training.stepper.step(torch.tensor(0.5, dtype=torch.float64), torch.tensor(False))
    assert mixed.prepare() is not None
    assert mixed.stepper._fused is not None
    assert mixed.stepper._fused._prepared, "it was fused"
    assert all(map(torch.equal, mixed.numbers(), wide.numbers()))
