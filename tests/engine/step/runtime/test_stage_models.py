"""Whatever stages are made of: the contract holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, stop, vectors
from tests.contract_models import token_loss
from tests.parallel.pipeline.models import VOCAB, WIDTH, Hidden, perceptron, tokens, vector_case

pytestmark = pytest.mark.usefixtures("warm_contract")


def without_parameters() -> nn.Module:
    return nn.Sequential(Hidden(), nn.Tanh(), nn.Linear(6, 5))


def frozen(which: int) -> nn.Module:
    model = perceptron(3)
    model[which].requires_grad_(False)
    return model


def frozen_middle() -> nn.Module:
    return frozen(1)


def frozen_last() -> nn.Module:
    return frozen(2)


@pytest.mark.slow_cases("frozen_last-data=2 sync=parameter-server", "frozen_middle-data=2 zero=2")
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (frozen_middle, "schedule=zero-bubble"),
        (frozen_middle, "data=2 zero=2"),
        (frozen_last, "data=2 sync=parameter-server"),
    ],
)
def test_a_stage_with_nothing_to_train(make: Any, plan: str) -> None:
    assert_equal(vector_case(make), f"pipeline=3 microbatches=2 {plan}")


def test_a_stage_with_nothing_to_train_and_versions() -> None:
    case = vector_case(without_parameters, clip=None)
    assert_equal(case, "pipeline=3 microbatches=2 schedule=pipedream")


def changing() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 5)))


@pytest.mark.parametrize("schedule", ["naive", "pipedream"])
def test_a_stage_may_change_its_input_in_place(schedule: str) -> None:
    assert_equal(vector_case(changing, clip=None), f"pipeline=2 microbatches=3 schedule={schedule}")


class Normalised(nn.Module):
    """Batch norm with fixed statistics, and a buffer that counts the steps; a mask that is no number."""

    count: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, True, False, True, True, True]))
        self.register_buffer("rate", torch.rand(6), persistent=False)

    def train(self, mode: bool = True) -> "Normalised":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.tanh(self.norm(self.linear(x)) * self.mask + self.rate)


def normalised() -> nn.Module:
    return nn.Sequential(Normalised(), Normalised(), nn.Linear(6, 5))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("replicas", ["data=1", "data=2 zero=1"])
def test_buffers_are_those_of_one_device(replicas: str) -> None:
    verdict = assert_equal(vector_case(normalised), f"pipeline=2 microbatches=1 {replicas}")
    assert {"0.count", "1.mask", "1.norm.running_var"} <= verdict.tensors.keys()


def many_steps(replicas: str) -> float:
    torch.manual_seed(0)
    plan = f"pipeline=2 microbatches=3 schedule=pipedream {replicas}"
    with echelon.parallelize(normalised(), plan, optimizer=adamw, loss=mean_loss) as engine:
        losses = [engine.step(engine.local(vectors(step))).loss for step in range(6)]
    return losses[-1]


def test_buffers_with_microbatches_in_versions() -> None:
    case = vector_case(normalised, clip=None)
    assert_equal(case, "pipeline=2 microbatches=3 schedule=pipedream")


def test_replicas_share_buffers_while_microbatches_have_saved_them() -> None:
    """In the first steps activations are measured, and autograd does not look at versions then."""
    losses = echelon.launch(many_steps, 4, "data=2")
    assert len(set(losses)) == 1


def shared() -> nn.Module:
    layer = Hidden()
    return nn.Sequential(layer, Hidden(), layer, layer, nn.Linear(6, 5))


@pytest.mark.slow_cases("pipeline=2-1", "pipeline=3")
@pytest.mark.parametrize("plan", ["pipeline=3", "pipeline=2 schedule=zero-bubble", "pipeline=2-1"])
def test_a_layer_in_several_stages_is_tied(plan: str) -> None:
    assert_equal(vector_case(shared), f"{plan} microbatches=3")


class Half(nn.Module):
    """Uses its weight for some batches only: the other stage that shares it may use it alone."""

    def __init__(self, weight: nn.Parameter, when: int) -> None:
        super().__init__()
        self.weight, self.when = weight, when
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, step = given
        x = torch.tanh(self.linear(x))
        return (F.linear(x, self.weight) if int(step[0]) & self.when else x), step


def sometimes_shared() -> nn.Module:
    weight = nn.Parameter(torch.eye(6))
    return nn.Sequential(Half(weight, 1), nn.Sequential(Half(weight, 2), _First()))


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        output: Tensor = self.linear(given[0])
        return output


def with_step(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    inputs, targets = vectors(step)
    return (inputs, torch.full((len(inputs),), step)), targets


@pytest.mark.slow_cases("data=2 zero=1")
@pytest.mark.parametrize("replicas", ["data=1", "data=2 zero=1"])
def test_a_tied_weight_that_only_one_stage_uses_or_none(replicas: str) -> None:
    case = vector_case(sometimes_shared, make_batch=with_step, steps=6)
    assert_equal(case, f"pipeline=2 microbatches=2 {replicas}")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 8), Recurrent(), Recurrent(), nn.Linear(8, VOCAB))


def test_recurrent_layers_with_versions() -> None:
    case = Case(recurrent, tokens, token_loss, adamw, steps=3, clip=None)
    assert_equal(case, "pipeline=2 microbatches=3 schedule=pipedream-vertical")


def test_recurrent_layers_with_a_backward_in_two() -> None:
    case = Case(recurrent, tokens, token_loss, adamw, steps=3)
    assert_equal(case, "pipeline=2 microbatches=3 schedule=zero-bubble")


class Wrap(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Wrapped(nn.Module):
    """Its layers are modules that it makes when asked, around the ones that have the names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCAB)

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *(Wrap(block) for block in self.blocks), Wrap(self.head)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x)
        return x


