"""The update that all replicas make together, in every step: one mean over the global batch."""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.agreement import check_on_every_rank
from echelon.errors import UserError
from echelon.parallel.data.gradients import squared_norm
from echelon.parallel.data.sharing import Problem, SingleReplica
from echelon.parallel.stage import LocalStages
from echelon.state.checkpoint.saved import SavedParameter, SavedState, numbers_of
from echelon.state.ownership import (
    LocalParameter,
    OwnedSlice,
    Slice,
    own_counter,
    own_run,
    own_state,
    whole_slice,
)
from echelon.update.averaging import WeightAverages
from echelon.update.numbers import (
    Counted,
    Flag,
    GateNumbers,
    Known,
    Number,
    RankNumbers,
    StepNumbers,
    add_calls,
    either,
    loss_and_count,
    rank_numbers,
    scale,
)
from echelon.update.optim.learning_rate import LearningRate
from echelon.update.precision.loss_scaling import LossScaling
from echelon.update.precision.stepper import Stepper
from echelon.update.unit_updates import UnitUpdates
from echelon.update.update import InWhole, Update


@final
class SynchronousUpdate(Update):
    """Every step waits for every replica: the mean over the global batch, then one optimizer step."""

    def __init__(
        self,
        stages: LocalStages,
        stepper: Stepper,
        group: Group,
        clip: float | None,
        *,
        everyone: Group,
        schedule: Callable[[int], float] | None = None,
        steady: bool = True,
        deferred: bool = False,
        in_backward: bool = False,
        loss_scaling: LossScaling | None = None,
        skips_nonfinite: bool = False,
        average: float | None = None,
    ) -> None:
        """`group`: the ranks whose numbers make one update; `everyone`: those that share the global batch.

        `steady`: all of them are at the same update, so that one's count tells of the next one's, and its
        overflow is everyone's. Elsewhere the runner collects overflows (`pop_overflows`).
        `deferred`: the numbers stay on the device until they are read. An update that is refused
        changes nothing, and only `numbers` tells.
        `in_backward`: units are updated in the backward pass, and `step` updates what is left.
        `skips_nonfinite`: an update whose loss or gradients are not finite changes nothing.
        `average`: the decay of an average of the weights.
        """
        self._stages, self.stepper, self._group, self._clip = stages, stepper, group, clip
        self._everyone, self._steady, self.deferred = everyone, steady, deferred
        self.loss_scaling, self._skips_nonfinite = loss_scaling, skips_nonfinite
        self._overflows: Number = 0.0  # updates that overflowed since the last `pop_overflows`
        self.optimizer = stepper.optimizer
        self._learning_rate = LearningRate(self.optimizer, schedule, by_step=steady)
        self._last_count: Number | None = None
        self._has_published = False
        self._digest = 0.0  # of what the user has done by hand since the last step
        self._refuses_next = False
        self.units = UnitUpdates(stages.sharings, stepper) if in_backward else None
        self.averages = None if average is None else WeightAverages(average, stages, stepper)
        is_alone = group.size == everyone.size == 1 and steady and not in_backward
        self.is_of_one_rank = (
            deferred
            and is_alone
            and loss_scaling is None
            and all(type(sharing) is SingleReplica for sharing in stages.sharings)
        )

    def set_learning_rate(self, step: int) -> None:
        self._learning_rate.set(step)

    def start_step(self) -> Number | None:
        self.stepper.start_step()
        self._loses_change = self.stepper.loses_change
        if self.stepper.undo_finish():
            self._share_weights()
        self._stages.start_step()
        if self.units is not None:
            self.units.start_step(self.number)
        return self._last_count

    def tie(self) -> None:
        self._stages.sum_tied_gradients()

    def numbers_of(self, tally: Tensor, counted: Counted | None) -> RankNumbers:
        square = squared_norm(self._stages.norm_share(), tally.device)
        return rank_numbers(tally, square, counted, self._clip, skips=self._skips_nonfinite)

    def norm(
        self,
        tally: Tensor,
        gates: GateNumbers | None = None,
        *,
        own: int | None = 0,
        known: Known | None = None,
    ) -> None:
        self._is_own = own is not None
        is_plain = gates is None and tally.dim() == 1 and self.is_of_one_rank
        if is_plain and not (self._refuses_next or self._loses_change or self._stages.has_problems()):
            self._digest = 0.0  # no other rank has another one
            self._take(known if isinstance(known, RankNumbers) else self.numbers_of(tally, known))
            return
        square = squared_norm(self._stages.norm_share(), tally.device)
        if self.units is not None:
            square = square + self.units.square(tally.device)
        flags, other_ways = self._stages.problem_flags(tally.device).split([len(Problem), 1])
        if self.took_other_way:
            other_ways += 1.0
        if self._loses_change:
            flags[list(Problem).index(Problem.LOST_CHANGE)] += 1.0
        # Zero over all ranks where they agree: the first one's as often as there are others.
        weight = self._group.size - 1 if self._group.rank == 0 else -1
        flag = weight * self._digest + (0.5 if self._refuses_next else 0.0)  # integers never cancel it
        if flag:
            flags[list(Problem).index(Problem.DIFFERENT_CHANGE)] += flag
        self._digest, self._refuses_next = 0.0, False
        of_gates = [] if gates is None else [gates.is_broken, gates.auxiliary.view(1)]
        summed = torch.cat([tally.flatten(), square.view(1), flags, *of_gates, other_ways])
        _sum(summed, self._group)
        summed, other_ways = summed[:-1], summed[-1:]
        last_count = summed[3 * (own or 0) + 1]
        if tally.dim() == 2:
            summed = _added(summed, len(tally))
        summed, auxiliary = (summed, summed[:0]) if gates is None else (summed[:-1], summed[-1:])
        gate_errors = None if gates is None else gates.errors
        if gates is not None and self._skips_nonfinite:
            summed, gate_errors = _with_gates(summed, auxiliary, len(gates.errors)), ()
        if self.units is not None:
            _flag_wrong_count(summed, self.units)
        rules = {"scaled": self.loss_scaling is not None, "skips": self._skips_nonfinite}
        if self.deferred:
            self._scaling = scale(summed, self._clip, **rules)
            self._count: Number = last_count
            found = [_on_device(each, summed) for each in self._found()]
            parts = [summed[:2], torch.stack(found), summed[4:], auxiliary, other_ways]
            values: Tensor | list[float] = torch.cat(parts)
        else:
            sums: list[float] = summed.tolist()
            self._scaling = scale(sums, self._clip, **rules)
            self._count = sums[1] if tally.dim() == 1 else float(last_count)
            values = [*sums[:2], *map(float, self._found()), *sums[4:]]
            values += [*auxiliary.tolist(), *other_ways.tolist()]
        self.numbers = StepNumbers(
            values, may_be_empty=not self._steady, gate_errors=gate_errors, tells_ways=True
        )

    def _take(self, found: RankNumbers) -> None:
        self._scaling, self._count = found.scaling, found.counted
        known = (*found.known, float(self.took_other_way))
        self.numbers = StepNumbers(found.values, known=known, tells_ways=True)

    def _found(self) -> tuple[Number, Number, Flag]:
        """Return the values of `StepNumbers` beside sums: norm, loss scale, whether the update is skipped."""
        return self._scaling.norm, self.loss_scale, either(self._scaling.overflows, self._scaling.left_out)

    @property
    def skips(self) -> Flag:
        return self._scaling.skip

    @property
    def refuses(self) -> Flag:
        return self._scaling.refused

    @property
    def undoes(self) -> Flag:
        return either(self._scaling.refused, self._scaling.left_out)

    def step(self) -> None:
        """A microbatch without samples is an update that changes nothing, and so is one that overflows."""
        scaling = self._scaling
        if self.units is None:
            # Weights that the host sends up would be waited for, and shared, by `publish`, which leaves it.
            if not (self.stepper.on_host and self._is_left_out()):
                self.stepper.start_update(self.number)
                self.stepper.step_all(scaling.factor, scaling.skip)
        elif self.units.rehearsal is None:
            self.stepper.step_all(1.0, scaling.skip)
        if self.averages is not None and (self.units is None or self.units.rehearsal is None):
            self.averages.after_update(scaling.skip)
        if not self._steady:
            self._overflows = self._overflows + scaling.overflows
            return
        self._remember_count()
        if self.loss_scaling is not None:
            self.loss_scaling.after_step(
                overflows=scaling.overflows, refused=scaling.refused | scaling.left_out
            )

    def pop_overflows(self) -> Number:
        """Return how many updates were skipped since the last call, where stages are at different updates."""
        overflows, self._overflows = self._overflows, 0.0
        return overflows

    def _remember_count(self) -> None:
        """Remember what the engine's own loss has counted, unless the update was refused or left out."""
        if not self._is_own:
            return
        undone = self.undoes
        if not isinstance(undone, Tensor):
            self._last_count = self._last_count if undone else self._count
        else:
            before = 0.0 if self._last_count is None else self._last_count
            self._last_count = torch.where(undone, before, self._count)

    def publish(self) -> None:
        if self._is_left_out():
            self._settle()
        else:
            self._has_published = True
            self._stages.publish()
        if self.units is not None:
            self.units.has_updated = False

    def _is_left_out(self) -> bool:
        """Return whether the step is known to be refused, and publishes nothing."""
        # The first time, ranks agree on the order in which gradients came, and a refused step may have had
        # none. The first update of a parameter reads the flag too.
        reads = not self.deferred or not self._has_published
        return reads and bool(self.refuses)

    def _settle(self) -> None:
        """End a refused step where the host updates. What an earlier step has left there comes up, as in a
        step whose refusal is not read; so does what units have sent in the backward pass."""
        if self.stepper.on_host and (self.stepper.finish() or self.units is not None):
            self._share_weights()

    def agree(self, tally: Tensor) -> tuple[float, float]:
        summed = tally[:3].clone()
        _sum(summed, self._everyone)
        return loss_and_count(*summed.tolist())

    def owned(self) -> list[OwnedSlice]:
        owned = self._stages.owned_weights()
        for sharing, local in self._stages.slices():
            slices = sharing.slices(local)
            averages = {} if self.averages is None else self.averages.state(local)
            for part, value in (self.stepper.state(local) | averages).items():
                if part not in self.stepper.whole_parts:
                    owned += own_state(part, value, slices)
        counters: dict[str, Number] = {"normaliser": 0.0 if self._last_count is None else self._last_count}
        if self.loss_scaling is not None:
            counters |= self.loss_scaling.counters()
        return [*owned, *(own_counter(part, value) for part, value in counters.items())]

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return self.stepper.updated_tensors()

    def load(self, saved: SavedState, in_whole: InWhole, *, state: bool = True) -> None:
        for sharing, local in self._stages.slices():
            boxes = partial(_boxes, slices=sharing.slices(local), in_whole=in_whole)
            of_local = SavedParameter(saved, local.name, boxes, state=state)
            self.stepper.load(local, of_local)
            if self.averages is not None:
                self.averages.load(local, of_local)

    def restore(self, numbers: Mapping[str, float]) -> None:
        numbers = numbers_of(numbers, None, 0)
        if self.loss_scaling is not None:
            self.loss_scaling.restore(numbers)
        self._last_count = numbers.get("normaliser", 0.0) or None
        self._overflows = 0.0
        self.number = int(numbers["begun steps"])

    def owned_whole(self) -> list[OwnedSlice]:
        states = [(each.name, self.stepper.state(each)) for each in self._stages.local_parameters()]
        statistics = [
            OwnedSlice(whole_slice(name, state[part], part), state[part])
            for name, state in states
            for part in state.keys() & self.stepper.whole_parts
        ]
        return [*statistics, *self.stepper.held_whole()]

    def storages(self) -> dict[str, list[Tensor]]:
        weights = self._stages.storages()
        local = self._stages.local_parameters()
        state = self.stepper.storages(local)
        state += [owned.tensor for owned in self.stepper.held_whole()]
        if self.averages is not None and not self.stepper.on_host:
            state += self.averages.storages()
        gradients = [*weights.gradients, *self.stepper.gradients_in_flight()]
        return {"parameters": weights.parameters, "gradients": gradients, "optimizer": state}

    def changed(self) -> list[LocalParameter]:
        return self.stepper.changed()

    def refuse_next(self, *, refuses: bool = True) -> None:
        self._refuses_next = refuses

    def take_over(self, changed: Set[nn.Parameter], digest: float) -> None:
        if self.averages is not None and self.averages.is_shown:
            return  # masters must not follow averages; the change is refused when these are hidden
        self._digest += digest
        for sharing in self._stages.sharings:
            sharing.take_over(changed)
        local = [each for each in self._stages.local_parameters() if each.parameter in changed]
        if local:
            self.stepper.take_over(local)

    def synchronize(self) -> None:
        self._finish(temporary=False)

    def show_newest(self) -> None:
        self._finish(temporary=True)

    def _finish(self, *, temporary: bool) -> None:
        loses_change = self.stepper.loses_change
        if self.stepper.finish(temporary=temporary):
            self._share_weights()
            check_on_every_rank(partial(_check_unchanged, loses_change=loses_change))

    def _share_weights(self) -> None:
        for sharing in self._stages.sharings:
            sharing.share_first_weights()

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002
        self.stepper.close()
        self._stages.close()


