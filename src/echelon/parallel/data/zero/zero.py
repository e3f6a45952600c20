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

Units that lie in host memory (`HostPlace`, offload=parameters) are fetched for a use at any level; without
ranks that shard a copy, a level is about gradients alone.

Where units are updated in the backward pass, each part of a gradient is used and freed as soon as it is
summed, and no level keeps gradients: level 1 is then like level 2, but for the microbatches before the last.

Ranks must issue their messages in the same order. Units are therefore reduced in one agreed order: first the
reverse of the model's, then, from the second step on, the order in which rank 0 saw them completed.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

from torch import Tensor, nn

from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import ParameterSet, Unit
from echelon.parallel.data.reducer import Reducer, UsedParameters
from echelon.parallel.data.sharing import Problem, Sharing, Storages, local_gradients
from echelon.parallel.data.zero.flat import FlatUnit, UnitOwner
from echelon.parallel.data.zero.gradient_sums import GradientSums, UnitGradient, preallocate
from echelon.parallel.data.zero.host_weights import HostPlace, HostRun, HostUnit, flatten
from echelon.parallel.data.zero.residency import (
    GatherAgreement,
    Residency,
    check_same_units,
    explain_mismatch,
)
from echelon.parallel.data.zero.units import backward_order, find_root
from echelon.parallel.data.zero.uses import UnitUses, common_placement
from echelon.parallel.data.zero.weight_views import lost_change
from echelon.state.ownership import LocalParameter, OwnedSlice, Slice, own_run, run_slices, whole_slice


