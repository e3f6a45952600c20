"""One call of a layer that is to run again: its arguments, and all that its second run must find again.

LayerCall       of one call, which the second run uses up
LayerHistory    of one layer: what its first call has shown that it changes
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.memory.recompute.arguments import Arguments, Outputs
from echelon.memory.recompute.buffers import BufferStates, LayerBuffers, Mode
from echelon.memory.recompute.second_run_check import OutputPrint, SecondRunCheck
from echelon.memory.recompute.surroundings import Surroundings
from echelon.nn.autograd.saved_tensors import Hooks
from echelon.nn.autograd.second_run import Tape

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
