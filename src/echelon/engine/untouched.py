"""Forward passes that leave no trace: afterwards the model, and all generators of random numbers, are as if
nobody had called it.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from echelon.engine.buffer_snapshot import BufferSnapshot

_LARGEST_BUFFER = 2**28  # bytes; larger ones are tables that no forward changes
_KEPT = {"_parameters", "_buffers", "_modules"}  # what modules hold beside plain attributes


@contextmanager
def untouched(
    stages: Sequence[nn.Module], modules: Iterable[nn.Module], device: torch.device
) -> Iterator[None]:
    """Around forward passes of `stages`. Modes and plain attributes are those of `modules`."""
    attributes = {module: _plain_attributes(module) for module in modules}
    buffers, generators = BufferSnapshot(stages, largest=_LARGEST_BUFFER), GeneratorStates.now(device)
    buffers.take()
    try:
        yield
    finally:
        buffers.restore(refused=True)
        generators.restore(device)
        for module, before in attributes.items():
            _restore_attributes(module, before)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _KEPT}


def _restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in current if name not in before and name not in _KEPT]:
        del current[name]
    for name, value in before.items():
        if current.get(name, _KEPT) is not value:
            current[name] = value


class GeneratorStates(NamedTuple):
    """Where torch's, Python's and numpy's global generators stand."""

    host: Tensor
    device: Tensor | None
    python: object
    legacy: Any  # numpy's own global one

    @classmethod
    def now(cls, device: torch.device) -> "GeneratorStates":
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device, random.getstate(), numpy.random.get_state(legacy=False))

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)  # type: ignore[arg-type]
        numpy.random.set_state(self.legacy)

    def moved(self, device: torch.device) -> bool:
        """Whether anybody has drawn a number since."""
        other = GeneratorStates.now(device)
        same_device = self.device is None or other.device is None or torch.equal(self.device, other.device)
        same_host = torch.equal(self.host, other.host) and self.python == other.python
        return not (same_device and same_host and _same_numpy(self.legacy, other.legacy))


def _same_numpy(one: Any, other: Any) -> bool:
    if one["bit_generator"] != "MT19937":  # somebody has put another one there
        return True
    same: bool = one["state"]["pos"] == other["state"]["pos"] and one["has_gauss"] == other["has_gauss"]
    return same and bool((one["state"]["key"] == other["state"]["key"]).all())
