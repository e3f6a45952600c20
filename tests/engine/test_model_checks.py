"""Models that a plan cannot train as one device would are refused before the first update, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import echelon
from echelon import Plan, UserError
from echelon.engine.model_checks import check_content
from echelon.verify import Case, assert_equal
from tests.cases import sgd
from tests.nn.huggingface.models import make as make_transformers

pytestmark = pytest.mark.usefixtures("warm_contract")

Make = Callable[[], nn.Module]


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (4, 3), generator=generator), torch.randint(7, (4,), generator=generator)


def vectors(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return F.one_hot(inputs, 7).sum(1).float(), targets


def with_max_norm() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(7, 6, max_norm=0.5), nn.Linear(6, 7))


def tied_with_max_norm() -> nn.Module:
    model = nn.Sequential(nn.EmbeddingBag(7, 6, max_norm=0.5), nn.Linear(6, 7))
    model[1].weight = model[0].weight
    return model


def with_sparse_buffer(*, persistent: bool = False) -> nn.Module:
    model = nn.Linear(6, 7)
    model.register_buffer("table", torch.eye(3).to_sparse(), persistent=persistent)
    return model


def by_frequency() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 7))


def spectral() -> nn.Module:
    first = parametrizations.spectral_norm(nn.Linear(7, 6))
    return nn.Sequential(first, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(6, 7)))


class ChangesItsWeight(nn.Linear):
    """Keeps its rows short, as some models do, in either of the two ways that torch allows."""

    def __init__(self, through_data: bool = False) -> None:
        super().__init__(7, 7)
        self.through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.weight.data if self.through_data else self.weight
            weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def changing() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), ChangesItsWeight())


def changing_through_data() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 7), ChangesItsWeight(through_data=True))


def case(make: Make, batch: Any = tokens) -> Case:
    return Case(make, batch, F.cross_entropy, sgd, steps=4, clip=None)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        (case(with_max_norm), "data=1"),
        (case(with_max_norm), "pipeline=2"),
        (case(tied_with_max_norm), "data=1"),
        (case(by_frequency), "pipeline=2"),
        (case(spectral, vectors), "data=2"),
        (case(spectral, vectors), "microbatches=2"),
        (case(spectral, vectors), "data=2 pipeline=2 microbatches=2 schedule=zero-bubble"),
        (case(changing, vectors), "data=1"),
        (case(changing_through_data, vectors), "pipeline=2"),
    ],
)
def test_what_is_right_is_accepted(case: Case, plan: str) -> None:
    """A spectral norm iterated once for each microbatch, where one device does once per step."""
    assert_equal(case, plan)


@pytest.mark.parametrize(
    ("make", "plan", "match"),
    [
        (with_max_norm, "data=2", "0 has max_norm: its forward changes the rows"),
        (with_max_norm, "zero=3", "0 has max_norm"),
        (with_max_norm, "precision=bf16", "0 has max_norm"),
        (with_max_norm, "microbatches=2", "use data=1, context=1, microbatches=1"),
        (tied_with_max_norm, "pipeline=2", "pipeline=1 if other modules have the weight"),
        (with_sparse_buffer, "data=2", "table: sparse, and ranks exchange dense buffers alone"),
        (by_frequency, "data=2", "0 has scale_grad_by_freq"),
        (by_frequency, "microbatches=2", "use data=1, microbatches=1 and context=1"),
        (spectral, "schedule=pipedream-2bw microbatches=2", "has a spectral norm"),
    ],
)
def test_what_would_be_wrong_is_refused(make: Make, plan: str, match: str) -> None:
    check_content(make(), Plan.parse("data=1"))
    with pytest.raises(UserError, match=match):
        check_content(make(), Plan.parse(plan))


def test_a_sparse_buffer_that_checkpoints_would_have_is_refused() -> None:
    """Training went on, and engine.save ended in a raw error of torch."""
    with pytest.raises(UserError, match="table: sparse, and checkpoints have dense tensors alone"):
        check_content(with_sparse_buffer(persistent=True), Plan())


@pytest.mark.parametrize("plan", ["data=2", "microbatches=2", "context=2"])
def test_the_loss_of_transformers_gates_is_refused_where_a_call_sees_a_part(plan: str) -> None:
    """It was that of each part, and no mean of them, without a word."""
    model: Any = make_transformers("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    nested = nn.ModuleDict({"inner": model})
    for each, place in ((model, "the model"), (nested, "inner")):
        with pytest.raises(
            UserError, match=f"{place} has output_router_logits=True and router_aux_loss_coef=0.5"
        ):
            check_content(each, Plan.parse(plan))
        check_content(each, Plan.parse("data=1 expert=1"))
    model.router_aux_loss_coef = 0  # what the forward reads
    check_content(model, Plan.parse(plan))
    check_content(make_transformers("mixtral", router_aux_loss_coef=0.5), Plan.parse(plan))


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (changing, "microbatches=2"),
        (changing, "zero=3 microbatches=2"),
        (changing, "precision=bf16"),
        (changing, "schedule=pipedream"),
        (changing_through_data, "microbatches=2"),
        (changing_through_data, "schedule=pipedream"),
    ],
)
def test_a_forward_that_changes_weights_is_refused_in_the_first_step(make: Make, plan: str) -> None:
    """Replicas drifted apart without a word."""
    engine = echelon.parallelize(make(), plan, optimizer=sgd, loss=F.cross_entropy)
    with pytest.raises(UserError, match=r"the forward changes (1\.weight|weights) in place"):
        engine.step(vectors(0))
    assert engine.steps == 0


class Adapted(nn.Module):
    """As peft's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.peft_config = nn.Linear(2, 2), {"default": None}

    def get_base_model(self) -> nn.Module:
        return self.base_model


@pytest.mark.parametrize(
    ("make", "plan", "match"),
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            "data=1",
            "0.weight, 0.bias: of a lazy module, and without",
        ),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "data=1", "the model is a RecursiveScriptModule"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "data=1", "the model is a DataParallel"),
        (Adapted, "pipeline=2", r"a Adapted of peft.*use adapters that replace layers"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_no_plan_can_look_into_is_refused(make: Make, plan: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        echelon.parallelize(make(), plan, optimizer=sgd, loss=F.mse_loss)


def test_a_model_of_peft_is_taken_where_nobody_looks_inside() -> None:
    check_content(Adapted(), Plan.parse("data=2 zero=3"))
