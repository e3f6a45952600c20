"""Where experts are computed: by Triton kernels on a CUDA device, else by torch operations."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernels_for(x: Tensor) -> Any:
    """The module of kernels for `x`, or None: torch operations do the same."""
    if not x.is_cuda or x.dtype not in _KERNEL_TYPES or x.numel() == 0 or not _has_triton():
        return None
    from echelon.nn.experts import kernels  # imports Triton

    return kernels


@cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which rows of this type are added up."""
    return torch.promote_types(dtype, torch.float32)
