"""Uses: the times during a step when a module needs gathered units, found by hooks.

A use is one call of a module's forward. It holds its units from just before the forward to just after it,
and again from the moment the gradient of its output is there to the moment the gradients of its inputs are:

    forward     [enter ── forward ── leave]
    backward                     [enter ── backward ── leave]

A module that is called twice has two uses. One without inputs that need gradients (the embedding of tokens),
or with inputs that are leaves, leaves when the whole backward pass is over, or earlier when the gradient of
its unit is complete.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UserError
from echelon.nn.head.deferred import awaited_weight
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import Unit
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.residency import GatherAgreement, Residency, explain_mismatch
from echelon.parallel.data.zero.weight_views import Placement


class Use:
    """One call of a module's forward: which units it needs, and whether its backward pass is under way."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.watched = False  # an input's gradient will tell when the backward pass is through
        self.in_backward = False
        self.over = False


class UseHooks:
    """Watches modules and calls `enter(use, backward)`, `leave(use)` and `returned(use, tensor)`."""

    def __init__(
        self,
        modules: list[nn.Module],
        wrapping: Wrapping,
        enter: Callable[[Use, bool], None],
        leave: Callable[[Use], None],
        returned: Callable[[Use, Tensor], None],
    ) -> None:
        self._enter, self._leave, self._returned = enter, leave, returned
        self.units = {module: unit for unit, module in enumerate(modules)}  # those that are watched
        self._calls: dict[nn.Module, list[Use]] = {module: [] for module in modules}
        # A watched module's output → the uses that it is the only input of.
        self._consumers: MutableMapping[Tensor, list[Use]] = WeakIdKeyDictionary()
        for unit, module in enumerate(modules):
            wrapping.before("gather", module, self._before(unit), with_kwargs=True, prepend=True)
            wrapping.after("gather", module, self._after, with_kwargs=True, always_call=True)

    def _before(self, unit: int) -> Callable[..., Any]:
        @untraced
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            use = Use(unit)
            self._calls[module].append(use)
            self._enter(use, False)
            if torch.is_grad_enabled():
                self._watch_inputs(use, args, kwargs)

        return hook

    @untraced
    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        use = self._calls[module].pop()
        for tensor in _tensors(output):  # nothing, when the forward has raised
            self._returned(use, tensor)
            # A hook on a leaf would stay forever, and a leaf has no backward pass of this module behind it.
            # The hook holds the use, and not the tensor: that would keep the graph, and so itself, alive.
            if tensor.requires_grad and not tensor.is_leaf:
                consumers = self._consumers.setdefault(tensor, [])
                with torch._C.DisableTorchFunctionSubclass():  # logits that wait would be computed for a hook
                    tensor.register_hook(lambda _, consumers=consumers: self._begin_backward(use, consumers))
        self._leave(use)

    def _begin_backward(self, use: Use, consumers: list[Use]) -> None:
        """The gradient of an output is there: a use that had only it as input is through, and leaves first.
        Its own hook would tell only after this one, and one more unit would be gathered meanwhile."""
        for consumer in consumers:
            self.end_backward(consumer)
        if not use.in_backward and not use.over:
            use.in_backward = True
            self._enter(use, True)

    def end_backward(self, use: Use) -> None:
        """The use needs its units no more; calling it again changes nothing."""
        if use.in_backward:
            use.in_backward = False
            use.over = True
            self._leave(use)

    def _watch_inputs(self, use: Use, args: Any, kwargs: Any) -> None:
        """Find out when the gradients of all inputs are there: the backward pass is through the module."""
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        # Autograd may call the hook of a leaf before those of the module's own weights, which are leaves too.
        # The inputs of torch's reentrant checkpoint are leaves.
        if inputs and not any(tensor.is_leaf for tensor in inputs):
            use.watched = True
            if len(inputs) == 1 and inputs[0] in self._consumers:
                self._consumers[inputs[0]].append(use)
            register_multi_grad_hook(inputs, lambda _: self.end_backward(use))


