"""A product with a matrix, for nodes of the graph that compute its gradients themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """As F.linear, and never a view, which autograd would forbid to change in place."""
    flat = F.linear(x.flatten(0, -2), matrix, bias)
    shaped: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    return shaped
