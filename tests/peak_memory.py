"""The peak of the memory that operations take, also of what is gone when they end."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Inside, `peak` is the most bytes that results of operations have held at a time."""

    def __init__(self, *, of_meta: bool = False) -> None:
        """`of_meta`: count tensors without values too, by what they would take."""
        super().__init__()
        self.peak = 0
        self._of_meta = of_meta
        self._alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_identity(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._counts(tensor) and _identity(tensor) not in given:
                self._alive[_identity(tensor)] = StorageWeakRef(tensor.untyped_storage())
        sizes = {key: _size(kept) for key, kept in self._alive.items()}
        self._alive = {key: kept for key, kept in self._alive.items() if sizes[key] is not None}
        self.peak = max(self.peak, sum(size or 0 for size in sizes.values()))
        return result

    def _counts(self, tensor: Tensor) -> bool:
        return self._of_meta or not tensor.is_meta


def _size(kept: StorageWeakRef) -> int | None:
    """The bytes of a storage now, which may have given them back; None if it is gone."""
    storage = torch.UntypedStorage._new_with_weak_ptr(kept.cdata)
    return None if storage is None else storage.nbytes()


def _identity(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
