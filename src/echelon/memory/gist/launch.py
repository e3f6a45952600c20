"""Launches of Triton kernels, without most of what the host does for each.

Triton inspects all arguments in every launch, to choose among the kernels that it has compiled for them. Here
it does so once for arguments of one kind: later launches go straight to the compiled kernel.
"""

from typing import Any, Final, final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# How a compiled kernel is called is no promise of Triton's. Other versions choose in every launch.
_IS_KNOWN: Final = triton.__version__.startswith("3.6.")
_MOST = 4096  # kinds of arguments; beyond, all are forgotten


@final
class Launch:
    """A kernel whose arguments are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any, num_warps: int = 4, **constants: int) -> None:
        self._kernel, self._constants, self._num_warps = kernel, constants, num_warps
        self._values = tuple(constants.values())
        self._compiled: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(self, programs: int, tensors: tuple[Tensor, ...], *numbers: float) -> None:
        device = tensors[0].get_device()
        if device < 0:  # in Triton's interpreter
            self._choose(programs, tensors, numbers)
        elif device == torch._C._cuda_getDevice():
            self._launch(programs, device, tensors, numbers)
        else:
            with torch.cuda.device(device):
                self._launch(programs, device, tensors, numbers)

    def _launch(
        self, programs: int, device: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = (device, numbers, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        if compiled is None or any(pointer & 15 for pointer in pointers):
            kernel = self._choose(programs, tensors, numbers)
            if _IS_KNOWN and not any(pointer & 15 for pointer in pointers):
                self._remember(key, kernel)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *self._values)

    def _choose(self, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> Any:
        return self._kernel[(programs,)](*tensors, *numbers, **self._constants, num_warps=self._num_warps)

    def _remember(self, key: Any, kernel: Any) -> None:
        if len(self._compiled) >= _MOST:
            self._compiled.clear()
        self._compiled[key] = kernel.run, kernel.function, kernel.packed_metadata
