"""The most memory that tensors take at the same time, on any device."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of what operations inside of it return, while somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # at most
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return results
