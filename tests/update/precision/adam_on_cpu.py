"""The kernel of fused Adam, run on the CPU by the stand-in for Triton."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # optimizers import it, and it would take the stand-in for Triton

import echelon.update.precision
from echelon.update.precision.fused_adam import Element
from tests.nn.dropout.triton_stand_in import ADDRESSED, kernel_on_cpu


@contextmanager
def adam_on_cpu() -> Iterator[Any]:
    """The module of the kernel. Inside, masters on the CPU are taken for such that it can update."""
    with (
        kernel_on_cpu(echelon.update.precision, "fused_adam_kernel") as kernel,
        patch("echelon.update.precision.fused_adam.has_kernel", lambda _: True),
        patch.object(torch.cuda, "device", lambda _: nullcontext()),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        patch.dict(ADDRESSED, clear=True),
    ):
        make, point_at = kernel.Table.__init__, kernel.Table.point_at

        def make_addressed(table: Any, elements: Sequence[Element]) -> None:
            _address([tensor for element in elements for tensor in element[:-1]])
            make(table, elements)

        def point_at_addressed(table: Any, gradients: Sequence[torch.Tensor]) -> None:
            _address(gradients)
            point_at(table, gradients)

        with (
            patch.object(kernel.Table, "__init__", make_addressed),
            patch.object(kernel.Table, "point_at", point_at_addressed),
        ):
            yield kernel


def _address(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        ADDRESSED[tensor.data_ptr()] = torch.as_strided(tensor, (tensor.numel(),), (1,)).numpy()
