"""ZeRO 1, 2, 3: replicas that share out what each of them would otherwise hold again.

    level   weights       gradients           optimizer state     moved a step (Ψ parameters)
    1       whole         whole, then part    part                reduce-scatter Ψ + all-gather Ψ
    2       whole         part                part                the same
    3       part          part                part                all-gather 2Ψ + reduce-scatter Ψ

Level 3 (what FSDP does) makes a unit whole just before it is used, in the forward pass and again in the
backward pass, and frees it right after; the next units are gathered meanwhile (`prefetch`). Levels 2 and 3
reduce a unit's gradient as soon as the backward pass has completed it, so that only a few are ever whole.

Ranks must issue their messages in the same order. Units are therefore reduced in one agreed order: first the
reverse of the model's, then, from the second step on, the order in which replica 0 saw them completed.
"""

from collections import deque
from collections.abc import Set
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.data_parallel.adding import add_in_place
from echelon.data_parallel.buffers import Buffers, broadcast
from echelon.data_parallel.flat import FlatUnit
from echelon.data_parallel.reducer import Reducer
from echelon.data_parallel.residency import Residency
from echelon.data_parallel.sync import NOTHING, Storages, Sync, held_gradients
from echelon.data_parallel.units import Cut, UnitPlan
from echelon.data_parallel.uses import Use, UseHooks
from echelon.errors import UserError
from echelon.ownership import Held, Owned, Slice, own_run, run_slices, whole_slice

_IN_FLIGHT = 1  # units whose gradients may be on the way while another is produced


class _Reduction(NamedTuple):
    """A unit's gradient on its way: `part` will hold this rank's part of the sum."""

    handle: Handle
    unit: FlatUnit
    part: Tensor


