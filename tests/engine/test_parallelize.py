"""parallelize: what is wrong is refused before anything happens to the model."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.engine import parallelize as composition
from echelon.engine.parallelize import parallelize
from echelon.errors import UserError
from echelon.plan import Plan
from tests.cases import Perceptron, adamw, mean_loss, vectors
from tests.parallel.pipeline.models import perceptron


def refusal(model: nn.Module, plan: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        parallelize(model, plan, **({"optimizer": adamw, "loss": mean_loss} | options))
    return str(caught.value)


def test_a_plan_needs_its_ranks() -> None:
    assert "needs 2 ranks, but 1 is running" in refusal(Perceptron(), "data=2")


def test_clipping_without_one_norm_is_refused() -> None:
    with pytest.raises(UserError, match=r"clip=1.0 schedule=pipedream: .*; drop clip, or use schedule=1f1b"):
        parallelize(perceptron(), "pipeline=2 schedule=pipedream", optimizer=adamw, loss=mean_loss, clip=1.0)


def test_a_model_with_nothing_to_train_is_refused_still() -> None:
    assert "nothing to train" in refusal(perceptron().requires_grad_(False), "pipeline=2")


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("data=2 expert=2", {}),
        ("precision=bf16 data=2", {"clip": -1.0}),
        ("precision=bf16 data=0", {}),
        ("precision=bf16 schedule=pipedream", {"clip": 1.0}),
    ],
)
def test_a_model_is_as_it_was_after_a_refusal(plan: str, options: dict[str, Any]) -> None:
    model = Perceptron()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refusal(model, plan, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_a_plan_is_text_or_a_plan() -> None:
    losses = []
    for plan in ("microbatches=2", Plan(microbatches=2)):
        torch.manual_seed(0)
        with parallelize(Perceptron(), plan, optimizer=adamw, loss=mean_loss) as engine:
            losses.append(engine.step(vectors(0)).loss)
            assert engine.mesh.plan == Plan(microbatches=2)
    assert losses[0] == losses[1]


def test_the_model_takes_the_type_of_the_plan() -> None:
    model = Perceptron()
    with parallelize(model, "precision=fp64", optimizer=adamw, loss=mean_loss):
        assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_it_is_the_package_s_own() -> None:
    assert echelon.parallelize is parallelize


def test_it_fits_on_one_screen() -> None:
    """One line for each strategy; what grows beyond that belongs into the strategy."""
    lines = inspect.getsource(parallelize).splitlines()
    docstring = (parallelize.__doc__ or "").splitlines()
    code = [line for line in lines if line.strip()]
    arguments = inspect.signature(parallelize).parameters
    assert len(code) - len([line for line in docstring if line.strip()]) - len(arguments) <= 33
    assert len(inspect.getsource(composition).splitlines()) < 100
