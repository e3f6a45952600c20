"""ZeRO 1, 2, 3: ranks that divide among them what each would otherwise hold again.

    level   weights       gradients           optimizer state     moved per step (Ψ parameters)
    1       whole         whole, then part    part                reduce-scatter Ψ + all-gather Ψ
    2       whole         part                part                the same
    3       part          part                part                all-gather 2Ψ + reduce-scatter Ψ

Level 3 (what FSDP does) gathers a unit just before it is used, in the forward pass and again in the backward
pass, and frees it right after; the next units are gathered meanwhile (`prefetch`). Levels 2 and 3 reduce a
unit's gradient as soon as the backward pass has completed it, so that only a few are ever whole.

Hybrid sharding (FSDP's HYBRID_SHARD, MiCS): the ranks of the set are divided into groups, each of which has
all parts among its ranks. Gathers and reduce-scatters stay inside a group, and the ranks with the same part
of different groups sum it (gradient_sums.py). What is about replicas is still asked of the whole set; which
units were gathered, of a group.

Where units are updated in the backward pass, each part of a gradient is used and freed as soon as it is
summed, and no level keeps gradients: level 1 is then like level 2, but for the microbatches before the last.

Ranks must issue their messages in the same order. Units are therefore reduced in one agreed order: first the
reverse of the model's, then, from the second step on, the order in which rank 0 saw them completed.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import ParameterSet, Unit
from echelon.parallel.data.reducer import Reducer, UsedParameters
from echelon.parallel.data.sharing import Problem, Sharing, Storages, local_gradients
from echelon.parallel.data.zero.comings import Comings, lost_change
from echelon.parallel.data.zero.flat import FlatUnit, UnitMemory
from echelon.parallel.data.zero.gradient_sums import GradientSums
from echelon.parallel.data.zero.host_weights import HostPlace, HostRun
from echelon.parallel.data.zero.residency import Residency
from echelon.parallel.data.zero.unit_agreement import GatherAgreement, check_same_units, explain_mismatch
from echelon.parallel.data.zero.units import backward_order, find_root
from echelon.parallel.data.zero.uses import Use, UseHooks
from echelon.state.ownership import LocalParameter, OwnedSlice, Slice, own_run, run_slices, whole_slice


@final
class Zero(Sharing):
    """Ranks that shard optimizer state, gradients (2) and weights (3) of a parameter set."""

    def __init__(
        self,
        parameter_set: ParameterSet,
        level: int,
        wrapping: Wrapping,
        *,
        prefetch: int = 1,
        in_backward: bool = False,
        waits: bool = True,
        contiguous: bool = False,
        host: HostPlace | None = None,
    ) -> None:
        """`in_backward`: units are updated in the backward pass. `waits`: a backward pass may wait for all
        sums, since all ranks are in the same one. `contiguous`: gradients on their way lie in preallocated
        memory. `host`: where weights stand that the device has only while they are used; without ranks that
        shard a copy, a level is about gradients alone."""
        assert level in (1, 2, 3), level
        units = list(parameter_set.units)
        self._host_updates = host is not None and host.updates
        self._moves = level == 3 or host is not None  # whether weights come and go
        self._prefetch = prefetch
        ahead = prefetch if self._moves else 0
        check_same_units(units, ahead, parameter_set.group, parameter_set.device)
        super().__init__(parameter_set)
        self._group, self._level = parameter_set.group, level
        self._shard_group, self._copies_group = parameter_set.shard_groups
        self.lockstep = level > 1
        self._needs = [unit.needs for unit in units]
        separate = parameter_set.separate_shards
        divided = level == 3 and (host is None or self._shard_group.size > 1)
        self._flats = [_flatten(unit, self._shard_group, separate, divided, host) for unit in units]
        self._gathers = divided  # ranks gather weights together
        self._agreement = GatherAgreement(
            self._shard_group, self._group, [unit.name for unit in units], parameter_set.device
        )
        if not self._gathers:
            self._agreement.close()
        self.residency = Residency(
            self._flats,
            self._needs,
            prefetch,
            self._group.ledger,
            find_root(units),
            self._agreement,
            stores=host is not None and in_backward,
        )
        order = backward_order(units) if in_backward else list(reversed(range(len(units))))
        self._reduced = [flat for index in order for flat in self._flats[index] if flat.trainable]
        if contiguous and level > 1:
            memory = UnitMemory.preallocated(self._reduced)
            for flat in self._reduced:
                flat.memory = memory
        self._local = [(flat, local) for flat in self._reduced for local in flat.local_parameters()]
        # Before the reducer's, which may let go of a unit when its last gradient is there.
        self._checks = self._check_weights() if self._moves else []
        self.reducer: Reducer = Reducer([p for _, p in parameter_set.trained], self._accumulate, self._reduce)
        self.accumulation = self.reducer.accumulation if level == 1 else None
        self._order(self._reduced)
        self._observed = False
        self._keeps_gradients = level == 1 and not in_backward
        self._in_backward = in_backward
        self._used: dict[FlatUnit, UsedParameters] = {}
        self._sums = GradientSums(
            parameter_set.shard_groups,
            in_place=self._keeps_gradients,
            waits=waits or level > 1,
            waits_for_second=waits and in_backward,
            on_sum=self._use if in_backward else None,
        )
        self._is_last_backward = False
        self._uses: list[Use] = []
        self._problems: dict[Problem, Tensor] = {}
        self._unit_of = {flat: index for index, unit in enumerate(self._flats) for flat in unit}
        self._in_flats = {p for unit in self._flats for flat in unit for _, p in flat.parameters}
        self._in_pass = False
        self._flat_of_local = {
            each.tensor: flat for flat in self._unit_of for each in flat.local_parameters()
        }
        if host is not None:
            host.boundary.account("parameters", self._in_host_memory)
        for flat in self._unit_of:
            flat.before_gather = lambda local: self.wait_for_weights(local)
        if self._moves:
            for flat in self._unit_of:
                flat.on_read = self._read
            modules = [unit.module for unit in units]
            self._hooks = UseHooks(modules, wrapping, self._enter, self._leave, self._returned)

    # What a stage asks.

    def local_parameters(self) -> list[LocalParameter]:
        return [local for _, local in self._local]

    def kept_whole(self) -> list[LocalParameter]:
        is_alone = self._shard_group.size == 1  # else parts are gathered, and waited for before that
        return [local for flat, local in self._local if is_alone and flat.resident]

    def start_step(self) -> None:
        super().start_step()
        self._sums.drop()  # what a step that failed half-way has left
        while self._used:
            self._used.popitem()[1].wait()
        self._end_uses()
        self._in_pass = False
        self.reducer.start_step()
        self.residency.reset()
        for flat in self._unit_of:
            flat.drop()
            flat.forget_changes()
        for flat in self._reduced:
            if self._keeps_gradients:
                flat.open_gradient()
            else:
                flat.drop_gradient()
            flat.has_part = False

    def start_backward(self, *, last: bool) -> None:
        self._is_last_backward = last
        self.reducer.start_backward(reducing=last or self._level > 1)

    def finish_backward(self) -> None:
        self._end_uses()
        self.reducer.flush()

    def reduce(self) -> None:
        self.start_reductions()
        with explain_mismatch():
            self._sums.complete()
            self._problems = self.residency.compare(self._shard_group) if self._gathers else {}
        self._make_room()
        if self._in_backward:
            self.reducer.finish_step()
            return
        used = self.reducer.used_anywhere(self._group)
        self.reducer.finish_step()
        for flat, local in self._local:
            local.tensor.grad = flat.part_of_gradient(local) if local.parameter in used else None

    def problems(self) -> dict[Problem, Tensor]:
        return self._problems

    def norm_share(self) -> list[Tensor]:
        return self._norm_share(self.local_parameters())

    def _norm_share(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        # The ranks that hold the same part have the same gradients: each takes a piece of every one.
        gradients = super()._norm_share(local)
        copies = self._copies_group
        pieces = [gradient.flatten().tensor_split(copies.size)[copies.rank] for gradient in gradients]
        return [piece for piece in pieces if piece.numel()]

    def publish(self) -> None:
        self.residency.reset()  # what was gathered ahead and not used holds the weights of before
        self._agreement.close()
        self._share_parts([flat for flat in self._reduced if flat.resident])
        if self._host_updates:
            self._share_standing([flat for flat in self._unit_of if flat.trainable])
        if self._in_backward:
            for _, local in self._local:
                local.tensor.grad = None
        if not self._observed and self._reduced:
            self._observed = True
            self._order(self._by_arrival())

    def first_weights(self) -> list[OwnedSlice]:
        return self.owned()

    def share_first_weights(self) -> None:
        self._share_standing(list(self._unit_of))
        self._share_parts([flat for flat in self._unit_of if flat.resident])

    def _share_standing(self, flats: Sequence[FlatUnit]) -> None:
        """Bring new parts of weights that stand whole in host memory to all ranks."""
        if self._shard_group.size > 1 and not self._gathers:
            for _ in self._one_by_one([flat for flat in flats if flat.host is not None]):
                pass  # each is put back whole

    def _share_parts(self, resident: Sequence[FlatUnit]) -> None:
        """Bring new parts of weights that stay whole to all ranks."""
        if self._shard_group.size > 1:
            with self._group.ledger.about("parameters"):
                for flat in resident:
                    flat.all_gather()
                for flat in resident:
                    flat.synchronize()

    def owned(self) -> list[OwnedSlice]:
        self.wait_for_weights(self.local_parameters())
        owned: list[OwnedSlice] = []
        for unit in self._flats:
            for flat in unit:
                for local in flat.local_parameters():
                    owned += own_run(flat.standing(local), self.slices(local))
        for name, parameter in self.parameter_set.parameters.items():
            if parameter.numel() == 0 or parameter not in self._in_flats:
                owned.append(OwnedSlice(whole_slice(name, parameter), parameter))
        return owned

    def slices(self, local: LocalParameter) -> list[Slice]:
        shape = tuple(local.parameter.shape)
        return run_slices(local.name, shape, local.begin, local.begin + local.tensor.numel())

    def storages(self) -> Storages:
        flats = [flat for unit in self._flats for flat in unit]
        parameters = [tensor for flat in flats for tensor in (flat.flat, flat.shard)]
        parameters += self.parameter_set.parameters.values()
        gradients = [tensor for flat in flats for tensor in (flat.gradient, flat.part) if tensor is not None]
        gradients += [tensor for flat in self._reduced[:1] for tensor in flat.memory.storages()]
        waiting = local_gradients(self.local_parameters())  # for other sums, outside of the parts
        return Storages(parameters, [*gradients, *self._sums.storages(), *waiting])

    def gather(self, *, backward: bool) -> None:
        if self._moves:
            self._in_pass = True
            self.residency.ahead(backward=backward)

    def free(self) -> None:
        self._in_pass = False
        self._agreement.finish_pass()
        with explain_mismatch():
            if torch.is_grad_enabled():
                self.residency.free_unused()
            else:
                self.residency.release()

    @contextmanager
    def second_run(self, module: nn.Module) -> Iterator[None]:
        unit = self._hooks.unit_of(module) if self._moves else None
        if unit is None:
            yield
            return
        with explain_mismatch():
            self.residency.enter_again(unit)
        try:
            yield
        finally:
            self.residency.leave(unit)

    def abandon_pass(self) -> None:
        self._in_pass = False
        self._uses = []
        self.residency.abandon()

    def take_over(self, changed: Set[nn.Parameter]) -> None:
        for flat in self._reduced:
            if flat.resident and not changed.isdisjoint(_parameters(flat)):
                flat.move_back()

    def end_watch(self) -> None:
        if self._moves:
            changed = {flat: names for flat in self._unit_of if (names := flat.end_watch())}
            if changed:
                raise lost_change(
                    [name for names in changed.values() for name in names], self._comings(changed)
                )

    def reallocate(self) -> None:
        assert not self._moves, "weights that come and go have no memory of their own"
        for flat in self._reduced:
            flat.reallocate()

    # Weights that stand in host memory, during an update.

    def standing(self, local: LocalParameter) -> Tensor:
        return self._flat_of_local[local.tensor].standing(local)

    def resident_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters that are whole on every rank at all times, because ranks gather them."""
        if self._shard_group.size == 1:
            return []
        return [each for flat in self._reduced if flat.resident for each in flat.parameters]

    def host_run(self, local: LocalParameter) -> HostRun | None:
        return self._flat_of_local[local.tensor].host_run(local)

    @contextmanager
    def _present(self, flat: FlatUnit) -> Iterator[None]:
        """Inside, what this rank updates of a unit is on the device; what is written stays."""
        with self._group.ledger.about("parameters"):
            flat.bring()
        yield
        with self._group.ledger.about("parameters"):
            flat.put_back()

    def in_turn(self) -> Iterator[list[LocalParameter]]:
        waiting = self.parameter_set.summed_later
        flats = [
            flat
            for flat in self._unit_of
            if flat.trainable and (not self._in_backward or not waiting.isdisjoint(_parameters(flat)))
        ]
        for flat in self._one_by_one(flats):
            yield flat.local_parameters()

    def _one_by_one(self, flats: Sequence[FlatUnit]) -> Iterator[FlatUnit]:
        """Each is on the device until the next is asked for, which is on its way meanwhile."""
        for place, flat in enumerate(flats):
            with self._group.ledger.about("parameters"):
                for following in flats[place : place + 1 + self._prefetch]:
                    following.fetch()
            with self._present(flat):
                yield flat

    def _make_room(self) -> None:
        """No pass follows in this step: units that stand in host memory come for their update next."""
        if any(flat.host is not None for flat in self._unit_of):
            self.residency.reset()

    def _in_host_memory(self) -> list[Tensor]:
        return [flat.host.memory for flat in self._unit_of if flat.host is not None]

    def close(self) -> None:
        self.reducer.close()
        for check in self._checks:
            check.remove()
        for unit in self._flats:
            for flat in unit:
                flat.on_read = None
                if flat.host is not None:
                    flat.host.close()
        super().close()

    # Gradients, in one agreed order.

    def _order(self, flats: list[FlatUnit]) -> None:
        self._reduced = flats
        self._flat_of = {p: flat for flat in flats for _, p in flat.parameters}
        self.reducer.regroup([[p for _, p in flat.parameters] for flat in flats])

    def _by_arrival(self) -> list[FlatUnit]:
        """Units in the order in which the last of their gradients came."""
        last_first = [self._flat_of[p] for p in reversed(self.reducer.agreed_order(self._group))]
        return list(reversed(dict.fromkeys(last_first)))

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self._flat_of[parameter].accumulate(parameter)

    def _reduce(self, index: int) -> None:
        flat = self._reduced[index]
        self._agreement.reduce(self._unit_of[flat])
        if self._in_backward and self._is_last_backward:
            self._used[flat] = self.reducer.exchange_used([p for _, p in flat.parameters], self._group)
        with explain_mismatch():
            self._sums.start(flat, last=self._is_last_backward)
        for use in self._uses:  # the embedding of tokens: no input says that it is through
            if not use.watched and flat in self._flats[use.unit] and self._all_reduced(use.unit, index):
                self._hooks.end_backward(use)

    def _use(self, flat: FlatUnit) -> None:
        """The gradient of a unit is summed: update this rank's part of it."""
        used = self._used.pop(flat).wait()
        for local in flat.local_parameters():
            local.tensor.grad = flat.part_of_gradient(local) if local.parameter in used else None
        flat.start_update()
        self._use_unit(flat.local_parameters(), partial(self._present, flat))
        flat.free_part()
        flat.mark_updated()

    def _all_reduced(self, unit: int, index: int) -> bool:
        """Whether all of a unit is among what was reduced up to number `index`."""
        later = self._reduced[index + 1 :]
        return not any(flat in later for flat in self._flats[unit])

    # Uses of units, where weights come and go.

    def _enter(self, use: Use, backward: bool) -> None:
        if backward and torch.is_grad_enabled():
            comings = self._comings(self._unit_of)
            raise UserError(
                f"with {comings} weights are freed after the backward pass, and a backward pass through it "
                f"(create_graph=True) would need them again; {comings.way_out}"
            )
        with explain_mismatch():
            self.residency.enter(use.unit, backward=backward)
        if backward:
            self._uses.append(use)

    def _comings(self, flats: Iterable[FlatUnit]) -> Comings:
        """Why some of these units come and go."""
        each = [flat.comings for flat in flats]
        return Comings(any(one.gathers for one in each), any(one.fetches for one in each))

    def _leave(self, use: Use) -> None:
        self.residency.leave(use.unit)

    def _check_weights(self) -> list[torch.utils.hooks.RemovableHandle]:
        flat_of = {p: flat for unit in self._flats for flat in unit for _, p in flat.parameters}
        return [
            parameter.register_post_accumulate_grad_hook(lambda p: _check_gathered(flat_of[p], p))
            for _, parameter in self.parameter_set.trained
        ]

    def _read(self, flat: FlatUnit) -> None:
        """A weight is read outside of the module that owns it; during a step all ranks read it alike."""
        if self._in_pass or self.residency.in_use:
            self.residency.hold(self._unit_of[flat])

    def _returned(self, use: Use, tensor: Tensor) -> None:
        """A module has returned `tensor`: if it is a weight, or a view of one, the weight is still needed."""
        if tensor.layout != torch.strided:  # has no storage, and is no view of a weight
            return
        storage = tensor.untyped_storage()._cdata
        for need in self._needs[use.unit]:
            if any(flat.flat.untyped_storage()._cdata == storage for flat in self._flats[need]):
                self.residency.hold(need)

    def _end_uses(self) -> None:
        for use in self._uses:
            self._hooks.end_backward(use)
        self._uses = []