@final
class UnitUses:
    """Gathers units for their uses in the passes of a step, where whole weights do not stay on the device."""

    def __init__(
        self,
        units: Sequence[Unit],
        flats: Sequence[list[FlatUnit]],
        residency: Residency,
        agreement: GatherAgreement | None,
        wrapping: Wrapping,
    ) -> None:
        """`flats`: the memory of each unit. `agreement`: where ranks gather weights together."""
        self._flats, self._residency, self._agreement = flats, residency, agreement
        self._needs = [unit.needs for unit in units]
        self._unit_of = {flat: index for index, unit in enumerate(flats) for flat in unit}
        self._flat_of = {parameter: flat for flat in self._unit_of for _, parameter in flat.parameters}
        self._in_backward: list[Use] = []  # uses whose backward pass has begun
        self._in_pass = False
        # Torch calls hooks in the order in which they were set: these come before those of the reducer, which
        # may free a unit when its last gradient is there.
        self._checks = [
            parameter.register_post_accumulate_grad_hook(lambda p, flat=flat: _check_gathered(flat, p))
            for flat in self._unit_of
            for _, parameter in flat.parameters
            if parameter.requires_grad
        ]
        self._hooks = UseHooks(
            [unit.module for unit in units], wrapping, self._enter, self._leave, self._hold_returned
        )

    def start_step(self) -> None:
        """Forget what a step that failed has left."""
        self.finish_backward()
        self._in_pass = False

    def start_pass(self, *, backward: bool) -> None:
        self._in_pass = True
        self._residency.ahead(backward=backward)

    def finish_pass(self) -> None:
        """Free what was gathered ahead and not used."""
        self._in_pass = False
        if self._agreement is not None:
            self._agreement.finish_pass()
        with explain_mismatch():
            if torch.is_grad_enabled():
                self._residency.free_unused()
            else:
                self._residency.release()

    def abandon_pass(self) -> None:
        """A pass has raised: no module runs any more."""
        self._in_pass = False
        self._in_backward = []
        self._residency.abandon()

    def finish_backward(self) -> None:
        for use in self._in_backward:
            self._hooks.end_backward(use)
            use.over = False  # another pass may go through a graph that is retained
        self._in_backward = []

    def end_reduced(self, flat: FlatUnit, later: Sequence[FlatUnit]) -> None:
        """The gradient of `flat` is complete: uses of its unit end that no input will end (the embedding of
        tokens), unless some of the unit is among what is reduced `later`."""
        for use in self._in_backward:
            unit = self._flats[use.unit]
            if not use.watched and flat in unit and not any(each in later for each in unit):
                self._hooks.end_backward(use)

    @contextmanager
    def second_run(self, module: nn.Module) -> Iterator[None]:
        """Around a module's forward that runs again in the backward pass."""
        unit = self._hooks.units.get(module)
        if unit is None:
            yield
            return
        with explain_mismatch():
            self._residency.enter_again(unit)
        try:
            yield
        finally:
            self._residency.leave(unit)

    def read(self, flat: FlatUnit) -> None:
        """A weight is read outside of the module that owns it; during a step all ranks read it alike."""
        if self._in_pass or self._residency.in_use:
            self._residency.hold(self._unit_of[flat])

    def close(self) -> None:
        for check in self._checks:
            check.remove()

    def _enter(self, use: Use, backward: bool) -> None:
        if backward and torch.is_grad_enabled():
            placement = common_placement(self._unit_of)
            raise UserError(
                f"with {placement} weights are freed after the backward pass, and a backward pass through it "
                f"(create_graph=True) would need them again; {placement.fix}"
            )
        with explain_mismatch():
            self._residency.enter(use.unit, backward=backward)
        if backward:
            self._in_backward.append(use)

    def _leave(self, use: Use) -> None:
        self._residency.leave(use.unit)

    def _hold_returned(self, use: Use, tensor: Tensor) -> None:
        """A module has returned `tensor`: if it is a weight, or a view of one, or logits that wait for the
        loss, the weight is still needed."""
        awaited = awaited_weight(tensor)
        if awaited is not None and awaited in self._flat_of:
            self._residency.hold(self._unit_of[self._flat_of[awaited]])
        if awaited is not None or tensor.layout != torch.strided:  # has no storage: is no view of a weight
            return
        storage = tensor.untyped_storage()._cdata
        for need in self._needs[use.unit]:
            if any(flat.flat.untyped_storage()._cdata == storage for flat in self._flats[need]):
                self._residency.hold(need)


def common_placement(flats: Iterable[FlatUnit]) -> Placement:
    """Return where some of these units are while nothing uses them."""
    placements = [flat.placement for flat in flats]
    return Placement(any(each.sharded for each in placements), any(each.offloaded for each in placements))


def _check_gathered(flat: FlatUnit, parameter: Tensor) -> None:
    """Refuse a gradient that was computed while the weights were not there: it is wrong."""
    if not flat.is_gathered:
        name = next(name for name, p in flat.parameters if p is parameter)
        raise UserError(
            f"{name} was used while it was not gathered: with {flat.placement} a weight is there only while "
            "the module that owns it runs; call that module instead of reading its weight, let its output "
            f"hold tensors that torch can see, or {flat.placement.fix}"
        )


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every tensor in a structure; also in objects that torch does not look into, a few levels deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, type | nn.Module):
            yield from _tensors(_attributes(leaf), depth - 1)


def _attributes(value: object) -> list[Any]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
