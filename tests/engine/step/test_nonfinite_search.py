"""The first layer that is not finite is named, and finding it changes nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import parallelize
from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit import AuditResult, held
from echelon.engine.step.nonfinite_search import check_finite_weights
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.ownership import OwnedSlice, whole_slice
from echelon.update.nonfinite import NonfiniteError
from tests.cases import adamw, mean_loss
from tests.engine.poisoned_training import (
    Layer,
    Poison,
    explode,
    full_state,
    layers,
    vectors,
)
from tests.engine.test_deferred import deferring
from tests.update.test_nonfinite import GRADIENT, INPUT, LOSS, Warm, slow, steps_until_error


@pytest.mark.parametrize("most_skipped", [1, 2, 4])
def test_on_a_device_the_error_comes_with_the_layer_too(most_skipped: int) -> None:
    with deferring():
        text, raised, last = steps_until_error(
            "data=1", Poison("input", range(2, 2 + most_skipped)), most_skipped=most_skipped
        )
    assert last == 2 + most_skipped - 1
    assert raised <= last + 2, "in the second step after it at the latest"
    assert "that of layer '0.linear' (Linear): NaN" in text


def test_the_layer_of_a_bad_input() -> None:
    text, *_ = steps_until_error("microbatches=4", INPUT, nonfinite="stop")
    assert "the first output that is not finite is that of layer '0.linear' (Linear): NaN, on rank 0" in text
    assert "in microbatch 2 of the last of these batches; the inputs of the batch are not finite" in text


def test_the_layer_of_a_gradient() -> None:
    text, *_ = steps_until_error("data=1", GRADIENT, nonfinite="stop")
    assert "outputs and losses are finite" in text
    assert "in the backward pass the first value that is not is the gradient of the output of" in text
    assert "layer '0.linear' (Linear)" in text


def failing(model: nn.Module, loss: Any = mean_loss, spoil: Callable[[], object] = lambda: None) -> str:
    """The error of the second step, which comes after `spoil`."""
    engine = parallelize(model, "precision=fp64", optimizer=adamw, loss=loss, nonfinite="stop")
    engine.step(vectors(0, None))
    spoil()
    with pytest.raises(NonfiniteError) as caught:
        engine.step(vectors(1, None))
    engine.close()
    return str(caught.value)


def test_the_layer_whose_weights_are_not_finite() -> None:
    model = layers()
    text = failing(model, spoil=lambda: model[2].linear.bias.data.fill_(math.nan))  # type: ignore[union-attr, index, operator]
    assert "that of layer '2.linear' (Linear): NaN" in text
    assert "weights in it are not finite: 2.linear.bias" in text


class Exploding(nn.Module):
    """Its own backward pass makes an infinite gradient of a finite one, when it is told to."""

    is_armed = False

    def forward(self, x: Tensor) -> Tensor:
        return explode(x, torch.tensor(self.is_armed))


def test_the_layer_whose_backward_pass_is_to_blame() -> None:
    torch.manual_seed(0)
    exploding = Exploding()
    model = nn.Sequential(nn.Linear(8, 8), exploding, nn.Linear(8, 5)).double()
    text = failing(model, spoil=lambda: setattr(exploding, "is_armed", True))
    assert (
        "the first value that is not is the gradient of the input of layer '1' (Exploding): infinite" in text
    )


class Once(nn.Module):
    """Its output is NaN in one call, and finite when the batch is run again."""

    num_wrong = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_wrong -= 1
        return x * (math.nan if self.num_wrong == 0 else 1.0)


def test_the_search_changes_nothing() -> None:
    # What it runs again may be finite, and must not train.
    torch.manual_seed(0)
    once = Once()
    model = nn.Sequential(nn.Linear(8, 8), once, nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    options: Any = {"optimizer": adamw, "loss": mean_loss, "nonfinite": "stop", "audit": "off"}
    with parallelize(model, "precision=fp64", **options) as engine:
        engine.step(vectors(0, None))
        before = full_state(engine)
        once.num_wrong = 1
        with pytest.raises(NonfiniteError, match="run again, the last of these batches gave finite outputs"):
            engine.step(vectors(1, None))
        after = full_state(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)


class Between(nn.Module):
    """Divides by zero between two layers, when it is told to."""

    divisor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / self.divisor)


def test_what_is_computed_between_layers() -> None:
    torch.manual_seed(0)
    between = Between()
    model = nn.Sequential(nn.Linear(8, 8), between, nn.Linear(8, 5)).double()
    text = failing(model, spoil=lambda: setattr(between, "divisor", 0.0))
    assert "that of layer '1.second.linear' (Linear): NaN" in text
    assert "its input is not finite already: look at what is computed between the layers before it" in text


class Scale(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_layer_that_is_to_blame_alone() -> None:
    torch.manual_seed(0)
    scale = Scale()
    model = nn.Sequential(nn.Linear(8, 8), scale, nn.Linear(8, 5)).double()
    text = failing(model, spoil=lambda: setattr(scale, "factor", math.inf))
    assert "that of layer '1' (Scale): infinite" in text
    assert "its input and its weights are finite" in text


class Mask(nn.Module):
    """Scores of which some are −infinity, as they are meant to be."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(8) > 5, -math.inf)


