"""Measures one forward pass through a stage, layer by layer: bytes that autograd saves, bytes of inputs, and
seconds.

A layer is measured while it runs as one that drops what it saves: `saving` is told of each tensor. Seconds of
a CUDA device are read when the pass is over, and not in between.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.memory.recompute.budget import LayerCost
from echelon.memory.recompute.saved_inputs import ArgumentName, SavedInputs
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, observe
from echelon.nn.tracing import untraced


class LayerInput(NamedTuple):
    """The bytes that a saved input takes, and whether they are the argument's own memory."""

    kept_bytes: int
    keeps_memory: bool


@final
class LayerMeasurement:
    def __init__(
        self, name: str, arguments: Any, inputs: SavedInputs, excluded: set[int], device: torch.device
    ) -> None:
        """`excluded`: storages of weights and buffers, which are no activations, and of what is counted."""
        self._excluded, self._device = excluded, device
        self.inputs: dict[int, LayerInput] = {}  # by their storages
        for number, leaf in enumerate(tree_leaves(arguments)):
            for storage in _storages([leaf]):
                argument = ArgumentName(name, number)
                self.inputs[storage] = LayerInput(
                    inputs.kept_bytes(leaf, argument), inputs.keeps_memory(leaf, argument)
                )
        self.saved: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self._read_seconds: Callable[[], float] = float

    def saving(self, tensor: Tensor) -> None:
        """Autograd saves a tensor. All that a layer saves is alive until it returns, so storages differ."""
        self.saved |= {key: size for key, size in _storages([tensor]).items() if key not in self._excluded}

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
        self.outputs = _storages(tree_leaves(output))

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def input_bytes(self) -> int:
        return sum(each.kept_bytes for each in self.inputs.values())

    def cost(self, previous: "LayerMeasurement | None") -> LayerCost:
        chained = self._chained(previous)
        saved_before = {} if previous is None else previous.saved
        saved_inputs = [key for key in chained if key in self.saved]
        return LayerCost(
            self.saved_bytes,
            sum(each.kept_bytes for each in chained.values()),
            self._read_seconds(),
            reused=sum(self.saved[key] for key in saved_inputs if chained[key].keeps_memory),
            shared=sum(self.saved[key] for key in saved_inputs if key in saved_before),
        )

    def elsewhere(self, previous: "LayerMeasurement | None") -> dict[int, LayerInput]:
        """Inputs that are no outputs of the layer before: a mask, which all layers may take."""
        chained = self._chained(previous)
        return {key: each for key, each in self.inputs.items() if key not in chained}

    def _chained(self, previous: "LayerMeasurement | None") -> dict[int, LayerInput]:
        """Inputs that the layer before has returned; all, of the first layer."""
        if previous is None:
            return self.inputs
        return {key: each for key, each in self.inputs.items() if key in previous.outputs}


@final
class SavedBytes:
    """Bytes that autograd saves outside of layers: around them, and in the loss."""

    def __init__(self, excluded: AbstractSet[int] = frozenset()) -> None:
        """`excluded`: storages of weights and buffers, which are no activations."""
        self.storages: dict[int, int] = {}
        self._excluded = excluded
        self._tensors: list[Tensor] = []  # alive until they are counted: a storage's number is used again
        self.is_open = False

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    @contextmanager
    def count(self) -> Iterator[None]:
        outer = current_hooks()

        @untraced
        def pack(tensor: Tensor) -> KeptTensor:
            if self.is_open:
                self._add(tensor)
            return KeptTensor(tensor, outer)

        @untraced
        def unpack(kept: KeptTensor) -> Tensor:
            return kept.take()

        self.is_open = True
        try:
            with observe(pack, unpack):
                yield
        finally:
            self.is_open, self._tensors = False, []

    def _add(self, tensor: Tensor) -> None:
        self.storages |= {key: size for key, size in _storages([tensor]).items() if key not in self._excluded}
        self._tensors.append(tensor.detach())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around a layer, which is measured by itself."""
        was_open, self.is_open = self.is_open, False
        try:
            yield
        finally:
            self.is_open = was_open


def _storages(leaves: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage that tensors lie in."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {int(storage._cdata): storage.nbytes() for storage in storages}
