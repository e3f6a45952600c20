"""Updates of bf16 weights without masters: the optimizer's own, rounded stochastically."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.hashing import hash_of
from echelon.state.ownership import LocalParameter, OwnedSlice, whole_slice
from echelon.update.precision import KeyedRounding, Placement, RoundingStepper, rounding_stepper
from echelon.update.precision.element_runs import runs_of
from echelon.update.precision.optimizer_call import HostCall
from echelon.update.precision.rounding import round_stochastically
from tests.peak_memory import PeakMemory

Warm = Callable[[int], Ranks]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

CPU = torch.device("cpu")
SIZES = (3, 5, 2)


def placement(name: str, tensor: Tensor) -> Placement:
    whole = OwnedSlice(whole_slice(name, tensor), torch.empty(tensor.shape, device="meta"))
    return Placement.of(name, runs_of([whole], CPU))


def make_stepper(make: Make, values: list[Tensor], **options: Any) -> RoundingStepper:
    weights = [nn.Parameter(value.bfloat16()) for value in values]
    for weight in weights:
        weight.grad_dtype = torch.float32
    local = [LocalParameter(str(index), weight, weight) for index, weight in enumerate(weights)]
    placements = {each.tensor: placement(each.name, each.tensor) for each in local}
    return RoundingStepper(make, weights, local, placements, KeyedRounding(7), **options)


def run(
    stepper: RoundingStepper, gradients: list[Tensor | None], number: int = 0, **options: Any
) -> list[Tensor]:
    for each, gradient in zip(stepper._local, gradients, strict=True):
        each.tensor.grad = None if gradient is None else gradient.clone()
    stepper.start_update(number)
    stepper.step(1.0, **options)
    return [each.tensor.detach().clone() for each in stepper._local]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("portion", [1, 2**26])
def test_an_update_is_that_of_float32_rounded(
    deferred: bool, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out: float32 copies of the weights, the optimizer, and noise for each element."""
    monkeypatch.setattr(rounding_stepper, "_PORTION", portion)
    make = partial(torch.optim.AdamW, lr=0.1)
    values = [torch.randn(size) for size in SIZES]
    stepper = make_stepper(make, values, deferred=deferred)
    copies = [nn.Parameter(value.bfloat16().float()) for value in values]
    optimizer = make(copies)
    for step in range(4):
        gradients = [torch.randn(size) if (index + step) % 3 else None for index, size in enumerate(SIZES)]
        weights = run(stepper, gradients, step)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        optimizer.step()
        for index, (copy, weight) in enumerate(zip(copies, weights, strict=True)):
            expected = torch.empty_like(weight)
            key = hash_of(7, step + 1, hash_of(*str(index).encode()))
            round_stochastically(expected, copy.detach(), key, placement("", copy).runs)
            assert torch.equal(weight, expected)
            copy.data = weight.float()
    state = stepper.state(stepper._local[0])
    assert state["exp_avg"].dtype == torch.float32
    assert "master" not in state


@pytest.mark.parametrize("skip", [True, torch.tensor(True)])
def test_a_skipped_update_changes_nothing(skip: Any) -> None:
    stepper = make_stepper(partial(torch.optim.SGD, lr=0.1), [torch.randn(100)], deferred=True)
    before = stepper._local[0].tensor.detach().clone()
    assert torch.equal(run(stepper, [torch.randn(100)], skip=skip)[0], before)


def test_updates_that_are_too_small_for_bf16_add_up() -> None:
    """Rounded to the nearest, a weight of 1 stays where it is if it changes by less than 2⁻⁹."""
    num_steps, rate = 500, 2.0**-11
    make = partial(torch.optim.SGD, lr=rate)
    stepper = make_stepper(make, [torch.ones(256)])
    nearest = torch.ones(256, dtype=torch.bfloat16)
    for step in range(num_steps):
        (weight,) = run(stepper, [torch.ones(256)], step)
        nearest = (nearest.float() - rate).bfloat16()
    assert torch.equal(nearest, torch.ones(256, dtype=torch.bfloat16))
    expected = 1 - num_steps * rate
    assert weight.float().mean() == pytest.approx(expected, abs=0.01)
    assert 0 < weight.float().std() < 0.05


