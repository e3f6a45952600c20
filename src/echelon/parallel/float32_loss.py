"""The loss in float32: what a model below float32 returns is converted before its loss.

In fp16 a sum over 10,000 tokens is infinite, and in bf16 a mean has three digits.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.nn.batch import Loss
from echelon.parallel.own_loss import OwnLoss
from echelon.parallel.tensor import split_loss


def in_float32(loss: Loss, dtype: torch.dtype) -> Loss:
    """A loss of what a model of `dtype` returns. Those that convert logits themselves, in parts, and a loss
    that the model has computed already, are what they are."""
    if dtype.itemsize >= torch.float32.itemsize or split_loss(loss) is not None or isinstance(loss, OwnLoss):
        return loss

    def float32_loss(output: Any, targets: Any) -> Any:
        return loss(tree_map(_in_float32, output), targets)

    return float32_loss


def _in_float32(leaf: Any) -> Any:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):  # one that torch does not know
        return _fields_in_float32(leaf)
    is_low = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4
    return leaf.float() if is_low else leaf


def _fields_in_float32(output: Any) -> Any:
    """A copy, made without its __init__, which may compute. A frozen one may be set nowhere else."""
    converted = copy.copy(output)
    for field in dataclasses.fields(output):
        if hasattr(output, field.name):
            object.__setattr__(converted, field.name, tree_map(_in_float32, getattr(output, field.name)))
    return converted
