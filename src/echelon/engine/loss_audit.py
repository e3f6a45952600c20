"""The loss in the audit: whether it adds up over samples, in the first batch and in later ones."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.audit.agreement import RankAgreement
from echelon.audit.class_weights import difference_of_classes, is_small, num_classes, on_host
from echelon.audit.loss_parts import (
    Batch,
    LossParts,
    LossRefusedError,
    Sums,
    candidates,
    likely_candidates,
    message,
    num_special,
    own_special_message,
    special_message,
    usual_values,
    weights_message,
)
from echelon.audit.samples import Part
from echelon.engine.batch import Loss
from echelon.engine.trial import Outcome
from echelon.engine.untouched import untouched
from echelon.errors import UserError
from echelon.generators import GeneratorStates
from echelon.plan import Plan
from echelon.runtime.numbers import HostCopy
from echelon.tensor_parallel import split_loss

Describe = Callable[[Sequence[int], int, int, str], str]  # (special, least, most, plan) -> an error
_MOST = 2**40  # more than a sample has targets


class _Finding(NamedTuple):
    """What this rank found of the loss."""

    error: str = ""
    special: Sequence[int] = ()  # targets that the loss leaves out
    counted: Sequence[int] = ()  # targets that it is known to leave out of nothing, by the first batch
    is_own: bool = False  # the loss is in the output, and was not asked with made-up targets
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
        self._likely = likely_candidates(user_loss)
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
        is_random, is_own = self._agreement.any(finding.is_random, finding.is_own)
        if is_random:
            return LossVerdict(note="without the loss, which draws random numbers")
        self._agreement.check(partial(_raise_if, finding.error))
        special, counted = map(self._on_any_rank, (finding.special, finding.counted))
        left_out = [value for value in special if value not in counted]
        self._watch(left_out, targets, own_special_message if is_own else special_message)
        texts = self._agreement.gather([finding.refusal, finding.note])
        return LossVerdict(*(next(filter(None, each), "") for each in zip(*texts, strict=True)))

    def _on_any_rank(self, values: Sequence[int]) -> list[int]:
        flags = self._agreement.any(*(value in values for value in self._candidates))
        return [value for value, is_set in zip(self._candidates, flags, strict=True) if is_set]

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
        is_own = not dims or any(dim is None for dim in dims)
        try:
            sums = self._compare_parts(batch, parts) if is_own else self._parts.difference(batch)
            if sums is not None:
                return _Finding(message(sums, self._plan))
            return self._find_likely(batch) if is_own else self._find_special(batch, targets)
        except LossRefusedError as refusal:
            return _Finding(refusal=str(refusal))

    def _find_likely(self, batch: Batch) -> _Finding:
        """Targets that a mean in the model's output may leave out; not those of which these samples, whose
        loss adds up, have different numbers."""
        if self._parts.returns_count(batch.output, batch.targets):
            return _Finding()
        counted = [value for value in self._likely if _differs_by_sample(batch.targets, value)]
        return _Finding(special=self._likely, counted=counted, is_own=True)

    def _find_special(self, batch: Batch, targets: Any) -> _Finding:
        """Targets that the loss leaves out or weighs, of which the batch may have none."""
        usual = usual_values(targets, self._candidates)
        values = [*self._candidates, *usual]
        parts, most_usual = LossParts(on_host(self._loss)), usual[0] if usual else 0
        try:
            special = parts.special_targets(batch, values, most_usual)
            weighed = ", ".join(str(value) for value in usual if value in special)
            weighed = weighed or self._weighed_classes(parts, batch, special, most_usual)
        except LossRefusedError as refusal:
            return _Finding(note=f"without made-up targets, two samples in host memory: {refusal}")
        left_out = [value for value in self._candidates if value in special]
        note = "" if is_small(batch) else "without weights of classes that the batch does not have"
        return _Finding(weights_message(weighed, self._plan) if weighed else "", left_out, note=note)

    def _weighed_classes(self, parts: LossParts, batch: Batch, special: Sequence[int], usual: int) -> str:
        """Classes that the batch may not have, in words; empty if the loss weighs none of them."""
        if not batch.is_cut or not is_small(batch):
            return ""
        pair = batch.pair_on_host()
        count = num_classes(parts, pair)
        classes = [value for value in range(count) if value not in special]
        sums = difference_of_classes(parts, pair, classes, usual)
        return "" if sums is None else f"some of the classes 0 to {count - 1}"

    def _compare_parts(self, batch: Batch, parts: Sequence[Part]) -> Sums | None:
        """Of an output that cannot be cut into samples: the model's own outputs of the parts."""
        pieces = [
            (part.output, batch.targets_of(part.begin, part.end), part.end - part.begin) for part in parts
        ]
        return self._parts.compare((batch.output, batch.targets, batch.samples), pieces, widths=[False])

    def _watch(self, special: list[int], targets: Any, describe: Describe) -> None:
        """Let later batches be compared with this one, where the loss leaves out targets."""
        if not special:
            return
        counts = num_special(targets, special)
        extremes = (_MOST, _MOST) if counts is None else (int(counts.min()), -int(counts.max()))
        least, negative = self._agreement.least(*extremes)
        if least == _MOST:
            return
        if least != -negative:
            raise UserError(describe(special, least, -negative, self._plan))
        self.target_check = TargetCheck(special, self._plan, self._agreement, describe)


@final
class TargetCheck:
    """Every sample of a batch must have as many targets that the loss leaves out as the others.

    The ranks look together, so that all of them raise in the same call: a rank that went on alone would wait
    for the others forever. On a CUDA device that is a step late, because to read there is to wait for it.
    """

    def __init__(
        self, special: Sequence[int], plan: str, agreement: RankAgreement, describe: Describe
    ) -> None:
        self._special, self._plan, self._agreement, self._describe = special, plan, agreement, describe
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
        return UserError(self._describe(self._special, -negative, most, self._plan))

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


def _differs_by_sample(targets: Any, value: int) -> bool:
    counts = num_special(targets, [value])
    return counts is not None and bool((counts != counts[0]).any())


def _raise_if(error: str) -> None:
    if error:
        raise UserError(error)