def test_only_a_portion_has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    size, number = 2**18, 8
    monkeypatch.setattr(rounding_stepper, "_PORTION", size * 4)
    stepper = make_stepper(partial(torch.optim.SGD, lr=0.1), [torch.randn(size) for _ in range(number)])
    gradients: list[Tensor | None] = [torch.ones(size) for _ in range(number)]
    run(stepper, gradients)
    for each, gradient in zip(stepper._local, gradients, strict=True):
        each.tensor.grad = gradient
    with PeakMemory() as memory:
        stepper.step(1.0)
    assert memory.peak < 4 * size * 4, "a copy of 8, and tiles of noise"


def test_portions_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (2, 2, 1, 9, 1, 3)]

    def sizes(limit: int) -> list[list[int]]:
        monkeypatch.setattr(rounding_stepper, "_PORTION", limit)
        return [[each.numel() for each in portion] for portion in rounding_stepper._portions(weights)]

    assert rounding_stepper._PORTION == 2**26
    assert sizes(4 * 4) == [[2, 2], [1], [9], [1, 3]], "exactly the limit fits"
    assert sizes(4 * 4 - 1) == [[2], [2, 1], [9], [1], [3]]
    assert sizes(1000) == [[2, 2, 1, 9, 1, 3]]
    assert list(rounding_stepper._portions([])) == []


def test_of_a_unit_no_other_weight_is_updated_and_copies_take_no_memory_between() -> None:
    stepper = make_stepper(partial(torch.optim.SGD, lr=1.0), [torch.ones(2), torch.ones(3)])
    first, second = stepper._local
    for each in (first, second):
        each.tensor.grad = torch.ones(each.tensor.shape)
    stepper.start_update(0)
    stepper.step(1.0, unit=[second])
    assert (first.tensor.tolist(), second.tensor.tolist()) == ([1.0] * 2, [0.0] * 3)
    assert type(stepper._call) is HostCall
    copies = [stepper.updated(each) for each in stepper._local]
    assert [copy.grad for copy in copies] == [None, None]
    assert [copy.untyped_storage().nbytes() for copy in copies] == [4, 4]


def test_an_optimizer_that_somebody_watches_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_stepper, "_PORTION", 1)
    stepper = make_stepper(partial(torch.optim.SGD, lr=1.0), [torch.ones(2), torch.ones(3)])
    calls: list[int] = []
    stepper.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert [weight.tolist() for weight in run(stepper, [torch.ones(2), torch.ones(3)])] == [
        [0.0] * 2,
        [0.0] * 3,
    ]
    assert calls == [1]


class Layers(nn.Sequential):
    """Gradients of sums over few small integers are exact, in whichever order they are added."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel()) * 5 % 7 - 3 + number
            parameter.data.copy_(values.view_as(parameter) / 4)


def batch() -> tuple[Tensor, Tensor]:
    return (torch.arange(8 * 4).view(8, 4) * 3 % 5 - 2).float(), torch.zeros(8, 3)


def mean_of_sums(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum(-1).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(plan: str) -> dict[str, Tensor]:
    engine = echelon.parallelize(
        Layers(), f"precision=bf16 masters=false {plan}", optimizer=sgd, loss=mean_of_sums, smallest_unit=0
    )
    engine.step(engine.local(batch()))  # later gradients are of weights that are no such integers
    weights = engine.full_state_dict()
    engine.close()
    return weights


def test_the_plan_does_not_decide_how_weights_are_rounded(warm_ranks: Warm) -> None:
    """Where gradients are the same to the last bit, weights are."""
    expected = train("")
    assert any(not torch.equal(value, Layers().state_dict()[name]) for name, value in expected.items())
    plans = [f"data=2 zero={zero}" for zero in range(4)]
    plans += ["data=2 zero=1 update=backward", "pipeline=2 microbatches=2 update=last-backward"]
    for plan in plans:
        for weights in warm_ranks(2).run(train, plan):
            for name, value in expected.items():
                assert torch.equal(weights[name], value), (plan, name)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sample whose target is -100 does not count."""
    counts = target[:, 0] != -100
    return ((output - target).sum(-1) * counts).sum(), counts.sum()


def test_a_step_that_was_refused_changes_no_noise_of_later_ones() -> None:
    """In a rehearsal nobody drew, and without one a refused step did: the plan decided."""
    results = []
    for update in ("step", "backward"):
        plan = f"precision=bf16 masters=false update={update}"
        with echelon.parallelize(Layers(), plan, optimizer=sgd, loss=counted) as engine:
            with pytest.raises(UserError, match="no replica had a sample"):
                engine.step((batch()[0], torch.full((8, 3), -100.0)))
            engine.step(batch())
            results.append(engine.full_state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
