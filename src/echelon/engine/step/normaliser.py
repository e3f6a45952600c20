"""The divisor of losses before the backward pass: the count of all losses of their update.

Then all that passes through a backward pass is a gradient of the mean over the global batch, as on one
device. A function of gradients that is not linear (a hook that clips, an autograd.Function that clamps) sees
the right numbers. Others would not notice: an update divides by the true count, whatever losses were divided
by, as long as this was the same for all losses of the update.

    loss                              count before the first backward pass
    a mean, or a Sum times that       the samples of all replicas
    (total, count), a single loss     its own
    (total, count), several           the samples, targets or targets that are not ignored, whichever was
                                      the count of the step before; else that count

Where units are updated in the backward pass (`exact`) nothing is left to divide by the true count. There the
last count must be one of the three, which `learn` finds in a rehearsal of the first step, and all ranks must
know it. Where several fit, a batch for which they differ is rehearsed too. Where the device must not be read,
the last that fits is taken, and the numbers of a step say if it was wrong.

To count targets takes a device a dozen operations. One replica, whose losses were all means so far, counts
when the first (total, count) comes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.agreement import gather_rows
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.nn.batch import tensors_of
from echelon.nn.losses import IGNORED_TARGET
from echelon.plan import Plan
from echelon.update.numbers import Number


class Counts(NamedTuple):
    """The counts that a loss may have: samples, their targets, and those targets that are not ignored."""

    samples: Number
    targets: Number
    counted: Number


@final
class LossNormaliser:
    """Makes the normaliser of each step's losses, on the ranks of the last stage."""

    def __init__(
        self,
        mesh: Mesh,
        last_stage: tuple[int, ...],
        *,
        is_here: bool,
        deferred: bool,
        exact: bool = False,
    ) -> None:
        """`last_stage`: the ranks of a replica that compute losses; `is_here`: this is one of them.
        `deferred`: numbers stay on the device, and only the first step may read them. `exact`: losses must be
        divided by the true count."""
        plan = mesh.plan
        self._mesh, self._is_here, self._deferred = mesh, is_here or exact, deferred
        self._rules: tuple[int, ...] = (0, 1, 2)  # which of the counts a loss may count, as far as is known
        self._is_learned = False
        self._compares = exact and not deferred and plan.context == 1 and not plan.sequence
        self._has_all_losses = plan.data == plan.context == len(last_stage) == 1
        self._updates_per_step = plan.updates_per_step
        self._before: Counts | None = None  # those of the last batch before this update
        self._latest: Counts | None = None  # those of the last batch
        self._is_first = True
        # Workers of sync=async do not wait, and passes of PipeDream outlive the batch.
        self._may_be_late = plan.data == 1 and plan.flushes and not exact
        self._has_pair = False  # whether a loss of an earlier step was (total, count)
        self._last: StepNormaliser | None = None
        self._trial_samples: int | None = None  # which a Sum of a trial is over

    def start_update(self) -> None:
        """The batches from here on are of another update than the last one."""
        self._before = self._latest

    def of_step(
        self, batch: Any, samples: int, count_before: Number | None, *, own_loss: bool = True
    ) -> "StepNormaliser":
        """The normaliser of a step of `samples` samples here. `count_before`: what the last update was the
        mean of, which tells of the engine's own loss alone. Replicas exchange a few numbers, which stay on
        the device."""
        if not self._is_here:
            return StepNormaliser(1.0, lambda: (Counts(1.0, 1.0, 1.0), None), is_only=False, local=None)
        reads = self._is_first or not self._deferred
        self._has_pair = self._has_pair or (self._last is not None and self._last.has_pair)
        count = partial(self._count, _targets(batch), samples, count_before, own_loss=own_loss, reads=reads)
        is_late = self._may_be_late and not self._is_first and not self._has_pair
        if is_late and own_loss:
            self._latest = None
        self._is_first = False
        self._is_only = self._has_one_loss(samples)
        local = samples if self._has_all_losses and reads else None
        normaliser = StepNormaliser(samples, count, is_only=self._is_only, local=local)
        if not is_late:
            normaliser.count()
        normaliser.trial_samples, normaliser.plan = self._trial_samples, self._mesh.plan
        self._last = normaliser
        if self._is_learned:
            if not self._rules and not self._is_only:
                raise self._unknown_count("earlier losses counted something else")
            rule = self._rules[-1] if self._rules else None
            has_update = self._is_only and self._mesh.plan.stages == 1
            normaliser.apply(rule, compares=self._compares, has_update=has_update)
        return normaliser

    def _count(
        self, targets: Any, samples: int, count_before: Number | None, *, own_loss: bool, reads: bool
    ) -> tuple[Counts, Number | None]:
        """Return the counts of an update, and that of (total, count), if an earlier step tells."""
        device = None if reads else self._mesh.device
        counts = self._over_replicas(count_targets(targets, samples, device), reads=reads)
        expected = None
        if own_loss:
            expected = None if count_before is None else _expected(counts, self._before, count_before)
            self._latest = counts
        num_updates = self._updates_per_step
        per_update = counts if num_updates == 1 else Counts(*(number / num_updates for number in counts))
        return per_update, expected

    def for_a_trial(self, samples: int) -> "LossNormaliser":
        """Another one, which knows as much but for what units need: no update follows, and nothing of the
        trial is kept. It has so many different `samples`, and replicas may repeat them."""
        trial = copy.copy(self)
        trial._is_learned, trial._trial_samples = False, samples
        return trial

    def counters(self) -> dict[str, Number]:
        """Return the numbers that the next step's normaliser depends on, by name."""
        counts = self._latest if self._is_here and self._latest is not None else ()
        return {f"last {name}": number for name, number in zip(Counts._fields, counts, strict=False)}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on from the counts of a checkpoint's last step."""
        counts = [numbers.get(f"last {name}") for name in Counts._fields]
        self._latest = None if None in counts else Counts(*(float(number or 0) for number in counts))

    def _has_one_loss(self, samples: int) -> bool:
        """Return whether every update of a step is of one loss, which is here."""
        num_losses = min(samples, self._mesh.plan.microbatches)
        return self._has_all_losses and self._updates_per_step >= num_losses

    def learn(self, count: float) -> None:
        """The rehearsal of a step counted so much: find out what losses count. The same on every rank."""
        assert self._latest is not None
        matches = tuple(rule for rule in self._rules if float(self._latest[rule]) == count)
        if not self._has_pairs():
            matches = (0,)  # means, which are weighted by samples
        if not matches and not self._is_only:
            raise self._unknown_count(f"the loss counts {count:g}")
        self._rules, self._is_learned = matches, True

    def _has_pairs(self) -> bool:
        """Return whether a loss of the last step, on any rank, was (total, count), not a mean."""
        assert self._last is not None
        flag = torch.tensor(float(self._last.has_pair), device=self._mesh.device)
        if self._mesh.plan.ranks > 1:
            group = self._mesh.group("all")
            with group.ledger.about("loss counts"):
                group.all_reduce(flag, "max")
        return bool(flag)

    def reopen(self, batch: Any, samples: int) -> bool:
        """Return whether this batch tells apart what losses may count: then it must be rehearsed, and
        learned from. The same on every rank."""
        is_known = len(self._rules) < 2 or self._deferred
        if not self._is_learned or is_known or (self._has_one_loss(samples) and self._mesh.plan.stages == 1):
            return False
        counts = self._over_replicas(count_targets(_targets(batch), samples), reads=True)
        self._is_learned = len({float(counts[rule]) for rule in self._rules}) == 1
        return not self._is_learned

    def _unknown_count(self, found: str) -> UserError:
        assert self._latest is not None
        samples, targets, counted = (f"{float(number):g}" for number in self._latest)
        return UserError(
            f"update={self._mesh.plan.update}: {found}, and the batch has {samples} samples, {targets} "
            f"targets, {counted} of them not {IGNORED_TARGET}: units are updated in the backward pass, "
            "before which the count of several losses must be known; let the loss return a mean, or one of "
            "these as its count, or use update=step"
        )

    def _over_replicas(self, local: Counts, *, reads: bool) -> Counts:
        plan = self._mesh.plan
        if plan.data == 1:
            return local
        group, device = self._mesh.group("data"), self._mesh.device
        if plan.sync == "async":  # workers do not wait: as if each held as much
            return Counts(*(number * workers_per_update(plan) for number in local))
        row = torch.cat([_on_device(number, device) for number in local])
        rows = gather_rows(row, group, "loss counts")
        # A stage may have several ranks of each replica in its group, one after the other.
        summed = rows[:: group.size // plan.data].sum(0)
        return Counts(*(summed.tolist() if reads else summed))


def workers_per_update(plan: Plan) -> int:
    """Return how many workers of sync=async have their gradients summed to one update."""
    return plan.data if plan.sync == "async" and plan.staleness == 0 else 1


@final
class StepNormaliser:
    """The divisor of the losses of one step."""

    def __init__(
        self,
        samples: Number,
        count: Callable[[], tuple[Counts, Number | None]],
        *,
        is_only: bool,
        local: int | None,
    ) -> None:
        """`samples`: of an update. `count`: returns all counts, and that of (total, count), if an earlier
        step has told. `is_only`: an update is of one loss. `local`: the samples of the step, if all of its
        losses are this rank's."""
        self._samples, self._count, self._is_only, self._local = samples, count, is_only, local
        self._counts: Counts | None = None  # until something needs them
        self._expected: Number | None = None
        self._rule: int | None = None  # what must have been counted, and is compared
        self.has_pair = False  # whether a loss was (total, count)
        self._has_update = False  # whether the one loss, and all that it updates, are this rank's
        self.is_empty: bool | Tensor = False  # whether no loss counts anything, where that must be known
        self.trial_samples: int | None = None
        self.plan: Plan | None = None

    def count(self) -> Counts:
        """Count, if that was not done yet."""
        if self._counts is None:
            self._counts, self._expected = self._count()
            self._samples, self._count = self._counts.samples, _refuse_to_count  # and lets go of the targets
        return self._counts

    def numbers(self) -> tuple[Number | None, ...]:
        """Return the numbers that a step brings, which may be on the device: all that are counted yet."""
        return (self._samples, self._expected, self._local, *(self._counts or ()))

    def with_numbers(self, numbers: Sequence[Any], *, is_recorded: bool) -> "StepNormaliser":
        """Return one that knows these instead. `is_recorded`: and cannot count a batch."""
        other = copy.copy(self)
        other._samples, other._expected, other._local, *counts = numbers
        other._counts = Counts(*counts) if counts else None
        other._count = _refuse_to_count if is_recorded else self._count
        return other

    def all_samples(self) -> Number:
        """The samples that a Sum is over: those of all losses of the step."""
        plan = self.plan
        if plan is not None and (plan.sync == "async" or not plan.flushes):
            raise UserError(
                f"the loss returned echelon.Sum with plan '{plan}', whose updates are each of a part of the "
                "batch, so that no sum is over all of it; return a mean, or take a plan with one update "
                "per step"
            )
        return self._samples if self.trial_samples is None else self.trial_samples

    def apply(self, rule: int | None, *, compares: bool, has_update: bool) -> None:
        """Losses count as `rule` says. `compares`: where one does not, that is an error."""
        counts = self.count()
        number = counts.counted if rule is None else counts[rule]
        self._expected, self.is_empty = _not_zero(number), number == 0
        self._rule, self._has_update = (rule if compares else None), has_update

    def of_loss(self, count: Number, targets: Any, *, is_pair: bool) -> Number:
        """For a loss that counted `count` for these targets."""
        self.has_pair = self.has_pair or is_pair
        if self._is_only:
            self.is_empty = count == 0 if self._has_update else self.is_empty
            return _not_zero(count)
        if not is_pair:
            return self._samples
        counts = self.count()
        if self._rule is not None:
            _check_count(float(count), targets, self._rule)
        if self._expected is None:  # the first loss decides for all of the step
            self._expected = self._first_guess(counts, count, targets)
        return self._expected

    def _first_guess(self, counts: Counts, count: Number, targets: Any) -> Number:
        """The same on all ranks: each sees other targets, so what its own loss counts decides only where it
        has them all."""
        tensors = tensors_of(targets)
        if self._local is None or not tensors:
            return _not_zero(counts.counted)
        samples = len(tensors[0])
        here = count_targets(targets, samples)
        for guess, local in ((counts.counted, here.counted), (counts.targets, here.targets)):
            if float(local) == float(count):
                return _not_zero(guess)
        return _not_zero(float(count) * self._local / max(samples, 1))


def _refuse_to_count() -> tuple[Counts, Number | None]:
    raise RuntimeError("the loss returned means, and now (total, count)")


def _check_count(count: float, targets: Any, rule: int) -> None:
    """Refuse a loss that counts otherwise than those before it, before its backward pass."""
    tensors = tensors_of(targets)
    expected = float(count_targets(targets, len(tensors[0]))[rule]) if tensors else count
    if count != expected:
        raise UserError(
            f"the loss counts {count:g} for targets of which earlier losses would have counted {expected:g}: "
            "units are updated in the backward pass, before which the count of all losses must be known; let "
            "the loss return a mean, or the same kind of count in every step, or use update=step"
        )


def count_targets(targets: Any, samples: int, device: torch.device | None = None) -> Counts:
    """Count samples and targets. Given a device, nothing is read: a computed number stays there."""
    tensors = tensors_of(targets)
    if len(tensors) != 1:
        return Counts(samples, samples, samples)
    (tensor,) = tensors
    counted: Number = tensor.numel()
    if tensor.dtype == torch.int64:
        if device is None and tensor.is_cpu and counted and int(tensor.min()) > IGNORED_TARGET:
            return Counts(samples, counted, float(counted))  # none is ignored: one look, and not two
        summed = (tensor != IGNORED_TARGET).sum()
        counted = float(summed) if device is None else summed.double().to(device, non_blocking=True)
    return Counts(samples, tensor.numel(), counted)


def _targets(batch: Any) -> Any:
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def _expected(counts: Counts, before: Counts | None, count_before: Number) -> Number:
    """Return the candidate that was the count of the step before, or that count, without reading a device."""
    expected: Number = count_before
    if isinstance(count_before, Tensor):  # 0: every step before was refused
        expected = torch.where(count_before == 0, counts.counted, count_before)
    for now, earlier in zip(counts, before or (), strict=False):  # `if` on a tensor would stop the host
        is_match = earlier == count_before
        if isinstance(is_match, Tensor):
            expected = torch.where(is_match, now, expected)
        elif is_match:
            expected = now
    return _not_zero(expected)


def _not_zero(count: Number) -> Number:
    """A loss of nothing has no gradient; it must not become one of not-a-number."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1.0, count.double())  # float32 is exact up to 2²⁴ tokens only
    return count or 1.0


def _on_device(number: Number, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.double().view(1).to(device, non_blocking=True)
    return torch.full((1,), number, dtype=torch.float64, device=device)
