"""One call of a layer that is to run again: its arguments, and all that its second run must find again.

LayerCall       of one call, which the second run uses up
LayerHistory    of one layer: what its first call has shown that it changes
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from echelon.errors import UserError
from echelon.memory.recompute.saved_inputs import ArgumentName, Kept, SavedInputs
from echelon.memory.recompute.second_run import OutputPrint, SecondRunCheck, Surroundings
from echelon.memory.storages import storages_of, weight_storages
from echelon.nn.autograd.leaves import enter
from echelon.nn.autograd.saved_tensors import Hooks
from echelon.nn.autograd.second_run import Tape

if TYPE_CHECKING:
    from echelon.memory.recompute.segment import RecomputedLayer, SegmentSettings


@final
class Outputs:
    """The tensors that a layer has returned, without keeping them alive."""

    def __init__(self, output: Any) -> None:
        tensors = [(n, t) for n, t in enumerate(tree_leaves(output)) if isinstance(t, Tensor)]
        self._tensors = [(number, weakref.ref(tensor), tensor._version) for number, tensor in tensors]

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of an output; None for another tensor, and for an output changed since."""
        for number, output, version in self._tensors:
            if output() is tensor and tensor._version == version:
                return number
        return None


class _Reference(NamedTuple):
    """An output of the call before, by its number."""

    output: int


class _Same(NamedTuple):
    """The same tensor as an argument before it, by its number."""

    argument: int


class _SavedInput(NamedTuple):
    kept: Kept
    requires_grad: bool
    is_leaf: bool

    def take(self) -> Tensor:
        # Not a leaf where the layer has seen none: it may change its input in place.
        tensor = self.kept.take().detach().requires_grad_(self.requires_grad)
        return tensor if self.is_leaf else enter(tensor)


