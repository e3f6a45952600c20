"""Buckets: gradients of several parameters in one contiguous buffer, reduced at once.

Each parameter's `.grad` is a view into its bucket, so the backward pass produces gradients where they are
reduced and nothing is copied in or out. Buckets are filled in the order in which gradients are expected.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn


class Bucket:
    """A buffer, and for each of its parameters the view that is its gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        first = parameters[0]
        size = sum(parameter.numel() for parameter in parameters)
        self.buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.views: dict[nn.Parameter, Tensor] = {}
        end = 0
        for parameter in parameters:
            begin, end = end, end + parameter.numel()
            self.views[parameter] = self.buffer[begin:end].view_as(parameter)

    def clear(self) -> None:
        """Zero the buffer and make it every parameter's gradient again."""
        self.buffer.zero_()
        for parameter, view in self.views.items():
            parameter.grad = view


def fill_buckets(parameters: Sequence[nn.Parameter], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes (or one parameter), in the order given, one type a bucket."""
    buckets = []
    for _, alike in groupby(parameters, key=lambda p: (p.dtype, p.device)):
        taken: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            if taken and size + _bytes(parameter) > limit:
                buckets.append(Bucket(taken))
                taken, size = [], 0
            taken.append(parameter)
            size += _bytes(parameter)
        buckets.append(Bucket(taken))
    return buckets


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
