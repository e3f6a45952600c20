"""Layers split over ranks against the same layers unsplit: wrong tables that fit the shapes are found.

A table that forgot to divide the heads, or took a fused matrix for one, trained in silence before: all
shapes fitted, all losses went down, and the model was another one.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import echelon
from echelon.launching import Ranks
from echelon.models import cross_entropy
from tests.cases import adamw
from tests.engine.audit.wrong_tables import NAMES, WIDTH, example
from tests.parallel.tensor.models import MODELS, tokens

Warm = Callable[[int], Ranks]


def batch(num_outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (WIDTH, num_outputs)
    inputs, targets = (torch.randn(4, 6, size, generator=generator, dtype=torch.float64) for size in sizes)
    return inputs, targets


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets.to(output.dtype))  # torch 2.11 has no gradient for two types


def answer_of(name: str, plan: str, audit: str = "first") -> str:
    """What an engine says to the first step."""
    model, table, _ = example(name)
    options = {"optimizer": adamw, "loss": mean_loss, "tensor_table": table, "audit": audit}
    engine = echelon.parallelize(model, plan, **options)
    before = engine.full_state_dict()
    try:
        engine.step(batch(model.num_outputs))
    except echelon.UserError as error:
        after = engine.full_state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        return str(error)
    return next((str(result) for result in engine.audit if result.name == "gradients"), "no audit")


def answers_of(names: list[str], plan: str) -> dict[str, str]:
    return {name: answer_of(name, plan) for name in names}


def test_wrong_tables_are_refused_by_the_name_of_the_weight(warm_ranks: Warm) -> None:
    plan = "tensor=2 precision=fp64"
    first, other = warm_ranks(2).run(answers_of, list(NAMES), plan)
    assert first == other
    for name, answer in first.items():
        says = example(name).says
        assert all(part in answer for part in says) if says else answer == "gradients: held", (name, answer)


def test_without_an_audit_the_wrong_table_trains(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(answer_of, "not divided", "tensor=2", "off") == ["no audit"] * 2


def results_of(model: str, plan: str) -> list[str]:
    torch.manual_seed(0)
    engine = echelon.parallelize(MODELS[model](), plan, optimizer=adamw, loss=cross_entropy)
    engine.step(engine.local(tokens(0, 4)))
    return [str(result) for result in engine.audit if result.name == "gradients"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("dropping", "tensor=2"),
        ("gpt", "tensor=2 precision=bf16"),
        ("dropping", "tensor=2 sequence=true"),
        ("llama", "context=2"),
    ],
)
def test_right_plans_hold(warm_ranks: Warm, model: str, plan: str) -> None:
    assert warm_ranks(2).run(results_of, model, plan) == [["gradients: held"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=4",
        "tensor=4 sequence=true precision=bf16",
        "tensor=2 pipeline=2",
        "tensor=2 pipeline=2 sequence=true schedule=interleaved chunks=2 microbatches=2",
        "data=2 tensor=2 zero=3",
        "data=2 tensor=2 zero=1",
        "data=2 context=2 zero=3",
        "tensor=2 context=2 sequence=true",
        "tensor=2 context=2 attention=all-to-all",
    ],
)
def test_right_plans_of_four_ranks_hold(warm_ranks: Warm, model: str, plan: str) -> None:
    assert warm_ranks(4).run(results_of, model, plan) == [["gradients: held"]] * 4
