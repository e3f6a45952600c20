"""What a second run must find as the first: randomness, modes, types, buffers, the view of the sequence."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.errors import UserError
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.stage import iterated_modules, no_iteration
from tests.memory.recompute.chains import assert_same, recompute, run_step, settings, train, vectors

Make = Callable[[], nn.Sequential]
EACH, ALL = [1, 1, 1], [3]


def compare(make: Make, step: Callable[[nn.Module, int], None] = run_step) -> None:
    """Weights and buffers are the same to the last bit, and every second run returns the same."""
    expected = train(make, [], step=step)
    for sizes in (EACH, ALL):
        check = SecondRunCheck()
        assert_same(train(make, sizes, step=step, shared=settings(check)), expected)
        assert check._flags, "nothing ran again"
        check.check_first_step()


class Noise(nn.Module):
    """Multiplies by random numbers, between two matrices."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.draw(x))


def by_python(x: Tensor) -> Tensor:
    return torch.full_like(x, random.random())


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.random.rand(*x.shape)) * torch.rand_like(x)


class OwnGenerator(Noise):
    def __init__(self) -> None:
        super().__init__(self.rand)
        self.generator = torch.Generator().manual_seed(3)

    def rand(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


@pytest.mark.slow_cases("by_python", "dropout")
@pytest.mark.parametrize("draw", [torch.rand_like, by_python, by_numpy, F.dropout])
def test_random_numbers_are_replayed(draw: Callable[[Tensor], Tensor]) -> None:
    def make() -> nn.Sequential:
        random.seed(0)
        numpy.random.seed(0)
        return nn.Sequential(Noise(draw), nn.Linear(6, 6), Noise(draw))

    compare(make)


def test_generators_of_modules_are_replayed() -> None:
    compare(lambda: nn.Sequential(OwnGenerator(), OwnGenerator(), nn.Linear(6, 6)))


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "left"])
def test_a_generator_that_is_first_drawn_from_in_a_later_step_is_replayed(kind: str) -> None:
    """Noise that is switched on after a warm-up."""

    class Later(OwnGenerator):
        def rand(self, x: Tensor) -> Tensor:
            if not self.is_on:
                return torch.ones_like(x)
            if kind == "left":  # of a pair of normal numbers, the first of which was drawn elsewhere
                return torch.full_like(x, numpy.random.randn())
            return {"torch": super().rand, "python": by_python, "numpy": by_numpy}[kind](x)

        is_on = False

    def make() -> nn.Sequential:
        Later.is_on = False
        random.seed(0)
        numpy.random.seed(0)
        return nn.Sequential(Later(), Later(), nn.Linear(6, 6))

    def step(model: nn.Module, number: int) -> None:
        Later.is_on = number > 0
        if Later.is_on:
            numpy.random.randn()
        run_step(model, number)

    compare(make, step)


def test_keyed_dropout_is_replayed() -> None:
    def make() -> nn.Sequential:
        layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.4)) for _ in range(3)]
        model = nn.Sequential(*layers)
        key_dropout(model, Wrapping())
        return model

    def step(model: nn.Module, number: int) -> None:
        losses = []
        for microbatch in range(2):  # both go forward, and then both back
            with scope(seed=1, step=number, first_sample=5 * microbatch):
                losses.append(model(vectors(2 * number + microbatch)).square().mean())
        for loss in losses:
            loss.backward()

    compare(make, step)


def test_autocast_is_that_of_the_first_run() -> None:
    def step(model: nn.Module, number: int) -> None:
        model.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(vectors(number).float()).float().square().mean()
        loss.backward()

    compare(lambda: nn.Sequential(*(Noise(torch.sigmoid) for _ in range(3))), step)


def test_modes_are_those_of_the_first_run() -> None:
    def step(model: nn.Module, number: int) -> None:
        model.train()
        loss = model(vectors(number)).square().mean()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())

    compare(lambda: nn.Sequential(*(_dropping() for _ in range(3))), step)


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))


def test_running_statistics_count_once() -> None:
    def make() -> nn.Sequential:
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers)

    def step(model: nn.Module, number: int) -> None:
        losses = [model(vectors(2 * number + half)).square().mean() for half in range(2)]
        for loss in losses:
            loss.backward()

    compare(make, step)


class OwnStatistics(nn.Module):
    """Hands its statistics to the kernel itself, which leaves no mark on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.linear(x), self.mean, self.var, training=self.training)
        return torch.tanh(x)


def test_statistics_that_change_without_a_mark_count_once() -> None:
    compare(lambda: nn.Sequential(*(OwnStatistics() for _ in range(3))))


@pytest.mark.parametrize("kind", [OwnStatistics, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))])
def test_statistics_that_are_first_counted_in_a_later_step_count_once(
    kind: Callable[[], nn.Module],
) -> None:
    def step(model: nn.Module, number: int) -> None:
        model.train(number > 0)
        run_step(model, number)

    compare(lambda: nn.Sequential(*(kind() for _ in range(3))), step)


class Counting(nn.Module):
    """Its output depends on buffers that it changes: in place, and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return torch.tanh(self.linear(x - self.mean) * self.count).exp() * self.table


def test_buffers_are_those_of_before_and_stay_those_of_after() -> None:
    def step(model: nn.Module, number: int) -> None:
        losses = [model(vectors(2 * number + half)).square().mean() for half in range(2)]
        for loss in losses:
            loss.backward()

    compare(lambda: nn.Sequential(*(Counting() for _ in range(3))), step)


def test_a_buffer_that_is_first_changed_later_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                self.seen += 1
            return x.sin().exp()

    layer = Late()
    recompute([layer], [1])
    layer(vectors(0))
    with pytest.raises(
        UserError, match="Late changes its buffer seen, which it has not changed in its first"
    ):
        layer(vectors(0))


@pytest.mark.parametrize(
    "normed", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"]
)
def test_spectral_norms_do_not_iterate_again(normed: Callable[[nn.Module], nn.Module]) -> None:
    """The first microbatch iterates and the second does not, however late they go back."""

    def make() -> nn.Sequential:
        layers = [nn.Sequential(normed(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
        return nn.Sequential(*layers)

    def step(model: nn.Module, number: int) -> None:
        first = model(vectors(number)).square().mean()
        with no_iteration(iterated_modules(model)):
            second = model(vectors(number + 10)).square().mean()
        first.backward()
        second.backward()

    compare(make, step)


def test_the_view_is_that_of_the_first_run() -> None:
    view = View()

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            positions = view.positions(x.shape[0], x.device)
            return torch.tanh(self.linear(x) + positions[:, None] * view.shared.get("scale", 0)).exp()

    def step(model: nn.Module, number: int) -> None:
        losses = []
        for length in (3, 4):
            view.true_length, view.shared = length, {"scale": length + number}
            losses.append(model(vectors(number)).square().mean())
        view.true_length, view.shared = None, {}
        for loss in losses:
            loss.backward()
        assert (view.true_length, view.shared) == (None, {})

    def make() -> nn.Sequential:
        return nn.Sequential(*(Positions() for _ in range(3)))

    expected = train(make, [], step=step)
    for sizes in (EACH, ALL):
        assert_same(train(make, sizes, step=step, shared=settings(view=view)), expected)