def test_minus_infinity_in_masks_is_not_to_blame() -> None:
    torch.manual_seed(0)
    scale = Scale()
    model = nn.Sequential(nn.Linear(8, 8), Mask(), nn.Softmax(-1), scale, nn.Linear(8, 5)).double()
    text = failing(model, spoil=lambda: setattr(scale, "factor", math.nan))
    assert "that of layer '3' (Scale): NaN" in text
    assert "but for −infinity, which layer '1' (Mask) returned before" in text


def test_the_loss_itself() -> None:
    factor = torch.ones(())

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(output, targets) * factor

    text = failing(layers(), loss, lambda: factor.fill_(math.inf))
    assert "the first value that is not finite is the loss itself: infinite" in text
    assert "though what the model returns is" in text


class HugeWeight(nn.Module):
    """Its weight alone has a gradient that is not finite."""

    is_armed = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.is_armed:
            weight.register_hook(lambda gradient: gradient * math.inf)
        return x * weight


def test_gradients_of_weights_alone() -> None:
    torch.manual_seed(0)
    huge = HugeWeight()
    model = nn.Sequential(nn.Linear(8, 8), huge, nn.Linear(8, 5)).double()
    text = failing(model, spoil=lambda: setattr(huge, "is_armed", True))
    assert "all outputs and their gradients are finite, but not the sums of the gradients of 1.weight" in text


def test_squares_that_are_too_large() -> None:
    factor = torch.ones((), dtype=torch.float64)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(output, targets) * factor

    text = failing(layers(), loss, lambda: factor.fill_(1e200))
    assert "the squares of the gradients are too large for their norm" in text


def layer_of(plan: str, poison: Poison) -> str:
    return steps_until_error(plan, poison, most_skipped=2)[0]


@pytest.mark.parametrize(
    ("plan", "poison", "place"),
    [
        ("data=2", INPUT, "'0.linear' (Linear): NaN, on rank 1 in microbatch 0"),
        ("pipeline=2 microbatches=4", GRADIENT, "'0.linear' (Linear): infinite, on rank 0 in microbatch 2"),
        *(
            pytest.param(plan, poison, place, marks=slow)
            for plan, poison, place in [
                ("data=2 zero=3", INPUT, "'0.linear' (Linear): NaN, on rank 1 in microbatch 0"),
                ("tensor=2", INPUT, "'0.linear' (Linear): NaN, on rank 0 in microbatch 0"),
                ("data=2 zero=3", GRADIENT, "'0.linear' (Linear)"),
                ("tensor=2", GRADIENT, "'0.linear' (Linear)"),
                ("pipeline=2 microbatches=4 schedule=zero-bubble", GRADIENT, "'0.linear' (Linear)"),
                ("pipeline=2 microbatches=2 recompute=full", GRADIENT, "'0.linear' (Linear)"),
                ("data=2 sync=parameter-server", GRADIENT, "'0.linear' (Linear)"),
                ("data=2 zero=1 offload=optimizer", INPUT, "'0.linear' (Linear)"),
                ("context=2", LOSS, "the loss itself"),
                ("data=2 expert=2", LOSS, "the loss itself"),
            ]
        ),
    ],
)
def test_the_layer_on_ranks(warm_ranks: Warm, plan: str, poison: Poison, place: str) -> None:
    first, *others = warm_ranks(Plan.parse(plan).ranks).run(layer_of, plan, poison)
    assert place in first
    assert set(others) == {first}, "the same on every rank"


# Weights that are no numbers.

AGREEMENT = RankAgreement(None, torch.device("cpu"))


def check_weights(**weights: Tensor) -> AuditResult:
    owned = [OwnedSlice(whole_slice(name, tensor), tensor) for name, tensor in weights.items()]
    return check_finite_weights(lambda: owned, frozenset({"trained"}), AGREEMENT)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_trained_weight_must_be_finite(number: float) -> None:
    with pytest.raises(UserError, match=r"NaN or infinite before the first step: trained, on rank 0; init"):
        check_weights(trained=torch.tensor([1.0, number]), frozen=torch.ones(2))


def test_a_frozen_mask_may_be_infinite_but_is_a_number() -> None:
    infinite = torch.tensor([-float("inf"), 0.0])
    assert check_weights(
        trained=torch.ones(2), frozen=infinite, index=torch.ones(1, dtype=torch.int64)
    ) == held("finite weights")
    with pytest.raises(UserError, match="frozen"):
        check_weights(frozen=infinite * 0)


@pytest.mark.parametrize(("count", "named"), [(3, "w0, w1, w2, on"), (5, "w0, w1, w2 and 2 more, on")])
def test_three_weights_are_named_each_once(count: int, named: str) -> None:
    nan = torch.tensor([float("nan")])
    owned = [OwnedSlice(whole_slice(f"w{k}", nan), nan) for k in range(count) for _ in range(2)]
    with pytest.raises(UserError, match=f"before the first step: {named} rank 0"):
        check_finite_weights(lambda: owned, frozenset(), AGREEMENT)


def test_complex_weights_are_checked_and_nothing_at_all_is_finite() -> None:
    with pytest.raises(UserError, match="trained"):
        check_weights(trained=torch.tensor([complex(0, float("inf"))]))
    assert check_weights(index=torch.ones(1, dtype=torch.int64)) == held("finite weights")
