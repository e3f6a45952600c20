"""What one forward pass through the layers of a stage takes: bytes that autograd saves, bytes of inputs, and
seconds, layer by layer.

A layer is measured while it runs as one that drops what it saves: `saving` is told of each tensor. Seconds of
a CUDA device are read when the pass is over, and not in between.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.recompute.budget_model import LayerCost
from echelon.saved_tensors import current_hooks, observe


@final
class LayerMeasurement:
    """One layer of one pass."""

    def __init__(self, args: Any, standing: set[int], device: torch.device) -> None:
        """`standing`: storages of weights and buffers, which are no activations."""
        self._standing, self._device = standing, device
        self.inputs = _storages(tree_leaves(args))
        self.saved: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self._read_seconds: Callable[[], float] = float

    def saving(self, tensor: Tensor) -> None:
        """Autograd saves a tensor. All that a layer saves is alive until it returns, so storages differ."""
        self.saved |= {key: size for key, size in _storages([tensor]).items() if key not in self._standing}

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            seconds = time.perf_counter() - begin
            self._read_seconds = lambda: seconds
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()

        def read() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        self._read_seconds = read

    def returned(self, output: Any) -> None:
        """What of the outputs, which the next layer takes, is saved."""
        self.outputs = _storages(tree_leaves(output))

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    def cost(self, previous: "LayerMeasurement | None", parts: int, *, keeps_memory: bool) -> LayerCost:
        """`parts`: in how many parts ranks keep an input. `keeps_memory`: they keep it where it is."""
        chained = self._chained(previous)
        saved_before = {} if previous is None else previous.saved
        return LayerCost(
            self.saved_bytes,
            sum(-(-size // parts) for size in chained.values()),
            self._read_seconds(),
            reused=sum(self.saved[key] for key in chained if key in self.saved) if keeps_memory else 0,
            shared=sum(self.saved[key] for key in chained if key in self.saved and key in saved_before),
        )

    def elsewhere(self, previous: "LayerMeasurement | None") -> dict[int, int]:
        """Inputs that are no outputs of the layer before: a mask, which all layers may take."""
        return {key: size for key, size in self.inputs.items() if key not in self._chained(previous)}

    def _chained(self, previous: "LayerMeasurement | None") -> dict[int, int]:
        """Inputs that the layer before has returned; all, of the first layer."""
        if previous is None:
            return self.inputs
        return {key: size for key, size in self.inputs.items() if key in previous.outputs}


@final
class SavedBytes:
    """What autograd saves in other places than layers: in the loss."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._tensors: list[Tensor] = []  # alive until they are counted: a storage's number is used again

    @property
    def total(self) -> int:
        return sum(self._storages.values())

    @contextmanager
    def count(self) -> Iterator[None]:
        outer = current_hooks()

        def pack(tensor: Tensor) -> Any:
            self._storages |= _storages([tensor])
            self._tensors.append(tensor.detach())
            return tensor if outer is None else outer.pack(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if outer is None else outer.unpack(packed)

        with observe(pack, unpack):
            yield
        self._tensors = []


def _storages(leaves: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage that tensors lie in."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {int(storage._cdata): storage.nbytes() for storage in storages}
