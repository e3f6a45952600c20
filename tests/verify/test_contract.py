"""The contract holds for data parallelism, and it can fail."""

import math

import pytest
import torch

from echelon.plan import Plan
from echelon.verify import Case, Verdict, assert_equal, verify
from tests.cases import (
    adamw,
    counted_loss,
    eleven_vectors,
    masked_vectors,
    mean_loss,
    perceptron_case,
    sgd,
    vectors,
)


@pytest.mark.parametrize(
    "plan", ["data=1", "data=1 microbatches=3", "data=2", "data=3 microbatches=2", "data=4"]
)
def test_plans_are_equal_to_one_device(plan: str) -> None:
    verdict = assert_equal(perceptron_case(), plan)
    assert verdict.worst[1] < 1e-11


def test_uneven_batches_weigh_by_samples() -> None:
    assert_equal(perceptron_case(eleven_vectors), "data=3 microbatches=2")


def test_counted_losses_weigh_by_tokens() -> None:
    assert_equal(perceptron_case(masked_vectors, counted_loss), "data=2 microbatches=3")


def test_other_optimizers_and_no_clipping() -> None:
    assert_equal(perceptron_case(make_optimizer=sgd, clip=None), "data=2")
    assert_equal(perceptron_case(make_optimizer=sgd, clip=0.01, steps=5), "data=2")


@pytest.mark.parametrize("plant", ["divide-twice", "skip-bucket"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_planted_bug_is_found_and_its_parameter_named(plant: str, ranks: int) -> None:
    verdict = verify(perceptron_case(steps=3), f"data={ranks}", plant=plant)
    assert not verdict.equal
    names = {name for name, _ in perceptron_case().build().named_parameters()}
    assert verdict.worst[0].split()[0] in names
    assert verdict.worst[0] in str(verdict)
    assert "DIFFERS" in str(verdict)


def drops_a_sample(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Not the same batch on every rank: rank 1 sees other targets than the reference."""
    inputs, targets = vectors(step)
    import os

    return (inputs, targets.flip(0)) if os.environ.get("RANK") == "1" else (inputs, targets)


def test_ranks_that_see_other_data_are_found() -> None:
    assert not verify(perceptron_case(drops_a_sample, steps=2), "data=2").equal


def verdict_of(tensors: dict[str, float], numbers: dict[str, float] | None = None) -> Verdict:
    return Verdict(Plan(data=2), 20, tensors, numbers or {"loss": 0.0})


def test_not_a_number_is_never_equal() -> None:
    assert not verdict_of({"a": math.nan, "b": 1e-3}).equal
    assert verdict_of({"a": math.nan, "b": 1e-3}).worst[0] == "a"
    assert not verdict_of({"a": 0.0}, {"loss": math.nan}).equal


def test_a_wrong_loss_alone_is_named() -> None:
    assert verdict_of({"a": 1e-12}, {"loss": 0.5, "grad_norm": 0.0}).worst == ("loss", 0.5)
    assert verdict_of({"a": 1e-12}, {"loss": 1e-12}).equal


def test_an_untrained_case_still_compares_weights() -> None:
    case = Case(torch.nn.Identity, vectors, mean_loss, adamw, steps=0)
    with pytest.raises(ValueError, match="nothing to train"):
        verify(case, "data=1")
