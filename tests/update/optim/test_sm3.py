"""SM3-II against the paper's algorithm, element by element."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.update.optim import SM3
from tests.update.optim.parts import (
    InParts,
    random_gradients,
    random_parameters,
    set_gradients,
    state_bytes,
    worst,
)

SHAPES = [(4, 6), (7,), (), (2, 3, 4), (1, 5)]


class Paper:
    """Algorithm SM3-II with momentum, whose cover has one set for each index of each dim."""

    def __init__(self, shape: tuple[int, ...], lr: float, momentum: float, eps: float, decay: float) -> None:
        self.indices = list(product(*map(range, shape)))
        self.lr, self.beta, self.eps, self.decay = lr, momentum, eps, decay
        self.accumulators: dict[tuple[int, int], float] = {}
        self.smoothed = dict.fromkeys(self.indices, 0.0)

    def step(self, weights: Tensor, gradients: Tensor) -> None:
        largest: dict[tuple[int, int], float] = {}
        for index in self.indices:
            covers = list(enumerate(index)) or [(0, 0)]
            gradient = float(gradients[index])
            moment = min(self.accumulators.get(cover, 0.0) for cover in covers) + gradient**2
            for cover in covers:
                largest[cover] = max(largest.get(cover, 0.0), moment)
            update = gradient / (moment + self.eps) ** 0.5
            self.smoothed[index] = self.beta * self.smoothed[index] + (1 - self.beta) * update
            weights[index] -= self.lr * (self.decay * float(weights[index]) + self.smoothed[index])
        self.accumulators = largest


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_paper_s(momentum: float) -> None:
    ours = random_parameters(SHAPES)
    weights = [p.detach().clone() for p in ours]
    optimizer = SM3(ours, lr=0.1, momentum=momentum, eps=1e-4, weight_decay=0.2)
    papers = [Paper(tuple(p.shape), 0.1, momentum, 1e-4, 0.2) for p in ours]
    for step in range(20):
        gradients = random_gradients(ours, step)
        set_gradients(ours, gradients)
        optimizer.step()
        for paper, weight, gradient in zip(papers, weights, gradients, strict=True):
            if gradient is not None:
                paper.step(weight, gradient)
    assert worst(ours, weights) < 1e-12
    for paper, parameter in zip(papers, ours, strict=True):
        for (dim, index), value in paper.accumulators.items():
            accumulator = optimizer.state[parameter][f"accumulator_{dim}"]
            assert float(accumulator.flatten()[index]) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("cuts", [(), (8,), (1, 9, 11, 13), tuple(range(40))])
def test_parts_are_updated_as_the_whole(cuts: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    whole = random_parameters(SHAPES)
    in_parts = InParts(SM3, whole, cuts, **options)
    optimizer = SM3(whole, **options)
    for step in range(8):
        gradients = random_gradients(whole, step)
        set_gradients(whole, gradients)
        optimizer.step()
        in_parts.step(gradients)
    assert worst(in_parts.values(), whole) < 1e-12


def test_its_state_is_small_and_momentum_may_be_bf16() -> None:
    matrix = nn.Parameter(torch.randn(1024, 1024))
    matrix.grad = torch.randn(1024, 1024)
    ours, adamw = SM3([matrix]), torch.optim.AdamW([matrix])
    smoothed = SM3([matrix], momentum=0.9, momentum_dtype=torch.bfloat16)
    for optimizer in (ours, adamw, smoothed):
        optimizer.step()
    assert state_bytes(ours) <= 0.01 * state_bytes(adamw)
    assert state_bytes(smoothed) <= 0.26 * state_bytes(adamw)


@pytest.mark.parametrize("refused", [0, 2])
def test_scale_and_skip_come_on_the_device(refused: int) -> None:
    ours, plain = random_parameters(SHAPES, torch.float32), random_parameters(SHAPES, torch.float32)
    optimizer, reference = (
        SM3(ours, momentum=0.5, weight_decay=0.1),
        SM3(plain, momentum=0.5, weight_decay=0.1),
    )
    for step in range(6):
        gradients = random_gradients(plain, step)
        set_gradients(ours, [None if g is None else 4 * g for g in gradients])
        optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(float(step == refused))  # type: ignore[attr-defined]
        if step == refused:
            before = (
                copy.deepcopy([p.detach() for p in ours]),
                {p: copy.deepcopy(state) for p, state in optimizer.state.items()},
            )
            set_gradients(ours, [torch.full_like(p, float("nan")) for p in ours])
        optimizer.step()
        if step == refused:
            assert all(map(torch.equal, ours, before[0]))
            for parameter, state in optimizer.state.items():
                known = {key: torch.zeros_like(value) for key, value in state.items()}
                known |= before[1].get(parameter, {})
                assert all(torch.equal(state[key], value) for key, value in known.items())
        else:
            set_gradients(plain, gradients)
            reference.step()
    assert worst(ours, plain) < 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_first_update_that_is_refused_changes_nothing_also_without_eps(momentum: float) -> None:
    """1e-60 is 0 in float32."""
    parameters = random_parameters(SHAPES, torch.float32)
    before = copy.deepcopy([p.detach() for p in parameters])
    optimizer = SM3(parameters, momentum=momentum, eps=1e-60)
    set_gradients(parameters, [torch.full_like(p, float("inf")) for p in parameters])
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    assert not any(bool(value.any()) for state in optimizer.state.values() for value in state.values())


def test_all_errors_of_its_options_are_told_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        SM3([nn.Parameter(torch.ones(1))], lr=-1.0, momentum=1.0, eps=0.0, weight_decay=-1.0)
    assert len(refusal.value.errors) == 4


def test_the_least_options() -> None:
    parameters = random_parameters([(2, 2)])
    assert SM3(parameters, lr=0.0, momentum=0.0, weight_decay=0.0).defaults["lr"] == 0.0
    plain = SM3(parameters).defaults
    names = ("lr", "momentum", "eps", "weight_decay", "momentum_dtype")
    assert [plain[name] for name in names] == [0.1, 0.0, 1e-16, 0.0, None]
    wrong = ({"lr": -0.1}, {"momentum": -0.1}, {"momentum": 1.0}, {"eps": 0.0}, {"weight_decay": -0.1})
    for options in wrong:
        with pytest.raises(UserError) as refusal:
            SM3(parameters, **options)
        assert len(refusal.value.errors) == 1


def test_two_updates_by_hand() -> None:
    """Of [[1, 2]]: rows 4, columns 1 and 4. Then of ones: ν is 2 and 5, the least of both plus 1."""
    tensor = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
    optimizer = SM3([tensor], lr=1.0, weight_decay=0.5)
    tensor.grad = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    optimizer.step()
    assert tensor.tolist() == [[-1.0, -1.0]]
    state = optimizer.state[tensor]
    assert (state["accumulator_0"].tolist(), state["accumulator_1"].tolist()) == ([[4.0]], [[1.0, 4.0]])
    tensor.grad = torch.ones(1, 2, dtype=torch.float64)
    optimizer.step()
    assert tensor[0].tolist() == pytest.approx([-0.5 - 2**-0.5, -0.5 - 5**-0.5], rel=1e-12)
    assert (state["accumulator_0"].tolist(), state["accumulator_1"].tolist()) == ([[5.0]], [[2.0, 5.0]])


def test_momentum_by_hand() -> None:
    tensor = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = SM3([tensor], lr=1.0, momentum=0.75)
    seen = []
    for gradient in (1.0, 0.0):
        tensor.grad = torch.full_like(tensor, gradient)
        optimizer.step()
        seen.append(tensor.item())
    assert seen == pytest.approx([-0.25, -0.25 - 0.1875], rel=1e-12)
