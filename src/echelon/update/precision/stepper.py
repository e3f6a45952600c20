"""One update of the local parameters of a rank: in their own type, or through float32 masters.

Below float32 a weight is too coarse to add small updates to. There the optimizer works on float32 copies, the
masters; after each update the weights are rounded from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.parallel.data.sharing import Sharing
from echelon.state.checkpoint.saved import SavedParameter
from echelon.state.ownership import MASTER, LocalParameter, OwnedSlice
from echelon.update.numbers import Flag, Number
from echelon.update.optim.local import make_local
from echelon.update.optim.needs import inner_optimizers, need_of, works_by_element
from echelon.update.optim.optimizer_state import check_gradient, load_state
from echelon.update.precision.flat_memory import as_float32, dense_strides, divide, flat_views, without_memory
from echelon.update.precision.fused_adam import FusedAdam
from echelon.update.precision.optimizer_call import (
    DeviceCall,
    HostCall,
    OptimizerCall,
    has_step_hooks,
    restricted,
)


class Stepper(ABC):
    """Applies the optimizer to local parameters, with gradients scaled by a factor."""

    by_unit = False  # whether weights are on the device one unit at a time
    _sharings: Sequence[Sharing] = ()  # which bring them there
    on_host = False  # whether it updates what lies in host memory
    takes_products = True  # whether gradients of 16 bits cost it no more than float32 ones
    loses_change = False  # whether an update that is late will overwrite what the user has written

    def __init__(self, optimizer: torch.optim.Optimizer, *, deferred: bool) -> None:
        """`deferred`: factor and skip stay on the device, as far as the optimizer can take them there."""
        self.optimizer = optimizer
        self._call: OptimizerCall = DeviceCall(optimizer) if deferred else HostCall(optimizer)
        # Told of each unit that was updated, and whether it was skipped, while it is on the device.
        self.after_unit: Callable[[Sequence[LocalParameter], Flag], None] = lambda *_: None

    def start_step(self) -> None:  # noqa: B027 (nothing to do where no update is under way between steps)
        """A step begins; the gradients of the last one will be overwritten."""

    def start_update(self, number: int) -> None:  # noqa: B027 (nothing to do where nothing is drawn)
        """Update `number`, from 0, begins: of all parameters at once or of one unit after the other."""

    @abstractmethod
    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        """Update all, or a `unit`, that has a gradient; where `skip`, nothing. Gradients may be changed."""

    def step_all(self, factor: Number, skip: Flag = False) -> None:
        """Update everything: at once, or one unit after the other where weights are in host memory."""
        if not self.by_unit:
            self.step(factor, skip)
            return
        check_takes_units(self.optimizer, **_BY_UNIT)  # a hook may have been added
        for sharing in self._sharings:
            for unit in sharing.pieces_to_update():
                self.step(factor, skip, unit)
                self.after_unit(unit, skip)

    def after_updates(self, work: Callable[[Flag], None], skip: Flag) -> None:
        """Call `work` with `skip` when all updates so far are made."""
        work(skip)

    def newest(self, local: LocalParameter) -> Tensor:
        """Return the values of a local parameter after its update, as fine as they are kept."""
        return local.tensor.detach()

    def use_units(self, sharings: Iterable[Sharing]) -> None:
        """Update weights in host memory (offload=parameters): the device has no more of them than in passes.

            fetch     | unit 0 | unit 1 | unit 2 |
            update             | unit 0 | unit 1 | unit 2 |
            store                       | unit 0 | unit 1 | unit 2 |

        Gradients and the optimizer's state stay where they are.
        """
        check_takes_units(self.optimizer, **_BY_UNIT)
        self.by_unit, self._sharings = True, list(dict.fromkeys(sharings))

    def check_gradients(self, unit: Sequence[LocalParameter]) -> None:  # noqa: B027 (a part is never sparse)
        """Raise if the optimizer cannot take a gradient of a `unit`. Changes nothing."""

    def state(self, local: LocalParameter) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the optimizer's state of a local parameter, and its master."""
        return {}

    @abstractmethod
    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        """Take the state of a parameter, whose weight is loaded already, and its master from a checkpoint;
        what there was is gone. Talks to no one."""

    def changed(self) -> list[LocalParameter]:
        """Return weights from the host that the user has changed since the last update."""
        return []

    def end_rehearsal(self, changed: Sequence[LocalParameter]) -> None:  # noqa: B027 (nothing to do where
        # weights are updated themselves)
        """Passes have marked weights as updated, and none was: the user has changed only `changed`."""

    def take_over(self, local: Sequence[LocalParameter]) -> None:  # noqa: B027 (nothing to do where weights
        # are updated themselves)
        """Between two updates: the user has changed these weights. Their masters or copies follow, in the
        elements that are others now. Talks to no one."""

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        """Return the tensors that the optimizer updates on this rank, each with the name of its parameter."""
        return []

    def storages(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        return [tensor for each in local for tensor in self.state(each).values()]

    def gradients_in_flight(self) -> list[Tensor]:
        """Gradients that only a copy to the host still needs."""
        return []

    def wait(self, local: Sequence[LocalParameter]) -> None:  # noqa: B027 (an update is over when `step` is)
        """Return when the new weights of local parameters are there."""

    def finish(self, *, temporary: bool = False) -> bool:  # noqa: ARG002
        """Return when no update is under way, and the newest weights are there: true, if ranks must share
        them again, since an update was kept back. `temporary`: `undo_finish` follows before the next step."""
        return False

    def undo_finish(self) -> bool:
        """Between two steps: undo a temporary `finish`; true, if ranks must share weights."""
        return False

    def close(self) -> None:  # noqa: B027
        """Finish what is under way, and end all threads. Talks to no one."""

    @property
    def whole_parts(self) -> frozenset[str]:
        """The names of state that is of whole parameters, whatever part of one this rank updates."""
        parts: frozenset[str] = getattr(self.optimizer, "whole_state", frozenset())
        return parts

    def held_whole(self) -> list[OwnedSlice]:
        """State of parameters that this rank updates whole, for all ranks that hold parts of them."""
        return []


class LocalStepper(Stepper):
    """The optimizer updates something in place of each local parameter, which a subclass has made."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, local: Sequence[LocalParameter], *, deferred: bool = False
    ) -> None:
        """`optimizer`: over the parameters of which `local` has parts."""
        self._local = local
        held: dict[nn.Parameter, list[nn.Parameter]] = {}
        for each in local:
            held.setdefault(each.parameter, []).append(self.updated(each))
        super().__init__(make_local(optimizer, held), deferred=deferred)

    @abstractmethod
    def updated(self, local: LocalParameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates in place of a local parameter."""

    def check_gradients(self, unit: Sequence[LocalParameter]) -> None:
        for each in unit:
            if each.tensor.grad is not None:
                check_gradient(self.optimizer, each.name, self.updated(each), each.tensor.grad)

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        return state_tensors(self.optimizer, self.updated(local))

    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        strides = dense_strides(local.tensor)
        load_state(self.optimizer, self.updated(local), strides, saved, self.whole_parts)

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return [(each.name, self.updated(each)) for each in self._local]


@final
class DirectStepper(LocalStepper):
    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        parameters = with_gradients(self._local if unit is None else unit)
        with nullcontext() if unit is None else restricted(self.optimizer, parameters):
            self._call(parameters, factor, skip)

    def updated(self, local: LocalParameter) -> nn.Parameter:
        return local.tensor


@final
class MasterStepper(LocalStepper):
    """The optimizer works on float32 copies of the weights, which share one memory. They are made for the
    first update: until then they are what the weights are, and take no memory."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, local: Sequence[LocalParameter], *, deferred: bool = False
    ) -> None:
        self._masters = {each.tensor: nn.Parameter(without_memory(each.tensor)) for each in local}
        self._has_masters = False
        self._not_made: set[nn.Parameter] = set()  # weights of which the masters are memory without values
        super().__init__(optimizer, local, deferred=deferred)
        self._fused = FusedAdam(self.optimizer) if deferred else None
        # On a device each portion of copies is a call of the optimizer, which must queue its kernels.
        self.takes_products = self._fused is None or self._fused.is_usable

    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        if not self._has_masters:
            self._make_masters()
        if self._not_made:
            self._fill_masters(unit if self.by_unit else None)
        weights = with_gradients(self._local if unit is None else unit)
        if not takes_portions(self.optimizer):
            self._step(weights, factor, skip)
            return
        if self._fused is not None:
            prepared = self._fused.prepare(weights, [self._masters[weight] for weight in weights])
            if prepared is not None:
                self._fused.step(prepared, factor, skip)
                return
        skip = self._call.readable(skip)
        for portion in divide(weights, [self._masters[weight] for weight in weights]):
            self._step(portion, factor, skip)

    @torch.no_grad()
    def _make_masters(self) -> None:
        views = flat_views([weight.detach() for weight in self._masters], torch.float32)
        for master, view in zip(self._masters.values(), views, strict=True):
            master.data = view
        self._has_masters, self._not_made = True, set(self._masters)

    @torch.no_grad()
    def _fill_masters(self, unit: Sequence[LocalParameter] | None) -> None:
        given = [each.tensor for each in (self._local if unit is None else unit)]
        weights = [weight for weight in given if weight in self._not_made]
        copy_all([self._masters[weight] for weight in weights], weights)
        self._not_made.difference_update(weights)

    def _step(self, weights: Sequence[nn.Parameter], factor: Number, skip: Flag) -> None:
        masters = [self._masters[weight] for weight in weights]
        for master, gradient in zip(masters, as_float32(weights, masters), strict=True):
            master.grad = gradient
        self._call(masters, factor, skip)
        with torch.no_grad():
            copy_all(weights, masters)
        for master in masters:
            master.grad = None  # the memory is a bucket's, or is needed no more

    def updated(self, local: LocalParameter) -> nn.Parameter:
        return self._masters[local.tensor]

    def newest(self, local: LocalParameter) -> Tensor:
        return self._masters[local.tensor].detach()

    def take_over(self, local: Sequence[LocalParameter]) -> None:
        if self._has_masters:
            for each in local:
                if each.tensor not in self._not_made:
                    follow(self._masters[each.tensor], each.tensor)

    @torch.no_grad()
    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        if saved.has_finer(local.tensor.dtype):
            if not self._has_masters:
                self._make_masters()
            saved.fill(saved.finest, self.updated(local).detach())
            self._not_made.discard(local.tensor)
        elif self._has_masters:
            self._not_made.add(local.tensor)
        if self._fused is not None:
            self._fused.forget()
        super().load(local, saved)

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        is_made = self._has_masters and local.tensor not in self._not_made
        known = {MASTER: self.updated(local).detach()} if is_made else {}
        return known | super().state(local)


def with_gradients(local: Sequence[LocalParameter]) -> list[nn.Parameter]:
    return [each.tensor for each in local if each.tensor.grad is not None]


def takes_portions(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether several calls, each for some of the parameters, are the same as one, also where ranks do
    not call alike: true of torch's optimizers whose state is of single parameters."""
    return works_by_element(optimizer) and not _is_watched(optimizer)


def takes_units(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether several calls, each for some of the parameters, are the same as one, if all ranks call
    alike: true of optimizers that update one parameter at a time."""
    return need_of(optimizer) is not None and not _is_watched(optimizer)


def check_takes_units(
    optimizer: torch.optim.Optimizer,
    setting: str = "updates in the backward pass",
    fix: str = "use update=step",
) -> None:
    """Refuse an optimizer that must not be called once for each unit."""
    if not takes_units(optimizer):
        raise UserError(
            f"optimizer {type(optimizer).__name__} with {setting}: its step() is called once for each unit, "
            "which is right only for optimizers that update each parameter by itself, and whose steps "
            f"nobody watches by a hook or replaces; use one of torch's, drop the hooks, or {fix}"
        )


_BY_UNIT = {"setting": "offload=parameters", "fix": "drop offload=parameters"}


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook, or a replaced `step`, hears of the calls."""
    every = dict.fromkeys([optimizer, *inner_optimizers(optimizer)])
    return any(has_other_step(each) or has_step_hooks(each) for each in every)


def has_other_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of this very optimizer was replaced."""
    replaced = vars(optimizer).get("step")
    return replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched")  # which only counts


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes, with few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def follow(master: Tensor, weight: Tensor) -> None:
    """Give a master the elements of a weight that are not those which it was rounded to."""
    is_same = master.to(weight.dtype) == weight
    master.copy_(torch.where(is_same, master.detach(), weight.detach().to(master.dtype)))


def state_tensors(optimizer: torch.optim.Optimizer, updated: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(updated, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