def _check_gathered(flat: FlatUnit, parameter: Tensor) -> None:
    """A gradient that was computed while the weights were not there is wrong."""
    if not flat.is_gathered:
        name = next(name for name, p in flat.parameters if p is parameter)
        raise UserError(
            f"{name} was used while it was not gathered: with {flat.comings} a weight is there only while "
            "the module that owns it runs; call that module instead of reading its weight, let its output "
            f"hold tensors that torch can see, or {flat.comings.way_out}"
        )


def _parameters(flat: FlatUnit) -> Set[nn.Parameter]:
    return {parameter for _, parameter in flat.parameters}


def _flatten(
    unit: Unit, group: Group, separate: Set[nn.Parameter], divided: bool, host: HostPlace | None
) -> list[FlatUnit]:
    """The memory of one unit: its trained parameters and, where weights come and go, its frozen ones;
    for each kind and type of its own. A parameter of `separate` is sharded by itself. `divided`: each rank
    has a part of the weights."""
    kinds: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in unit.parameters:
        if parameter.requires_grad or divided or host is not None:
            own = name if parameter in separate else ""
            kind = (parameter.requires_grad, parameter.dtype, parameter.device, own)
            kinds.setdefault(kind, []).append((name, parameter))
    flats = []
    for parameters in kinds.values():
        size = sum(p.numel() * p.element_size() for _, p in parameters)
        boundary = None if host is None else host.boundary_for(size // group.size if divided else size)
        flat = FlatUnit(
            unit.name,
            parameters,
            group,
            resident=not divided and boundary is None,
            boundary=boundary,
            whole_on_host=not divided and boundary is not None,
        )
        flat.free()  # before the next unit takes memory
        flats.append(flat)
    return flats