@final
class Arguments:
    """The arguments of one call. `keep` is called after the first run, and `rebuild` before the second.
    `changed`: the arguments that the layer changes in place, of which copies are taken before it does; None
    where that is not known yet."""

    def __init__(
        self, args: Any, kwargs: Any, previous: Outputs | None, changed: frozenset[int] | None, name: str
    ) -> None:
        self._name = name
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves: list[Any] = [_as_argument(leaf, leaves, n, previous) for n, leaf in enumerate(leaves)]
        _check_opaque(self._leaves, name)
        self._versions = {number: tensor._version for number, tensor in self._tensors()}
        self._copies = {
            number: tensor.detach().clone()
            for number, tensor in self._tensors()
            if changed is None or number in changed
        }

    def _tensors(self) -> Iterator[tuple[int, Tensor]]:
        return ((number, leaf) for number, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor))

    def storages(self, inputs: SavedInputs) -> set[int]:
        """Return the storages of the tensors that are kept as they are."""
        return storages_of(
            tensor
            for number, tensor in self._tensors()
            if inputs.keeps_memory(tensor, ArgumentName(self._name, number))
        )

    def keep(self, inputs: SavedInputs, hooks: Hooks | None) -> frozenset[int]:
        """The first run is over: keep what it was called with. Returns which tensors it has changed."""
        changed = frozenset(n for n, tensor in self._tensors() if tensor._version != self._versions[n])
        for number, tensor in list(self._tensors()):
            value = self._copies.get(number, tensor) if number in changed else tensor
            kept = inputs.keep(value, hooks, ArgumentName(self._name, number))
            self._leaves[number] = _SavedInput(kept, tensor.requires_grad, tensor.is_leaf)
        self._copies = {}
        return changed

    def rebuild(self, output: Any) -> tuple[Any, Any]:
        """The arguments of the second run, in which the call before has returned `output`."""
        outputs = tree_leaves(output)
        leaves: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, _Reference):
                leaves.append(outputs[leaf.output])
            elif isinstance(leaf, _Same):
                leaves.append(leaves[leaf.argument])
            else:
                leaves.append(leaf.take() if isinstance(leaf, _SavedInput) else leaf)
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def _as_argument(leaf: Any, leaves: list[Any], number: int, previous: Outputs | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    output = None if previous is None else previous.find(leaf)
    if output is not None:
        return _Reference(output)
    first = next(n for n, other in enumerate(leaves) if other is leaf)
    return leaf if first == number else _Same(first)


def _check_opaque(leaves: list[Any], name: str) -> None:
    """Objects with tensors inside that torch cannot see would hold on to the graph, and be changed twice."""
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
            continue
        inside = tree_leaves(list(vars(leaf).values()))
        if any(isinstance(each, Tensor) and each.requires_grad for each in inside):
            raise UserError(
                f"recompute: {name} takes a {type(leaf).__name__} that holds tensors with gradients, which "
                "cannot be kept for a second run; pass the tensors themselves, in tuples or dicts, or "
                "register the class with torch.utils._pytree.register_pytree_node"
            )


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
    """Buffers of a layer before a call. `changing`: those that this mode changes; None in its first call."""

    states: Mapping[Slot, _Before]
    mode: Mode
    changing: set[Slot] | None


@contextmanager
def _buffers_as(states: BufferStates) -> Iterator[None]:
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
    """Return buffers that changed without a new version, as statistics that a forward passes to `batch_norm`
    itself. Others of the same module may have kept their values by chance. Reads the device."""
    rest = {slot: state for slot, state in states.items() if slot not in changed}
    modules = {
        module
        for (module, _), (tensor, _, copy) in rest.items()
        if tensor is not None and copy is not None and not torch.equal(tensor, copy)
    }
    return {slot for slot in rest if slot[0] in modules}


@final
class LayerHistory:
    """Learned from earlier calls of a layer. In its first call, everything that a forward may change is
    copied before; so it is in the first call of any other mode, since what changes depends on what trains."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.modules, self.name = list(module.modules()), name
        self.changed_arguments: dict[Mode, frozenset[int]] = {}  # by their number
        self._changing: dict[Mode, set[Slot]] = {}  # buffers
        self._with_buffers = [each for each in self.modules if each._buffers]

    def mode(self) -> Mode:
        return tuple(module.training for module in self.modules)

    def weight_storages(self) -> set[int]:
        return weight_storages(self.modules)

    def buffers_before(self, mode: Mode) -> BuffersBefore:
        changing = self._changing.get(mode)
        states = {
            (module, name): _state(buffer, copied=changing is None or (module, name) in changing)
            for module in self._with_buffers
            for name, buffer in module._buffers.items()
        }
        return BuffersBefore(states, mode, changing)

    def changed_buffers(self, before: BuffersBefore) -> BufferStates:
        """The values of before, of what a run has changed since."""
        changed = {slot for slot, state in before.states.items() if _has_changed(slot, state)}
        if before.changing is None:
            changed |= _unmarked(before.states, changed)
            self._changing[before.mode] = changed
        elif not changed <= before.changing:
            names = sorted({name for _, name in changed - before.changing})
            raise UserError(
                f"recompute: {self.name} changes its buffer {', '.join(names)}, which it has not changed in "
                "its first call, so that it cannot run again from the value of before; change it in every "
                "call or in none, or use recompute=none"
            )
        else:
            changed = before.changing & before.states.keys()  # also without a mark
        return {slot: before.states[slot].copy for slot in changed}


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
        self.arguments = Arguments(args, kwargs, previous, changed, layer.name)
        self._tape = Tape()
        self._print: OutputPrint | None = None
        self._buffers: BufferStates = {}

    def kept_storages(self) -> set[int]:
        inputs = self._settings.inputs
        return self.arguments.storages(inputs) | self.layer.history.weight_storages()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        history = self.layer.history
        # Both before the forward: it may draw random numbers and change buffers.
        self._surroundings = Surroundings(history.modules, self._settings)
        buffers = history.buffers_before(self._mode)
        with self._tape.record():
            yield
        self._buffers = history.changed_buffers(buffers)
        self._surroundings.finish()

    def finish(self, output: Any, hooks: Hooks | None) -> None:
        """The first run is over: keep the arguments."""
        history = self.layer.history
        changed = self.arguments.keep(self._settings.inputs, hooks)
        if not changed <= history.changed_arguments.setdefault(self._mode, changed):
            raise UserError(
                f"recompute: {history.name} changes an argument in place that it has not changed in its "
                "first call, so that it cannot run again from its value of before; do not change it in "
                "place, or use recompute=none"
            )
        self.outputs = Outputs(output)
        if self._settings.check.is_open:
            self._print = OutputPrint(output)

    @contextmanager
    def second_run(self) -> Iterator[None]:
        with ExitStack() as around:
            around.enter_context(self._surroundings.restored())
            around.enter_context(_buffers_as(self._buffers))
            around.enter_context(self._tape.replay())
            yield

    def compare(self, output: Any, check: SecondRunCheck) -> bool:
        """Return whether as many tensors were returned; their values are compared at the end of the step."""
        if self._print is None:
            return True
        again = OutputPrint(output)
        if not self._print.is_comparable(again):
            return False
        check.compare(self.layer.name, self._print, again)
        return True
