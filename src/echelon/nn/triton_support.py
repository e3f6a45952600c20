"""Find out whether Triton kernels can run here, and on which device."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Return True where Triton is installed. The first call imports parts of the compiler."""
    from torch.utils._triton import has_triton as is_installed

    return is_installed()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on the device of `x`: Triton starts them on the current one."""
    # torch.cuda.device costs the host several microseconds, in every launch, also where nothing changes.
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(x.device)
