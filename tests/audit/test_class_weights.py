"""Losses that weigh classes which a batch does not have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.audit.class_weights import difference_of_classes, num_classes
from echelon.audit.loss_parts import Batch, LossParts


def batch(shape: tuple[int, ...], target_shape: tuple[int, ...], *, is_zero: bool = False) -> Batch:
    output = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (not is_zero)
    return Batch(output, torch.ones(target_shape, dtype=torch.int64), [0], [0], 2)


def by_position(loss: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    return lambda output, targets: loss(output.flatten(0, 1), targets.flatten())


LAST = torch.ones(40)
LAST[39] = 3.0


@pytest.mark.parametrize("is_zero", [False, True])
def test_the_weight_of_one_class_of_many(is_zero: bool) -> None:
    # Only six classes of the batch were asked.
    pair = batch((2, 40), (2,), is_zero=is_zero)
    for loss, is_weighed in ((nn.CrossEntropyLoss(weight=LAST), True), (nn.CrossEntropyLoss(), False)):
        parts = LossParts(loss)
        assert num_classes(parts, pair) == 40
        assert (difference_of_classes(parts, pair, range(40), usual=1) is not None) == is_weighed


def test_many_classes_stand_in_one_sample() -> None:
    pair = batch((2, 50, 40), (2, 50))
    for loss, is_weighed in ((nn.CrossEntropyLoss(weight=LAST), True), (nn.CrossEntropyLoss(), False)):
        parts = LossParts(by_position(loss))
        assert num_classes(parts, pair) == 40
        assert (difference_of_classes(parts, pair, range(40), usual=1) is not None) == is_weighed


def test_targets_that_are_no_classes() -> None:
    parts = LossParts(lambda output, targets: F.mse_loss(output.mean(1), targets.to(output.dtype)))
    assert num_classes(parts, batch((2, 40), (2,))) == 0