@final
class Zero(Sync):
    """Replicas along `group` that share out optimizer state, gradients (2) and weights (3)."""

    sharded = True

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        level: int,
        cut: Cut,
        *,
        prefetch: int = 1,
        alone: Set[nn.Parameter] = NOTHING,
    ) -> None:
        """Each parameter of `alone` is in parts of its own: others, who hold it too, have the same."""
        assert level in (1, 2, 3), level
        self._module, self._group, self._level = module, group, level
        self.lockstep = level > 1
        plans, self._needs = cut
        self._named = [(name, p) for plan in plans for name, p in plan.parameters]
        with group.ledger.about("parameters"):
            self._flats = [_flatten(plan, group, level, alone) for plan in plans]
            for _, parameter in self._named:
                if level < 3 and not parameter.requires_grad:
                    broadcast(parameter, group)
        self._buffers = Buffers(module, group)
        root = len(plans) - 1 if plans[-1].module is module else None
        self.residency = Residency(self._flats, self._needs, prefetch, group.ledger, root)
        self.residency.reset()
        self._reduced = [flat for unit in reversed(self._flats) for flat in unit if flat.trainable]
        self._held = [(flat, held) for flat in self._reduced for held in flat.held()]
        if level == 3:  # before the reducer, which may let go of a unit when its last gradient is there
            self._watch_weights()
        self._reducer = Reducer(self.parameters(), self._land, self._reduce)
        self._order(self._reduced)
        self._observed = False
        self._in_flight: deque[_Reduction] = deque()
        self._uses: list[Use] = []
        if level > 1:
            self._hooks = UseHooks([plan.module for plan in plans], self._enter, self._leave, self._returned)

    # What the engine asks.

    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self._named if p.requires_grad]

    def held(self) -> list[Held]:
        return [held for _, held in self._held]

    def start_step(self) -> None:
        self._complete(0)  # what a step that failed half-way has left
        self._end_uses()
        self._reducer.start_step()
        self.residency.reset()
        for flat in self._reduced:
            if self._level == 1:
                flat.open_gradient()
            else:
                flat.drop_gradient()
            flat.has_part = False

    def start_backward(self, *, last: bool) -> None:
        self._reducer.start_backward(reducing=last or self._level > 1)

    def finish_backward(self) -> None:
        self._end_uses()
        self._reducer.flush()

    def finish_gradients(self) -> None:
        if not self._reducer.all_reduced:  # a replica without samples has had no backward pass
            self.start_backward(last=True)
            self.finish_backward()
        self._complete(0)
        self.residency.check_agreement(self._group)
        used = self._reducer.used_anywhere(self._group)
        self._reducer.finish_step()
        for flat, held in self._held:
            held.tensor.grad = flat.part_of_gradient(held) if held.parameter in used else None

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        return held_gradients(self.held(), without)

    def finish_step(self) -> None:
        self.residency.reset()  # what was gathered ahead and not used holds the weights of before
        if self._level < 3:
            with self._group.ledger.about("parameters"):
                for flat in self._reduced:
                    flat.spread()
                for flat in self._reduced:
                    flat.settle()
        self._buffers.share()
        if not self._observed and self._reduced:
            self._observed = True
            self._order(self._by_arrival())

    def owned(self) -> list[Owned]:
        owned: list[Owned] = []
        for unit in self._flats:
            for held in (held for flat in unit for held in flat.held()):
                owned += own_run(held.tensor, self.slices(held))
        if self._level < 3:
            frozen = [(name, p) for name, p in self._named if not p.requires_grad]
            owned += [Owned(whole_slice(name, p, ("data",)), p) for name, p in frozen]
        return owned

    def slices(self, held: Held) -> list[Slice]:
        shape = tuple(held.parameter.shape)
        return run_slices(held.name, shape, held.begin, held.begin + held.tensor.numel())

    def storages(self) -> Storages:
        flats = [flat for unit in self._flats for flat in unit]
        parameters = [tensor for flat in flats for tensor in (flat.flat, flat.shard)]
        parameters += [p for _, p in self._named]
        gradients = [tensor for flat in flats for tensor in (flat.gradient, flat.part) if tensor is not None]
        return Storages(parameters, gradients)

    def add_in_place(self) -> None:
        if self._level == 1:  # the others give every gradient away at once
            add_in_place(self._module, self._reducer.adding)

    def gather(self, *, backward: bool) -> None:
        if self._level == 3:
            self.residency.ahead(backward=backward)

    def free(self) -> None:
        self.residency.free_unused()

    def renew(self) -> None:
        assert self._level < 3, "weights that come and go have no memory of their own"
        for flat in self._reduced:
            flat.renew()

    # Gradients, in one agreed order.

    def _order(self, flats: list[FlatUnit]) -> None:
        self._reduced = flats
        self._flat_of = {p: flat for flat in flats for _, p in flat.parameters}
        self._reducer.regroup([[p for _, p in flat.parameters] for flat in flats])

    def _by_arrival(self) -> list[FlatUnit]:
        """Units in the order in which the last of their gradients came."""
        of = {p: flat for flat in self._reduced for _, p in flat.parameters}
        last_first = [of[p] for p in reversed(self._reducer.agreed_order(self._group))]
        return list(reversed(dict.fromkeys(last_first)))

    def _land(self, parameter: nn.Parameter) -> None:
        self._flat_of[parameter].land(parameter)

    def _reduce(self, index: int) -> None:
        flat = self._reduced[index]
        gradient = flat.close_gradient() if self._level == 1 else flat.take_gradient()
        part = flat.new_part(in_place=self._level == 1)
        with self._group.ledger.about("gradients"):
            handle = self._group.reduce_scatter(part, gradient, wait=False)
        self._in_flight.append(_Reduction(handle, flat, part))
        if self._level > 1:  # at level 1 a sum is made in place, so waiting for it would save no memory
            self._complete(_IN_FLIGHT)
        for use in self._uses:  # the embedding of tokens: no input tells that it is through
            if not use.watched and flat in self._flats[use.unit] and self._all_reduced(use.unit, index):
                self._hooks.end_backward(use)

    def _all_reduced(self, unit: int, index: int) -> bool:
        """Whether all of a unit is among what was reduced up to number `index`."""
        later = self._reduced[index + 1 :]
        return not any(flat in later for flat in self._flats[unit])

    def _complete(self, at_most: int) -> None:
        """Wait until `at_most` reductions are on the way."""
        while len(self._in_flight) > at_most:
            reduction = self._in_flight.popleft()
            reduction.handle.wait()
            reduction.unit.add_part(reduction.part)

    # Uses of units, where the weights or the memory of gradients come and go.

    def _enter(self, use: Use, backward: bool) -> None:
        if self._level == 3 and backward and torch.is_grad_enabled():
            raise UserError(
                "zero=3 frees weights after the backward pass, and a backward pass through it "
                "(create_graph=True) would need them again; use zero=2"
            )
        if self._level == 3:
            self.residency.enter(use.unit, backward=backward)
        if backward:
            self._uses.append(use)

    def _leave(self, use: Use) -> None:
        if self._level == 3:
            self.residency.leave(use.unit)

    def _watch_weights(self) -> None:
        of = {p: flat for unit in self._flats for flat in unit for _, p in flat.parameters}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: _check_whole(of[p], p))

    def _returned(self, use: Use, tensor: Tensor) -> None:
        """A module has returned `tensor`: not a weight, which at level 3 is gone when the module is left."""
        storage = tensor.untyped_storage()._cdata
        owned = (flat for need in self._needs[use.unit] for flat in self._flats[need])
        if self._level == 3 and any(flat.flat.untyped_storage()._cdata == storage for flat in owned):
            raise UserError(
                "a module returns one of its own weights, or a view of one, and with zero=3 weights are "
                "freed when their module is left; return a clone, or use zero=2"
            )

    def _end_uses(self) -> None:
        for use in self._uses:
            self._hooks.end_backward(use)
        self._uses = []


def _check_whole(flat: FlatUnit, parameter: nn.Parameter) -> None:
    """A gradient that was computed while the weights were not there is wrong."""
    if not flat.whole:
        name = next(name for name, p in flat.parameters if p is parameter)
        raise UserError(
            f"{name} was used while it was not gathered: at zero=3 a weight is there only while the "
            "module that owns it runs; call that module instead of reading its weight, let its output "
            "hold tensors that torch can see, or use zero=2"
        )


def _flatten(plan: UnitPlan, group: Group, level: int, alone: Set[nn.Parameter]) -> list[FlatUnit]:
    """The memory of one unit: its trainable parameters and, where weights are shared out, its frozen ones;
    each kind and type of its own."""
    kinds: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in plan.parameters:
        if parameter.requires_grad or level == 3:
            own = name if parameter in alone else ""
            kind = (parameter.requires_grad, parameter.dtype, parameter.device, own)
            kinds.setdefault(kind, []).append((name, parameter))
    return [FlatUnit(plan.name, parameters, group, resident=level < 3) for parameters in kinds.values()]
