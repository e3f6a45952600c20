"""Weights that are read outside of the module that owns them: at zero=3 all of these trained not-a-number."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import echelon
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import class_loss, vectors

pytestmark = pytest.mark.usefixtures("warm_contract")


def case_of(model: type[nn.Module], **changes: object) -> Case:
    given: dict[str, object] = {
        "make_batch": vectors,
        "loss": class_loss,
        "make_optimizer": adamw,
        "steps": 3,
        "options": {"smallest_unit": 0},
    }
    return Case(model, **(given | changes))  # type: ignore[arg-type]


class Encoder(nn.Module):
    """Is called by another name than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def encode(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class ReadsEverywhere(nn.Module):
    """Of a frozen backbone, of children that are not called, by a hook, and of a child that is called too."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.backbone = Encoder().requires_grad_(False)
        self.scale = nn.ParameterList([torch.ones(6)])
        self.tied = nn.ParameterList([self.before.weight])
        self.never_called = nn.Linear(6, 6)
        self.last = nn.Linear(6, 5)
        self.before.register_forward_hook(self._add_to_output)

    def _add_to_output(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        return output + self.last.bias.sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone.encode(self.before(x)) * self.scale[0]
        x = F.linear(torch.tanh(x), self.never_called.weight, self.never_called.bias)
        return self.last(F.linear(x, self.tied[0]))  # type: ignore[no-any-return]


def test_weights_are_gathered_for_whoever_reads_them() -> None:
    assert_equal(case_of(ReadsEverywhere), "data=2 zero=3 microbatches=2")


class Parametrized(nn.Module):
    """Weights that are computed from others, by a property and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(6, 6))
        self.second = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.tanh(self.first(x)), self.second.weight)
        return self.last(x) + self.first.weight.mean()  # type: ignore[no-any-return]


def test_parametrized_weights_are_computed_from_whole_ones() -> None:
    assert_equal(case_of(Parametrized), "data=2 zero=3")


class TiedSmall(nn.Module):
    """A head below the smallest unit, tied to an embedding inside of a unit; and a module that is used
    inside and outside of it (small Gemma, Falcon, Bloom, Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.norm = self.trunk.norm
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.trunk.first.weight
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.norm(self.trunk(x))))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.wide = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def test_small_modules_share_weights_with_a_unit() -> None:
    case = case_of(TiedSmall, options={"smallest_unit": 400})
    assert_equal(case, "data=2 zero=3 microbatches=2")


def train_with_penalty(plan: str | None) -> list[float]:
    """Losses with a penalty on a weight that the loss reads; None: as a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)).double()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) + model[0].weight.square().sum()

    batches = [(inputs.double(), targets) for inputs, targets in map(vectors, range(3))]
    if plan is None:
        optimizer, losses = adamw(model.parameters()), []
        for inputs, targets in batches:
            value = loss(model(inputs), targets)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses
    engine = echelon.parallelize(model, f"{plan} precision=fp64", optimizer=adamw, loss=loss)
    losses = [float(engine.step(engine.local(batch)).loss) for batch in batches]
    with pytest.raises(echelon.UserError, match=r"state_dict\(\): .* a part of the model.*full_state_dict"):
        engine.module.state_dict()
    engine.close()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    return losses


def test_a_loss_may_read_a_weight_and_between_steps_a_state_dict_is_refused(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    expected = train_with_penalty(None)
    for losses in warm_ranks(2).run(train_with_penalty, "data=2 zero=3"):
        assert losses == pytest.approx(expected, rel=1e-12)
