"""The peak of the memory that operations take, also of what is gone when they end."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Inside, `peak` is the most bytes that results of operations have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_identity(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _identity(tensor) not in given:
                storage = tensor.untyped_storage()
                self._alive[_identity(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