def test_layers_that_wrap() -> None:
    case = Case(Wrapped, tokens, token_loss, adamw, steps=3)
    assert "blocks.1.weight" in assert_equal(case, "pipeline=2 data=2 zero=3 microbatches=3").tensors


class Typed(nn.Module):
    """Computes and passes on in another type than its weights have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(6, 6), dtype

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.double())).to(self.dtype)


def of_many_types() -> nn.Module:
    return nn.Sequential(
        Typed(torch.float32), Typed(torch.float64), Typed(torch.float32), Typed(torch.float64)
    )


def eight_vectors(step: int) -> tuple[Tensor, Tensor]:
    return vectors(step, samples=8)


def test_types_may_change_between_stages() -> None:
    """Gradients have the type of their activation, as on one device: far more than 1e-9 hangs on it.

    Eight samples, because the gradients are rounded before they are divided by that.
    """
    assert_equal(vector_case(of_many_types, make_batch=eight_vectors), "pipeline=4 microbatches=2")


class Table(nn.Module):
    """An embedding with sparse gradients; `turned`, it is the head of the same model."""

    def __init__(self, weight: nn.Parameter, *, turned: bool = False) -> None:
        super().__init__()
        self.weight, self.turned = weight, turned

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.turned else F.embedding(x, self.weight, sparse=True)


def sparse(*, tied: bool) -> nn.Module:
    weight, other = nn.Parameter(torch.randn(VOCAB, 6)), nn.Parameter(torch.randn(VOCAB, 6))
    return nn.Sequential(Table(weight), Hidden(), Hidden(), Table(weight if tied else other, turned=True))


def step_with_sparse_gradients(plan: str, tied: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after two steps of the plan, and after two of plain torch (whose norm knows no sparse)."""
    torch.manual_seed(0)
    alone = sparse(tied=tied).double()
    torch.manual_seed(0)
    engine = echelon.parallelize(
        sparse(tied=tied), f"{plan} precision=fp64", optimizer=plain_sgd, loss=token_loss
    )
    optimizer = plain_sgd(alone.parameters())
    for step in range(2):
        inputs, targets = tokens(step)
        engine.step(engine.local((inputs, targets)))
        optimizer.zero_grad()
        total, count = token_loss(alone(inputs), targets)
        (total / count).backward()
        optimizer.step()
    return engine.full_state_dict(), alone.state_dict()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plan", "tied"), [("schedule=1f1b", False), ("schedule=zero-bubble", True), ("data=2", True)]
)
def test_sparse_gradients(warm_ranks: Callable[[int], Ranks], plan: str, tied: bool) -> None:
    """Regression: the norm, and the sum of tied gradients, took them for dense."""
    plan = f"pipeline=2 microbatches=2 {plan}"
    ranks = warm_ranks(echelon.Plan.parse(plan).ranks)
    for weights, expected in ranks.run(step_with_sparse_gradients, plan, tied):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


class Stopping(Hidden):
    """Lets no gradient through to the layers before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(stop(x))


def stopped() -> nn.Sequential:
    return nn.Sequential(Hidden(), Hidden(), Stopping(), nn.Linear(WIDTH, 5))


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    " data=2 zero=1-gpipe",
    " data=2 zero=1-pipedream-2bw",
    " data=2 zero=1-pipedream",
    " data=2 zero=1-zero-bubble",
    "-1f1b",
    "-gpipe",
    "-pipedream-2bw",
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("replicas", ["", " data=2 zero=1"])
def test_layers_that_no_gradient_comes_to_are_left_alone(schedule: str, replicas: str) -> None:
    """As on one device: not even their weights decay."""
    clip = None if "pipedream" in schedule else 1.0
    case = vector_case(stopped, clip=clip)
    assert_equal(case, f"pipeline=2 schedule={schedule} microbatches=2{replicas}")
