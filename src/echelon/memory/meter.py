"""Memory by category, measured from the storages that are alive, not computed from a plan.

Parameters, gradients, optimizer state and buffers are found by walking what holds them; activations are the
tensors that autograd saves for the backward pass, seen through its saved-tensor hooks. A storage that
several tensors share counts once, and one that is already a parameter or buffer is no activation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")

# Measuring costs a little time in each step, and steps are alike: the first ones tell.
METERED_STEPS = 3


class Memory(NamedTuple):
    """Bytes by category."""

    now: dict[str, int]
    peak: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.now.values())


class Meter:
    """Watches one rank's model and optimizer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._saved: Counter[int] = Counter()
        self._activations = 0
        self._peak = dict.fromkeys(CATEGORIES, 0)
        self._steps = 0
        self.sample()

    def read(self) -> Memory:
        now = self._measure()
        return Memory(now, dict(self._peak))

    def start_step(self) -> None:
        self._steps += 1

    def sample(self) -> None:
        """Raise the peaks to what memory holds now, in the steps that are metered."""
        if self._steps <= METERED_STEPS:
            self._measure()

    def _measure(self) -> dict[str, int]:
        parameters = list(self._module.parameters())
        state = [
            value
            for entry in self._optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        ]
        now = {
            "parameters": _storage_bytes(parameters),
            "gradients": _storage_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": _storage_bytes(state),
            "activations": self._activations,
            "buffers": _storage_bytes(self._module.buffers()),
        }
        for category, size in now.items():
            self._peak[category] = max(self._peak[category], size)
        return now

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Count what autograd saves inside, until the backward pass lets it go."""
        if self._steps > METERED_STEPS:
            yield
            return
        standing = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*self._module.parameters(), *self._module.buffers()]
        }

        def pack(tensor: Tensor) -> "_Saved | Tensor":
            if tensor.untyped_storage().data_ptr() in standing:
                return tensor
            return _Saved(tensor, self)

        def unpack(saved: "_Saved | Tensor") -> Tensor:
            return saved.tensor if isinstance(saved, _Saved) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if self._saved[storage.data_ptr()] == 0:
            self._activations += storage.nbytes()
            self._peak["activations"] = max(self._peak["activations"], self._activations)
        self._saved[storage.data_ptr()] += 1

    def _drop(self, storage: torch.UntypedStorage) -> None:
        self._saved[storage.data_ptr()] -= 1
        if self._saved[storage.data_ptr()] == 0:
            del self._saved[storage.data_ptr()]
            self._activations -= storage.nbytes()


class _Saved:
    """A tensor that autograd keeps; tells the meter when it is let go."""

    def __init__(self, tensor: Tensor, meter: Meter) -> None:
        # Without its history: an output that holds its own graph would never be freed if nobody goes back.
        self.tensor, self._meter = tensor.detach(), meter
        meter._keep(tensor.untyped_storage())

    def __del__(self) -> None:
        self._meter._drop(self.tensor.untyped_storage())


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the distinct storages behind `tensors`."""
    sizes = {(s.device, s.data_ptr()): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(sizes.values())