def _flag_wrong_count(sums: Tensor, units: UnitUpdates) -> None:
    """Units were updated as if the count were what losses were divided by. In a rehearsal none was."""
    if units.rehearsal is None:
        count, scaled = sums[1], sums[2]
        is_wrong = (scaled - count * count).abs() > 1e-9 * count * count
        is_skipped = sums.new_zeros(()).bool() | units.skip()
        place = 4 + list(Problem).index(Problem.WRONG_COUNT)
        sums[place] += is_wrong | (is_skipped & (count != 0))


def _added(sums: Tensor, num_calls: int) -> Tensor:
    """The sums of an update whose losses are those of several batches."""
    tallies, others = sums.split([3 * num_calls, len(sums) - 3 * num_calls])
    row, is_uneven = add_calls(tallies.view(num_calls, 3))
    summed = torch.cat([row, others])
    summed[4 + list(Problem).index(Problem.UNEVEN_COUNTS)] += is_uneven
    return summed


def _with_gates(sums: Tensor, auxiliary: Tensor, num_gates: int) -> Tensor:
    """The sums without the flags of gates: where one is set, the loss, of which theirs is a part, is NaN."""
    sums, broken = sums.split([len(sums) - num_gates, num_gates])
    total = sums[:1] + torch.where(broken.any(), torch.nan, auxiliary * 0)
    return torch.cat([total, sums[1:]])


def _boxes(like: Tensor, *, slices: Sequence[Slice], in_whole: InWhole) -> list[OwnedSlice]:
    """A tensor like a local parameter as boxes of the whole one: views, contiguous or not."""
    is_whole = len(slices) == 1 and tuple(like.shape) == slices[0].sizes
    held = [OwnedSlice(slices[0], like)] if is_whole else own_run(like, slices)
    return [box for own in held for box in in_whole(own)]


def _check_unchanged(*, loses_change: bool) -> None:
    if loses_change:
        raise UserError(Problem.LOST_CHANGE.value)


def _on_device(number: Number, like: Tensor) -> Tensor:
    """Return a float64 number where `like` is, without a wait."""
    return number.double() if isinstance(number, Tensor) else like.new_full((), number)


def _sum(numbers: Tensor, group: Group) -> None:
    if group.size == 1:
        return
    with group.ledger.about("metrics"):
        group.all_reduce(numbers)
