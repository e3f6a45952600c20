"""Tensors whose elements fill their memory without gaps, in any order of dims."""

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether a copy has the same strides."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
