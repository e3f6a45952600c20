"""Models that once broke ZeRO, each with its story: equal to one device, or refused with the reason."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.cases import adamw, stop
from tests.contract_models import class_loss, vectors

pytestmark = pytest.mark.usefixtures("warm_contract")

LEVELS = pytest.mark.parametrize("level", [1, 2, 3])


def case_of(model: type[nn.Module], **changes: object) -> Case:
    given: dict[str, object] = {
        "make_batch": vectors,
        "loss": class_loss,
        "make_optimizer": adamw,
        "steps": 4,
        "options": {"smallest_unit": 0},
    }
    return Case(model, **(given | changes))  # type: ignore[arg-type]


class TiedWithoutBias(nn.Module):
    """The last layer owns no parameter at all: its unit was left out, and its weight never gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


class Stray(nn.Module):
    """The model reads a weight of a unit before the unit itself runs: that gradient was overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ParameterDict({"w": torch.ones(6)})
        self.inner = Inner()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * self.part["w"])  # type: ignore[no-any-return]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(torch.ones(6)), nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.v


class ReadsAfterwards(nn.Module):
    """Uses a weight of a unit that is not running: it was not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * self.inner.w)  # type: ignore[no-any-return]


@dataclass
class Output:
    hidden: Tensor


class InObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Output:
        return Output(torch.tanh(self.layer(x)))


class ObjectsBetween(nn.Module):
    """A unit returns an object that torch does not look into: its backward pass read freed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = InObject(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).hidden)  # type: ignore[no-any-return]


class ChangesItsInput(nn.Module):
    """A unit changes its input in place: the watch on inputs was a view, which torch forbids to change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return Block.run(self.block, self.first(x))


class Block:
    """Calls a sequence as the one module that it is."""

    @staticmethod
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


class MixedTypes(nn.Module):
    """Frozen integers beside frozen real numbers in a unit: the latter were rounded to integers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FrozenTypes()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))  # type: ignore[no-any-return]


class FrozenTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.1, 0.9, 6), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(6))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale + self.codes


class ReturnsItsWeight(nn.Module):
    """A unit returns a view of its weight, which was freed when the unit was left."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Positions(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner())  # type: ignore[no-any-return]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 6))

    def forward(self) -> Tensor:
        return self.table[0]


@pytest.mark.quick_cases(2)
@pytest.mark.slow_cases(
    "ChangesItsInput-2",
    "ObjectsBetween-2",
    "ReadsAfterwards-2",
    "ReturnsItsWeight-2",
    "Stray-2",
    "TiedWithoutBias-2",
)
@LEVELS
@pytest.mark.parametrize(
    "model",
    [
        TiedWithoutBias,
        Stray,
        ReadsAfterwards,
        ObjectsBetween,
        ChangesItsInput,
        MixedTypes,
        ReturnsItsWeight,
    ],
)
def test_these_are_equal_to_one_device(model: type[nn.Module], level: int) -> None:
    assert_equal(case_of(model), f"data=2 zero={level} microbatches=2")


class ByRank(nn.Module):
    """Each rank runs another layer of the same size: they gathered halves of each other's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        from torch import distributed as dist

        first = dist.is_initialized() and dist.get_rank() == 0
        return (self.left if first else self.right)(x)  # type: ignore[no-any-return]


class ByData(nn.Module):
    """The data choose which experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("positive", "negative")})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        is_positive = x[:, :1] > 0
        for name, chosen in (("positive", is_positive), ("negative", ~is_positive)):
            if chosen.any():
                hidden = hidden + chosen * self.experts[name](hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


def alike(step: int) -> tuple[Tensor, Tensor]:
    """Every rank has samples for both experts."""
    inputs, targets = vectors(step)
    inputs[:, 0] = torch.tensor([1.0, -1.0]).repeat(len(inputs))[: len(inputs)]
    return inputs, targets


def apart(step: int) -> tuple[Tensor, Tensor]:
    """The samples of the first rank are for one expert, those of the second for the other."""
    inputs, targets = alike(step)
    order = inputs[:, 0].argsort()
    return inputs[order], targets[order]


def refusal(model: type[nn.Module], *make_batches: Callable[[int], tuple[Tensor, Tensor]]) -> str:
    """What is said when a step is refused."""
    engine = echelon.parallelize(
        model(), "data=2 zero=3", optimizer=adamw, loss=class_loss, smallest_unit=0, prefetch=0
    )
    try:
        for step, make_batch in enumerate(make_batches):
            engine.step(engine.local(make_batch(step)))
    except echelon.UserError as error:
        return f"step {step}: {error}"
    return ""


@pytest.mark.parametrize(
    ("model", "batches", "start", "details"),
    [
        (ByRank, [vectors], "step 0", "finished a pass, and rank 1 gathers the weights of module 'right'"),
        (ByData, [apart], "step 0", "module 'experts.negative', and rank 1 gathers the weights of module"),
        (ByData, [alike, apart], "step 1", ""),
    ],
)
def test_ranks_that_run_different_modules_are_refused_at_level_3(
    model: type[nn.Module],
    batches: list[Callable[[int], tuple[Tensor, Tensor]]],
    start: str,
    details: str,
) -> None:
    """Ranks got each other's weights, or said how many bytes did not match."""
    for error in echelon.launch(refusal, 2, model, *batches, deadline=60.0):
        assert error.startswith(f"{start}: ranks ran different modules in this step")
        assert details in error


def test_modules_that_only_some_ranks_run_stay_with_the_model() -> None:
    case = case_of(ByData, make_batch=apart, options={"smallest_unit": 2**20})
    assert_equal(case, "data=2 zero=3")


class Penalised(nn.Module):
    """Takes a gradient of its own gradient, through its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        output = self.last(torch.tanh(self.first(x)))
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return output + slope.mean()  # type: ignore[no-any-return]


def step_with_penalty(level: int) -> float:
    engine = echelon.parallelize(
        Penalised(), f"data=2 zero={level}", optimizer=adamw, loss=class_loss, smallest_unit=0
    )
    return engine.step(engine.local(vectors(0))).loss


def test_a_gradient_of_a_gradient_works_at_level_1_and_is_refused_at_level_3(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    first, second = warm_ranks(2).run(step_with_penalty, 1)
    assert first == second
    with pytest.raises(echelon.UserError, match="use zero=2"):
        echelon.launch(step_with_penalty, 2, 3, deadline=60.0)


class NoneForZeros(nn.Module):
    """One replica's gradients are none where the other has some: reductions came in another order there."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Linear(6, 6) for _ in range(7)))
        self.behind = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(stop(self.before(x), only_zeros=True))  # type: ignore[no-any-return]


def first_half_counts(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    targets = targets[:12]
    targets[6:] = -100
    return inputs[:12], targets


def counted_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("3")
@LEVELS
def test_a_replica_may_have_no_gradient_of_what_the_other_has(level: int) -> None:
    case = case_of(NoneForZeros, make_batch=first_half_counts, loss=counted_loss)
    assert_equal(case, f"data=2 zero={level} microbatches=2")
