"""The loss in the audit: whether it adds up over samples, in the first batch and in later ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.audit.agreement import RankAgreement
from echelon.audit.generators import GeneratorStates
from echelon.audit.loss_parts import (
    Batch,
    LossParts,
    LossRefusedError,
    Sums,
    candidates,
    message,
    num_special,
    special_message,
    usual_values,
    weights_message,
)
from echelon.audit.samples import Part
from echelon.engine.batch import Loss
from echelon.engine.trial import Outcome
from echelon.engine.untouched import untouched
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.runtime.numbers import HostCopy
from echelon.tensor_parallel import split_loss

_MOST = 2**40  # more than a sample has targets


class _Finding(NamedTuple):
    """What this rank found of the loss."""

    error: str = ""
    special: tuple[bool, ...] = ()  # by candidate
    is_random: bool = False
    refusal: str = ""  # what the loss raised, so that it could not be asked
    note: str = ""  # what was not asked of it


class LossVerdict(NamedTuple):
    """Of a loss that does not fail: why it could not be asked, or what was not; the same on every rank."""

    refusal: str = ""
    note: str = ""


@final
class LossAudit:
    """Asks the loss of a plan. `loss` is as this rank calls it, `user_loss` as the user gave it."""

    def __init__(
        self, loss: Loss, user_loss: Loss, plan: Plan, agreement: RankAgreement, device: torch.device
    ) -> None:
        self._loss, self._plan, self._agreement, self._device = loss, str(plan), agreement, device
        self._is_known = split_loss(user_loss) is not None  # to add up
        self._module = [user_loss] if isinstance(user_loss, nn.Module) else []
        self._candidates = candidates(user_loss)
        self._parts = LossParts(loss)
        self.target_check: TargetCheck | None = None

    def check(
        self,
        whole: Outcome | None,
        parts: Sequence[Part],
        dims: Sequence[int | None],
        samples: int,
        targets: Any,
    ) -> LossVerdict:
        """Raise, on every rank, if the loss does not add up.

        `targets`: all of this replica's, of which `whole` has some.
        """
        if self._is_known:
            return LossVerdict()
        finding = _Finding()
        if whole is not None:
            modules = [each for module in self._module for each in module.modules()]
            before = GeneratorStates(self._device, modules)
            with untouched(self._module, modules, self._device):
                finding = self._find(whole, parts, dims, samples, targets)
                is_random = before.moved()
            finding = _Finding(is_random=True) if is_random else finding
        flags = finding.special or (False,) * len(self._candidates)
        is_random, *special = self._agreement.any(finding.is_random, *flags)
        if is_random:
            return LossVerdict(note="without the loss, which draws random numbers")
        self._agreement.check(partial(_raise_if, finding.error))
        left_out = [value for value, is_set in zip(self._candidates, special, strict=True) if is_set]
        self._watch(left_out, targets)
        texts = self._agreement.gather([finding.refusal, finding.note])
        return LossVerdict(*(next(filter(None, each), "") for each in zip(*texts, strict=True)))

    def _find(
        self,
        whole: Outcome,
        parts: Sequence[Part],
        dims: Sequence[int | None],
        samples: int,
        targets: Any,
    ) -> _Finding:
        target_dims = [0 for leaf in tree_leaves(whole.targets) if isinstance(leaf, Tensor)]
        batch = Batch(whole.output, whole.targets, dims, target_dims, samples)
        try:
            if not dims or any(dim is None for dim in dims):
                sums = self._compare_parts(batch, parts)
            else:
                sums = self._parts.difference(batch)
        except LossRefusedError as refusal:
            return _Finding(refusal=str(refusal))
        if sums is not None:
            return _Finding(message(sums, self._plan))
        return self._find_special(batch, targets) if dims else _Finding()

    def _find_special(self, batch: Batch, targets: Any) -> _Finding:
        """Targets that the loss leaves out or weighs, of which the batch may have none."""
        usual = usual_values(targets, self._candidates)
        values = [*self._candidates, *usual]
        try:
            special = self._parts.special_targets(batch, values, usual[0] if usual else 0)
        except LossRefusedError as refusal:
            return _Finding(note=f"without made-up targets, two samples in host memory: {refusal}")
        weighed = [value for value in usual if value in special]
        flags = tuple(value in special for value in self._candidates)
        return _Finding(weights_message(weighed, self._plan) if weighed else "", flags)

    def _compare_parts(self, batch: Batch, parts: Sequence[Part]) -> Sums | None:
        """Of an output that cannot be cut into samples: the model's own outputs of the parts."""
        pieces = [
            (part.output, batch.targets_of(part.begin, part.end), part.end - part.begin) for part in parts
        ]
        return self._parts.compare((batch.output, batch.targets, batch.samples), pieces, widths=[False])

    def _watch(self, special: list[int], targets: Any) -> None:
        """Let later batches be compared with this one, where the loss leaves out targets."""
        if not special:
            return
        counts = num_special(targets, special)
        extremes = (_MOST, _MOST) if counts is None else (int(counts.min()), -int(counts.max()))
        least, negative = self._agreement.least(*extremes)
        if least == _MOST:
            return
        if least != -negative:
            raise UserError(special_message(special, least, -negative, self._plan))
        self.target_check = TargetCheck(special, self._plan, self._agreement)


@final
class TargetCheck:
    """Every sample of a batch must have as many targets that the loss leaves out as the others.

    The ranks look together, so that all of them raise in the same call: a rank that went on alone would wait
    for the others forever. On a CUDA device that is a step late, because to read there is to wait for it.
    """

    def __init__(self, special: Sequence[int], plan: str, agreement: RankAgreement) -> None:
        self._special, self._plan, self._agreement = special, plan, agreement
        self._unread: HostCopy | None = None

    def check(self, batch: Any) -> None:
        """Raise before the step that would count parts differently; on a CUDA device, before the next."""
        self._raise_late_error()
        self._unread = HostCopy(self._agreement.largest(self._extremes(batch[1])))
        if not self._agreement.is_late:
            self._raise_late_error()

    def late_error(self) -> UserError | None:
        """What the last call found, once; all ranks ask together. Waits for the device."""
        unread, self._unread = self._unread, None
        if unread is None:
            return None
        negative, most = map(int, unread.wait())
        if -negative >= most:
            return None
        return UserError(special_message(self._special, -negative, most, self._plan))

    def _raise_late_error(self) -> None:
        error = self.late_error()
        if error is not None:
            raise error

    def _extremes(self, targets: Any) -> Tensor:
        """The smallest number of a sample, negated, and the largest; without targets, less than any other."""
        counts = num_special(targets, self._special)
        if counts is None:
            return torch.tensor([-_MOST, -_MOST])
        return torch.stack([-counts.min(), counts.max()])


def _raise_if(error: str) -> None:
    if error:
        raise UserError(error)
