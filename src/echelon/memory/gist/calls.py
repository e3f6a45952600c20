"""relu and max_pool2d that a forward calls as functions, and not as modules."""

from inspect import signature
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.memory.gist.functions import Window, max_pool2d, relu
from echelon.memory.gist.settings import Compression
from echelon.nn.autograd.saved_tensors import is_recorded

_RELUS = {F.relu: False, torch.relu: False, Tensor.relu: False, torch.relu_: True, Tensor.relu_: True}
_POOL = signature(F.max_pool2d_with_indices)


@final
class CompressedCalls(TorchFunctionMode):
    """Inside, such functions save less. `seen`: whether one was called."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self._compression = compression
        self.seen = False

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_recorded():  # a checkpoint, which computes again outside of this
            return func(*args, **kwargs)
        if func in _RELUS:
            return self._relu(func, *args, **kwargs)
        if func is F.max_pool2d:
            self.seen = True
            arguments = dict(_POOL.bind(*args, **kwargs).arguments)
            arguments.pop("return_indices", None)
            return max_pool2d(arguments.pop("input"), Window.of(**arguments), self._compression)
        return func(*args, **kwargs)

    def _relu(self, func: Any, input: Tensor, inplace: bool = False) -> Tensor:
        self.seen = True
        return relu(input, self._compression, inplace=inplace or _RELUS[func])
