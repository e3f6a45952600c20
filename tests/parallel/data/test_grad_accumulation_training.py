"""Trainings with matrices that are large enough to add to their gradients in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.launching import Ranks
from echelon.parallel.data.grad_accumulation import Accumulation
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, stop

WIDTH = 512  # a square of it is just large enough


class Wide(nn.Sequential):
    """Layers before and behind a large one, whose weight is used twice."""

    def __init__(self) -> None:
        square = nn.Linear(WIDTH, WIDTH)
        layers = [nn.Linear(6, WIDTH), nn.Tanh(), square, nn.Tanh(), square, nn.Linear(WIDTH, 5)]
        super().__init__(*layers)


class Cut(nn.Sequential):
    """Large layers on all sides of a cut."""

    def __init__(self) -> None:
        large = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        super().__init__(nn.Linear(6, WIDTH), *large, nn.Linear(WIDTH, 5))


class Stopping(nn.Sequential):
    """Large layers that no gradient comes to: as on one device, they are not even decayed."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        first = self[0](x)
        return self[2](first + stop(self[1](first.detach())))


class Branches(nn.Module):
    """Samples go one of two ways: the last microbatch may leave out what an earlier one used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        to_left, x = x[:, 0] > 0, torch.tanh(self.first(x))
        output = torch.zeros_like(x)
        for way, chosen in ((self.left, to_left), (self.right, ~to_left)):
            if chosen.any():
                output[chosen] = way(x[chosen])
        return self.last(torch.tanh(output))


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)


def one_by_one(step: int) -> tuple[Tensor, Tensor]:
    """Of each replica's four samples the last goes left, and the others right."""
    inputs, targets = vectors(step)
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[3::4, 0] = 1
    return inputs, targets


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "Cut-pipeline=2 schedule=1f1b microbatches=4",
    "Cut-pipeline=2 schedule=interleaved chunks=2 microbatches=4 data=2 zero=1",
    "Cut-pipeline=2 schedule=zero-bubble microbatches=4",
    "Wide-data=2 microbatches=4 sync=async staleness=0",
    "Wide-data=2 microbatches=4 sync=parameter-server",
    "Wide-data=2 microbatches=4 zero=1",
    "Wide-data=2 microbatches=4 zero=2",
    "Wide-data=2 microbatches=4",
    "Wide-microbatches=4",
)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Wide, "microbatches=4"),
        (Wide, "data=2 microbatches=4"),
        (Wide, "data=2 microbatches=4 zero=1"),
        (Wide, "data=2 microbatches=4 zero=2"),
        (Wide, "data=2 microbatches=4 sync=parameter-server"),
        (Wide, "data=2 microbatches=4 sync=async staleness=0"),
        (Stopping, "microbatches=4"),
        (Stopping, "data=2 microbatches=4"),
        (Stopping, "data=2 microbatches=4 zero=1"),
        (Cut, "pipeline=2 schedule=1f1b microbatches=4"),
        (Cut, "pipeline=2 schedule=interleaved chunks=2 microbatches=4 data=2 zero=1"),
        (Cut, "pipeline=2 schedule=zero-bubble microbatches=4"),
    ],
)
@pytest.mark.usefixtures("warm_contract")
def test_trainings_are_equal_to_one_device(model: type[nn.Module], plan: str) -> None:
    assert_equal(Case(model, vectors, mean_loss, adamw, steps=3), plan)


@pytest.mark.slow_cases("sync=async staleness=0", "sync=parameter-server", "zero=0")
@pytest.mark.parametrize("sync", ["zero=0", "zero=1", "sync=parameter-server", "sync=async staleness=0"])
@pytest.mark.usefixtures("warm_contract")
def test_what_the_last_microbatch_leaves_out_keeps_its_gradient(sync: str) -> None:
    assert_equal(Case(Branches, one_by_one, mean_loss, adamw, steps=3), f"data=2 microbatches=4 {sync}")


def count_sums(plan: str, model: type[nn.Module]) -> tuple[int, int]:
    """Runs in every rank: of the second step's gradients of large matrices, how many were added in place."""
    answers: list[bool] = []
    ask = Accumulation.may_add

    def listen(accumulation: Accumulation, weight: Tensor) -> bool:
        answers.append(ask(accumulation, weight))
        return answers[-1]

    engine = parallelize(model(), plan, optimizer=adamw, loss=mean_loss, audit="off")
    engine.step(engine.local(vectors(0)))
    Accumulation.may_add = listen  # type: ignore[method-assign]
    try:
        engine.step(engine.local(vectors(1)))
    finally:
        Accumulation.may_add = ask  # type: ignore[method-assign]
    return sum(answers), len(answers)


@pytest.mark.parametrize(
    ("plan", "ranks", "asked"),
    [
        ("microbatches=4", 1, (6, 8)),  # a matrix that is used twice, and nothing to add to at first
        ("data=2 microbatches=4", 2, (4, 8)),  # and the last is waited for
        ("data=2 microbatches=4 zero=1", 2, (4, 8)),
        ("data=2 microbatches=4 sync=parameter-server", 2, (4, 8)),
        ("data=2 microbatches=4 sync=async staleness=0", 2, (6, 8)),
        ("data=2 microbatches=4 zero=2", 2, (0, 0)),
        ("data=2", 2, (0, 0)),
    ],
)
def test_sums_are_made_in_place_where_no_one_waits(
    plan: str, ranks: int, asked: tuple[int, int], warm_ranks: Callable[[int], Ranks]
) -> None:
    assert warm_ranks(ranks).run(count_sums, plan, Wide) == [asked] * ranks


def train_twice() -> tuple[int, int]:
    """Two engines of one model, one after the other."""
    model = Wide()
    first = parallelize(model, "microbatches=4", optimizer=adamw, loss=mean_loss)
    first.step(vectors(0))
    return count_sums("microbatches=4", lambda: model)  # type: ignore[arg-type]


def test_a_second_engine_adds_too(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(1).run(train_twice) == [(6, 8)]
