"""Losses that add up over samples, and losses that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.audit import loss_parts
from echelon.audit.loss_parts import (
    Batch,
    LossParts,
    LossRefusedError,
    candidates,
    num_special,
    usual_values,
)

WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


def batch(targets: list[int], *, dtype: torch.dtype = torch.float32) -> Batch:
    output = torch.randn(len(targets), 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    return Batch(output, torch.tensor(targets), [0], [0], len(targets))


def weighted(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, weight=WEIGHTS.to(output.dtype))


def contrastive(output: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def in_own_type(output: Tensor, targets: Tensor) -> Tensor:
    assert output.dtype != torch.float64
    return F.cross_entropy(output, targets)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        in_own_type,
        lambda output, targets: (F.cross_entropy(output, targets, reduction="sum"), len(targets)),
        lambda output, targets: F.mse_loss(output.mean(1), targets.to(output.dtype)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_samples_add_up(loss: Callable[..., Any], dtype: torch.dtype) -> None:
    assert LossParts(loss).difference(batch([0, 1, 2, 1, 2, 0], dtype=dtype)) is None


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (weighted, [0, 1, 2, 1]),
        (contrastive, [0, 1, 2, 1]),
        (F.cross_entropy, [0, -100, 2, 1]),
        (lambda output, targets: (F.cross_entropy(output, targets), len(targets)), [0, 1, 2, 1]),
        (lambda output, targets: (F.cross_entropy(output, targets, reduction="sum"), 1), [0, 1, 2, 1]),
    ],
)
def test_means_that_weigh_and_losses_of_pairs_do_not(loss: Callable[..., Any], targets: list[int]) -> None:
    sums = LossParts(loss).difference(batch(targets))
    assert sums is not None
    assert "together" in sums.describe()


def test_equal_halves_hide_nothing() -> None:
    """Both halves leave out one target, so that their means agree; single samples tell."""
    assert LossParts(F.cross_entropy).difference(batch([0, -100, -100, 1])) is not None


def test_a_loss_that_takes_no_single_samples_is_not_judged_by_them() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        assert len(output) > 1
        return F.cross_entropy(output, targets)

    assert LossParts(loss).difference(batch([0, 1, 2, 1])) is None
    with pytest.raises(LossRefusedError, match="AssertionError"):
        LossParts(loss).difference(batch([0, 1]))


def test_a_loss_that_takes_no_parts_is_not_taken_for_one_that_adds_up() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.view(4, -1), targets)

    def vector(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, reduction="none")

    with pytest.raises(LossRefusedError, match=r"^(ValueError|RuntimeError): "):
        LossParts(loss).difference(batch([0, 1, 2, 1]))
    with pytest.raises(LossRefusedError, match="neither a number nor"):
        LossParts(vector).difference(batch([0, 1, 2, 1]))


def test_an_error_that_is_not_of_the_loss_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mistake in the audit itself read as "there is nothing to compare".
    monkeypatch.setattr(loss_parts, "_wide", lambda: None)
    with pytest.raises(TypeError, match="positional argument"):
        LossParts(F.cross_entropy).difference(batch([0, 1, 2, 1]))


@pytest.mark.parametrize(
    ("loss", "special"),
    [
        (F.cross_entropy, [-100]),
        (nn.CrossEntropyLoss(ignore_index=0), [0]),
        (weighted, [-100, 0, 2]),  # other weights than class 1
        (nn.CrossEntropyLoss(weight=WEIGHTS), [-100, 0, 2]),  # takes no float64
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=7), [7]),
    ],
)
def test_targets_that_a_mean_leaves_out_are_found_before_one_appears(loss: Any, special: list[int]) -> None:
    usual = batch([1, 1, 2, 1])
    values = [*candidates(loss), *usual_values(usual.targets, candidates(loss))]
    assert LossParts(loss).special_targets(usual, values, usual=1) == special


def test_losses_of_classes_that_count_alike_leave_out_nothing() -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()

    assert LossParts(loss).special_targets(batch([1, 1, 2, 1]), [-100, 0, 1, 2], usual=1) == []


def test_special_targets_are_counted_by_sample() -> None:
    targets = {"a": torch.tensor([[0, -100], [1, 2], [-100, -100]]), "b": torch.ones(3)}
    counts = num_special(targets, [-100, 0])
    assert counts is not None
    assert counts.tolist() == [2, 0, 2]
    assert num_special(torch.ones(3), [0]) is None
