"""Batches on their way to the device, which the host does not wait for."""

from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.nn.batch import tensors_of


def to_device(structure: Any, device: torch.device) -> Any:
    """The same structure on the device, without waiting for it.

    A copy to a CUDA device that the host does not wait for must be from pinned memory. Where the memory is
    not pinned, or has gaps, a pinned copy is made here. Nobody keeps that copy: torch's allocator of pinned
    memory records an event behind each such transfer, and gives the memory to nobody else before the event
    has passed.
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if device.type == "cuda" and leaf.is_cpu and not (leaf.is_pinned() and leaf.is_contiguous()):
            leaf = leaf.contiguous().pin_memory()  # torch would copy what is strided through other memory
        return leaf.to(device, non_blocking=True)

    return move(structure) if type(structure) is Tensor else tree_map(move, structure)


@final
class Upload:
    """The copies of one batch to the device, all of which have been queued.

    A batch in pinned memory of the user's is copied from there. The user may fill that memory with the next
    batch as soon as the step returns. The device copies when it begins the step, so at the end of the step
    the host can wait for that without losing time.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda" and _is_pinned(batch):
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> None:
        """Return when the batch may be changed."""
        if self._done is not None:
            self._done.synchronize()


def _is_pinned(structure: Any) -> bool:
    tensors = tensors_of(structure)
    return any(leaf.is_cpu and leaf.is_pinned() for leaf in tensors)
