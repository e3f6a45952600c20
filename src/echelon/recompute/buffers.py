"""Buffers that a layer's forward changes: its second run starts from their values of before the first, and
leaves the real ones as they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UserError

Slot = tuple[nn.Module, str]
BufferStates = Mapping[Slot, Tensor | None]


class _Before(NamedTuple):
    """A buffer as it was: the tensor, its version, and a copy where it may change."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None


@final
class LayerBuffers:
    """The buffers of a layer. In the first call all are copied, and then those that it has changed."""

    def __init__(self, modules: Sequence[nn.Module], name: str) -> None:
        self._modules = [module for module in modules if module._buffers]
        self._name = name
        self._changing: set[Slot] | None = None

    def before(self) -> dict[Slot, _Before]:
        return {
            (module, name): self._state((module, name), buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
        }

    def _state(self, slot: Slot, buffer: Tensor | None) -> _Before:
        if buffer is None:
            return _Before(None, 0, None)
        copied = self._changing is None or slot in self._changing
        return _Before(buffer, buffer._version, buffer.detach().clone() if copied else None)

    def changed(self, before: Mapping[Slot, _Before]) -> BufferStates:
        """The values of before, of what a run has changed since."""
        changed = {slot: state for slot, state in before.items() if _has_changed(slot, state)}
        if self._changing is not None and not changed.keys() <= self._changing:
            names = sorted({name for _, name in changed.keys() - self._changing})
            raise UserError(
                f"recompute: {self._name} changes its buffer {', '.join(names)}, which it has not changed in "
                "its first call, so that it cannot run again from the value of before; change it in every "
                "call or in none, or use recompute=none"
            )
        self._changing = (self._changing or set()) | changed.keys()
        return {slot: state.copy for slot, state in changed.items()}

    @contextmanager
    def replaced(self, states: BufferStates) -> Iterator[None]:
        """Modules have these buffers inside, and then the ones that they have now again."""
        current = {(module, name): module._buffers[name] for module, name in states}
        for (module, name), buffer in states.items():
            module._buffers[name] = buffer
        try:
            yield
        finally:
            for (module, name), buffer in current.items():
                module._buffers[name] = buffer


def _has_changed(slot: Slot, before: _Before) -> bool:
    module, name = slot
    buffer = module._buffers.get(name)
    if buffer is not before.tensor:
        return True
    # The kernels of these change their statistics without a mark on the version.
    counts = isinstance(module, _NormBase) and module.training and module.track_running_stats
    return buffer is not None and (counts or buffer._version != before.version)