@final
class Zero(Sharing, UnitOwner):
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
        sums, since all ranks are in the same one. `contiguous`: gradients that are summed lie in preallocated
        memory. `host`: where weights are kept that the device has only while they are used."""
        assert level in (1, 2, 3), level
        units, self._group = list(parameter_set.units), parameter_set.group
        moves = level == 3 or host is not None  # whether weights leave the device between uses
        check_same_units(units, prefetch if moves else 0, self._group, parameter_set.device)
        super().__init__(parameter_set)
        self._level, self._prefetch, self._in_backward = level, prefetch, in_backward
        self._shard_group, self._copies_group = parameter_set.shard_groups
        self.lockstep = level > 1
        self._keeps_gradients = level == 1 and not in_backward
        self._updates_on_host = host is not None and host.updates
        # A single rank that shards a copy has nothing to gather from others: its units come from the host.
        self._gathers = level == 3 and (host is None or self._shard_group.size > 1)
        self._make_units(units, host)
        self._make_residency(units, wrapping, moves=moves, stores=host is not None and in_backward)
        order = backward_order(units) if in_backward else list(reversed(range(len(units))))
        self._reduced = [flat for index in order for flat in self._units[index] if flat.trainable]
        if contiguous and level > 1:
            preallocate([flat.gradient for flat in self._reduced])
        self._local = [(flat, local) for flat in self._reduced for local in flat.local_parameters()]
        self.reducer: Reducer = Reducer([p for _, p in parameter_set.trained], self._accumulate, self._reduce)
        self.accumulation = self.reducer.accumulation if level == 1 else None
        self._order(self._reduced)
        self._is_order_learned = self._is_last_backward = False
        self._used: dict[FlatUnit, UsedParameters] = {}
        self._sums = GradientSums(
            parameter_set.shard_groups,
            in_place=self._keeps_gradients,
            waits=waits or level > 1,
            waits_for_second=waits and in_backward,
            on_sum=self._use if in_backward else None,
        )
        self._problems: dict[Problem, Tensor] = {}

    def _make_units(self, units: Sequence[Unit], host: HostPlace | None) -> None:
        separate = self.parameter_set.separate_shards
        self._units = [
            flatten(unit, self._shard_group, separate, self._gathers, host, self) for unit in units
        ]
        self._flats = {flat: index for index, unit in enumerate(self._units) for flat in unit}
        self._flat_of_local = {each.tensor: flat for flat in self._flats for each in flat.local_parameters()}
        self._flat_of_gradient = {flat.gradient: flat for flat in self._flats}
        self._host_units = [flat for flat in self._flats if isinstance(flat, HostUnit)]
        if host is not None:
            host.boundary.account("parameters", lambda: [unit.host.memory for unit in self._host_units])

    def _make_residency(
        self, units: Sequence[Unit], wrapping: Wrapping, *, moves: bool, stores: bool
    ) -> None:
        """Gather units when they are used, where they leave the device in between."""
        self._agreement = None
        if self._gathers:
            names = [unit.name for unit in units]
            device = self.parameter_set.device
            self._agreement = GatherAgreement(self._shard_group, self._group, names, device)
        needs, ledger, root = [unit.needs for unit in units], self._group.ledger, find_root(units)
        self.residency = Residency(
            self._units, needs, self._prefetch, ledger, root, self._agreement, stores=stores
        )
        self._uses = None
        if moves:
            self._uses = UnitUses(units, self._units, self.residency, self._agreement, wrapping)

    # A step, in the order in which a stage calls these.

    def start_step(self) -> None:
        super().start_step()
        # What a step that failed half-way has left: messages in flight would meet those of this step.
        self._sums.drop()
        while self._used:
            self._used.popitem()[1].wait()
        self.reducer.start_step()
        self.awaits_last = False
        if self._uses is not None:
            self._uses.start_step()
            self.residency.reset()
            for flat in self._flats:
                flat.drop()
                flat.start_step()
        for flat in self._reduced:
            flat.gradient.start_step(keeps_memory=self._keeps_gradients)

    def gather(self, *, backward: bool) -> None:
        if self._uses is not None:
            self._uses.start_pass(backward=backward)

    def free(self) -> None:
        if self._uses is not None:
            self._uses.finish_pass()

    def second_run(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self._uses is None else self._uses.second_run(module)

    def start_backward(self, *, last: bool) -> None:
        self._is_last_backward = last
        # Copies of shards sum their parts after the last one.
        self.awaits_last = self._level > 1 and self._copies_group.size > 1 and not last
        self.reducer.start_backward(reducing=last or self._level > 1)

    def finish_backward(self) -> None:
        if self._uses is not None:
            self._uses.finish_backward()
        self.reducer.flush()

    def abandon_pass(self) -> None:
        if self._uses is not None:
            self._uses.abandon_pass()

    def reduce(self) -> None:
        self.start_reductions()
        # Behind the gradients, so that ranks wait once for both.
        exchange = None if self._in_backward else self.reducer.exchange_used(self._group)
        with explain_mismatch():
            self._sums.complete()
            self._problems = self.residency.compare(self._shard_group) if self._gathers else {}
        if self._host_units:  # no pass follows in this step: units need the memory for their update
            self.residency.reset()
        used = set() if exchange is None else exchange.wait()
        self.reducer.finish_step()
        if self._in_backward:
            return
        for flat, local in self._local:
            local.tensor.grad = flat.part_of_gradient(local) if local.parameter in used else None

    def problems(self) -> dict[Problem, Tensor]:
        return self._problems

    def _norm_share(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        # The ranks that hold the same part have the same gradients: each takes a piece of every one.
        gradients = super()._norm_share(local)
        copies = self._copies_group
        pieces = [gradient.flatten().tensor_split(copies.size)[copies.rank] for gradient in gradients]
        return [piece for piece in pieces if piece.numel()]

    def publish(self) -> None:
        if self._uses is not None:
            self.residency.reset()  # what was gathered ahead and not used holds the weights of before
        if self._agreement is not None:
            self._agreement.close()
        # In the order of their updates: on a host the later ones go on while ranks share the earlier ones.
        updated = self._reduced if self._in_backward else sorted(self._reduced, key=self._flats.__getitem__)
        self._share_resident([flat for flat in updated if flat.resident])
        if self._updates_on_host:
            self._share_offloaded([flat for flat in updated if isinstance(flat, HostUnit)])
        if self._in_backward:
            for _, local in self._local:
                local.tensor.grad = None
        if not self._is_order_learned and self._reduced:
            self._is_order_learned = True
            self._order([self._reduced[place] for place in self.reducer.agreed_group_order(self._group)])

    # Gradients, in one agreed order.

    def _order(self, flats: list[FlatUnit]) -> None:
        self._reduced = flats
        self._flat_of = {p: flat for flat in flats for _, p in flat.parameters}
        self.reducer.regroup([[p for _, p in flat.parameters] for flat in flats])

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self._flat_of[parameter].gradient.accumulate(parameter)

    def _reduce(self, index: int) -> None:
        flat = self._reduced[index]
        if self._agreement is not None:
            self._agreement.reduce(self._flats[flat])
        if self._in_backward and self._is_last_backward:
            self._used[flat] = self.reducer.exchange_used(self._group, flat.gradient.parameters)
        with explain_mismatch():
            is_last = self._is_last_backward
            overlaps = not is_last or self.reducer.overlaps(index)
            self._sums.start(flat.gradient, last=is_last, overlaps=overlaps)
        if self._uses is not None:
            self._uses.end_reduced(flat, self._reduced[index + 1 :])

    def _use(self, gradient: UnitGradient) -> None:
        """The gradient of a unit is summed: update this rank's part of it."""
        flat = self._flat_of_gradient[gradient]
        # These flags were sent before the gradient, which is summed: they are there by now.
        used = self._used.pop(flat).wait()
        for local in flat.local_parameters():
            local.tensor.grad = flat.part_of_gradient(local) if local.parameter in used else None
        flat.start_update()  # before the update writes to what passes have read
        self._use_unit(flat.local_parameters(), partial(self._present, flat))
        gradient.free_part()
        flat.mark_updated(used)

    # Weights.

    def local_parameters(self) -> list[LocalParameter]:
        return [local for _, local in self._local]

    def kept_whole(self) -> list[LocalParameter]:
        is_alone = self._shard_group.size == 1  # else parts are gathered, and waited for before that
        return [local for flat, local in self._local if is_alone and flat.resident]

    def resident_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters that are whole on every rank at all times, because ranks gather them."""
        if self._shard_group.size == 1:
            return []
        return [each for flat in self._reduced if flat.resident for each in flat.parameters]

    def first_weights(self) -> list[OwnedSlice]:
        return self.owned()

    def share_first_weights(self) -> None:
        self._share_offloaded(self._host_units)
        self._share_resident([flat for flat in self._flats if flat.resident])

    def _share_resident(self, flats: Sequence[FlatUnit]) -> None:
        """Bring new parts of weights that stay whole to all ranks."""
        if self._shard_group.size > 1:
            with self._group.ledger.about("parameters"):
                for flat in flats:
                    flat.all_gather(overlaps=False)
                for flat in flats:
                    flat.synchronize()

    def _share_offloaded(self, units: Sequence[HostUnit]) -> None:
        """Bring new parts of weights that are whole in host memory to all ranks."""
        if self._shard_group.size > 1 and not self._gathers:
            for _ in self._one_by_one(units):
                pass  # each is put back whole

    def owned(self) -> list[OwnedSlice]:
        self.wait_for_weights(self.local_parameters())
        owned = [
            piece
            for flat in self._flats
            for local in flat.local_parameters()
            for piece in own_run(flat.stored_values(local), self.slices(local))
        ]
        in_flats = {p for flat in self._flats for _, p in flat.parameters}
        for name, parameter in self.parameter_set.parameters.items():
            if parameter.numel() == 0 or parameter not in in_flats:
                owned.append(OwnedSlice(whole_slice(name, parameter), parameter))
        return owned

    def slices(self, local: LocalParameter) -> list[Slice]:
        shape = tuple(local.parameter.shape)
        return run_slices(local.name, shape, local.begin, local.begin + local.tensor.numel())

    def storages(self) -> Storages:
        parameters = [tensor for flat in self._flats for tensor in (flat.flat, flat.shard)]
        parameters += self.parameter_set.parameters.values()
        gradients = [tensor for flat in self._flats for tensor in flat.gradient.storages()]
        gradients += [tensor for flat in self._reduced[:1] for tensor in flat.gradient.preallocated()]
        waiting = local_gradients(self.local_parameters())  # for other sums, outside of the parts
        return Storages(parameters, [*gradients, *self._sums.storages(), *waiting])

    def take_over(self, changed: Set[nn.Parameter]) -> None:
        for flat in self._reduced:
            if flat.resident and not changed.isdisjoint(flat.gradient.parameters):
                flat.take_over()

    def end_watch(self) -> None:
        if self._uses is not None:
            changed = {flat: names for flat in self._flats if (names := flat.finish_watch())}
            if changed:
                names = [name for names in changed.values() for name in names]
                raise lost_change(names, common_placement(changed))

    def reallocate(self) -> None:
        assert self._uses is None, "weights that leave the device have no memory of their own"
        for flat in self._reduced:
            flat.reallocate()

    def close(self) -> None:
        self.reducer.close()
        if self._uses is not None:
            self._uses.close()
        for flat in self._flats:
            flat.close()
        super().close()

    def read_unit(self, unit: FlatUnit) -> None:
        if self._uses is not None:
            self._uses.read(unit)

    def store_unit(self, unit: FlatUnit) -> None:
        self.residency.store(unit)

    # Weights in host memory, during an update.

    def stored_values(self, local: LocalParameter) -> Tensor:
        return self._flat_of_local[local.tensor].stored_values(local)

    def host_run(self, local: LocalParameter) -> HostRun | None:
        flat = self._flat_of_local[local.tensor]
        return flat.host_run(local) if isinstance(flat, HostUnit) else None

    def pieces_to_update(self) -> Iterator[list[LocalParameter]]:
        waiting = self.parameter_set.summed_later
        flats = [
            flat
            for flat in self._flats
            if flat.trainable and (not self._in_backward or not waiting.isdisjoint(flat.gradient.parameters))
        ]
        for flat in self._one_by_one(flats):
            yield flat.local_parameters()

    def _one_by_one(self, flats: Sequence[FlatUnit]) -> Iterator[FlatUnit]:
        """Each is on the device until the next is asked for, which is fetched meanwhile."""
        for place, flat in enumerate(flats):
            with self._group.ledger.about("parameters"):
                for following in flats[place : place + 1 + self._prefetch]:
                    following.fetch()
            with self._present(flat):
                yield flat

    @contextmanager
    def _present(self, flat: FlatUnit) -> Iterator[None]:
        """Inside, what this rank updates of a unit is on the device; what is written stays."""
        with self._group.ledger.about("parameters"):
            flat.bring()
        yield
        with self._group.ledger.about("parameters"):
            flat.put_back()
