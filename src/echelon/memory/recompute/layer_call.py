"""One call of a layer that is to run again: its arguments, and all that its second run must find again.

LayerCall       of one call, which the second run uses up
LayerHistory    of one layer: what its first call has shown that it changes
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UserError
from echelon.memory.recompute.arguments import Arguments, Outputs
from echelon.memory.recompute.second_run_check import OutputPrint, SecondRunCheck
from echelon.memory.recompute.surroundings import Surroundings
from echelon.nn.autograd.saved_tensors import Hooks
from echelon.nn.autograd.second_run import Tape

# Buffers that a layer's forward changes: its second run starts from their values of before the first, and
# leaves the real ones as they are.

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


if TYPE_CHECKING:
    from echelon.memory.recompute.segment import RecomputedLayer, SegmentSettings


@final
class LayerHistory:
    """What is known of a layer. In its first call, everything that a forward may change is copied before; so
    it is in the first call of any other mode."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.modules, self.name = list(module.modules()), name
        self.buffers = LayerBuffers(self.modules, name)
        self.changed_arguments: dict[Mode, frozenset[int]] = {}  # by their number

    def mode(self) -> Mode:
        return tuple(module.training for module in self.modules)

    def weight_storages(self) -> set[int]:
        return weight_storages(self.modules)


def weight_storages(modules: Iterable[nn.Module]) -> set[int]:
    """Those of parameters and buffers, as the modules have them now."""
    tensors: list[Tensor | None] = []
    for module in modules:
        tensors += [*module._parameters.values(), *module._buffers.values()]
    with torch._C.DisableTorchFunctionSubclass():
        return {
            tensor.untyped_storage()._cdata
            for tensor in tensors
            if tensor is not None and tensor.layout == torch.strided
        }


@final
class LayerCall:
    """One call. `previous`: what the call before has returned, if it belongs to the same run."""

    def __init__(
        self,
        layer: "RecomputedLayer",
        args: Any,
        kwargs: Any,
        previous: Outputs | None,
        settings: "SegmentSettings",
    ) -> None:
        self.layer, self._settings = layer, settings
        self._mode = layer.history.mode()
        changed = layer.history.changed_arguments.get(self._mode)
        self._arguments = Arguments(args, kwargs, previous, changed, layer.name)
        self._tape = Tape()
        self._print: OutputPrint | None = None
        self._buffers: BufferStates = {}

    def kept_storages(self) -> set[int]:
        checkpoints = self._settings.checkpoints
        return self._arguments.storages(checkpoints) | self.layer.history.weight_storages()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        history = self.layer.history
        self._surroundings = Surroundings(history.modules, self._settings)
        buffers = history.buffers.before(self._mode)
        with self._tape.record():
            yield
        self._buffers = history.buffers.changed(buffers)
        self._surroundings.finish()

    def finish(self, output: Any, hooks: Hooks | None) -> None:
        """The first run is over: keep the arguments."""
        history = self.layer.history
        changed = self._arguments.keep(self._settings.checkpoints, hooks)
        if not changed <= history.changed_arguments.setdefault(self._mode, changed):
            raise UserError(
                f"recompute: {history.name} changes an argument in place that it has not changed in its "
                "first call, so that it cannot run again from its value of before; do not change it in "
                "place, or use recompute=none"
            )
        self.outputs = Outputs(output)
        if self._settings.check.is_open:
            self._print = OutputPrint(output)

    def arguments(self, output: Any) -> tuple[Any, Any]:
        """For the second run, in which the call before has returned `output`."""
        return self._arguments.rebuild(output)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        with ExitStack() as around:
            around.enter_context(self._surroundings.restored())
            around.enter_context(self.layer.history.buffers.replaced(self._buffers))
            around.enter_context(self._tape.replay())
            yield

    def compare(self, output: Any, check: SecondRunCheck) -> bool:
        """Whether as many tensors were returned; their values are compared at the end of the step."""
        if self._print is None:
            return True
        again = OutputPrint(output)
        if not self._print.is_comparable(again):
            return False
        check.compare(self.layer.name, self._print, again)
        return True
