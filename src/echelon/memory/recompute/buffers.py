"""Buffers that a layer's forward changes: its second run starts from their values of before the first, and
leaves the real ones as they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UserError

Mode = tuple[bool, ...]  # whether each module of a layer trains
Slot = tuple[nn.Module, str]
BufferStates = Mapping[Slot, Tensor | None]


class _Before(NamedTuple):
    """A buffer as it was: the tensor, its version, and a copy where it may change."""

    tensor: Tensor | None
    version: int
    copy: Tensor | None


class BuffersBefore(NamedTuple):
    """Those of a layer before a call. `changing`: those that calls of this mode change; None in the first."""

    states: Mapping[Slot, _Before]
    mode: Mode
    changing: set[Slot] | None


@final
class LayerBuffers:
    """The buffers of a layer. In the first call all are copied, and then those that it has changed.

    Which they are depends on what trains: a call in a new mode is a first call again.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str) -> None:
        self._modules, self._name = [module for module in modules if module._buffers], name
        self._changing: dict[Mode, set[Slot]] = {}

    def before(self, mode: Mode) -> BuffersBefore:
        changing = self._changing.get(mode)
        states = {
            (module, name): _state(buffer, copied=changing is None or (module, name) in changing)
            for module in self._modules
            for name, buffer in module._buffers.items()
        }
        return BuffersBefore(states, mode, changing)

    def changed(self, before: BuffersBefore) -> BufferStates:
        """The values of before, of what a run has changed since."""
        changed = {slot for slot, state in before.states.items() if _has_changed(slot, state)}
        if before.changing is None:
            changed |= _unmarked(before.states, changed)
            self._changing[before.mode] = changed
        elif not changed <= before.changing:
            names = sorted({name for _, name in changed - before.changing})
            raise UserError(
                f"recompute: {self._name} changes its buffer {', '.join(names)}, which it has not changed in "
                "its first call, so that it cannot run again from the value of before; change it in every "
                "call or in none, or use recompute=none"
            )
        else:
            changed = before.changing & before.states.keys()  # also without a mark
        return {slot: before.states[slot].copy for slot in changed}

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


def _state(buffer: Tensor | None, *, copied: bool) -> _Before:
    if buffer is None:
        return _Before(None, 0, None)
    return _Before(buffer, buffer._version, buffer.detach().clone() if copied else None)


def _has_changed(slot: Slot, before: _Before) -> bool:
    module, name = slot
    buffer = module._buffers.get(name)
    if buffer is not before.tensor:
        return True
    # The kernels of these change their statistics without a mark on the version.
    counts = isinstance(module, _NormBase) and module.training and module.track_running_stats
    return buffer is not None and (counts or buffer._version != before.version)


def _unmarked(states: Mapping[Slot, _Before], changed: set[Slot]) -> set[Slot]:
    """What changed without a mark, as statistics that a forward hands to `batch_norm` itself. What its module
    holds beside it may have kept its value by chance. Reads the device."""
    rest = {slot: state for slot, state in states.items() if slot not in changed}
    modules = {slot[0] for slot, state in rest.items() if _has_new_value(state)}
    return {slot for slot in rest if slot[0] in modules}


def _has_new_value(before: _Before) -> bool:
    if before.tensor is None or before.copy is None:
        return False
    return not torch.equal(before.tensor, before.copy)
