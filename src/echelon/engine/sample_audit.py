"""The entry of the audit that asks whether samples are computed by themselves, by the model and by the loss.

second half alone           whether the forward draws random numbers: then all is compared in evaluation
first half, then all        carries buffers over, as one microbatch after the other does
all beside other samples    only where outputs differ little: tells a model that mixes from rounding
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from echelon.audit import AuditResult, held, skipped
from echelon.audit.agreement import RankAgreement
from echelon.audit.samples import (
    Difference,
    Part,
    carrying_message,
    largest_difference,
    mixing_message,
    sample_dims,
    select,
)
from echelon.engine.batch import num_samples, part_bounds
from echelon.engine.buffer_snapshot import Slot
from echelon.engine.loss_audit import LossAudit
from echelon.engine.neighbours import first_samples_of_replicas, share_samples
from echelon.engine.samples import Scopes
from echelon.engine.trial import Outcome, Outcomes, Trial, TrialForward
from echelon.errors import UserError
from echelon.mesh import Mesh

NAME = "samples"
_SHARP = 1e-2  # of the usual tolerance, where sizes are the same


class _Trials(NamedTuple):
    """The trials of some samples: all of them, and the two parts before and after `half`."""

    batch: Any
    samples: int
    half: int

    def part(self, begin: int, end: int) -> Any:
        return _take(self.batch, list(range(begin, end)))

    def beside_others(self, sample: int) -> Any:
        """As many samples, of which those of `sample`'s part stay at their places."""
        keeps_first = sample < self.half
        kept = range(self.half) if keeps_first else range(self.half, self.samples)
        return _take(self.batch, [n if n in kept else kept[n % len(kept)] for n in range(self.samples)])


class _Found(NamedTuple):
    """What came out on this rank; nothing where the last stage is elsewhere."""

    whole: Outcome | None
    parts: list[Part]
    dims: list[int | None]
    difference: Difference | None
    changed: Sequence[Slot] = ()  # buffers that a forward changed here


class _Verdict(NamedTuple):
    """What the difference comes from, if it is more than rounding."""

    cause: Callable[[Difference, int, int, str], str]
    difference: Difference | None
    is_random: bool = False


_Run = Callable[..., Outcomes]  # TrialForward.run, with the modes of an audit


@final
class SampleAudit:
    """Compares a few samples together with their halves."""

    def __init__(
        self,
        trials: TrialForward,
        mesh: Mesh,
        scopes: Scopes,
        agreement: RankAgreement,
        loss: LossAudit,
        model: nn.Module,
    ) -> None:
        self._trials, self._mesh, self._scopes = trials, mesh, scopes
        self._agreement, self._loss = agreement, loss
        self._model = model

    def __call__(self, batch: Any) -> AuditResult:
        samples = self._choose(batch)
        if samples is None:
            return skipped(
                NAME,
                "a replica has less than two samples, between which nothing can be mixed",
                is_final=False,
            )
        norms, without_statistics = batch_norms(self._model)
        if without_statistics:
            return skipped(NAME, f"{', '.join(without_statistics)} take statistics of each part of the batch")
        notes = [f"{', '.join(norms)} with running statistics"] if norms else []
        evaluating = [self._model.get_submodule(name) for name in norms]
        # With microbatches, buffers that one has changed are so in the next one.
        run = partial(self._trials.run, evaluating=evaluating, carries=self._mesh.plan.microbatches > 1)
        found, has_drawn, failure = self._compare(samples, run)
        if has_drawn and not failure:
            notes.append("in evaluation mode: the forward draws random numbers of its own")
            run = partial(run, training=False)
            found, _, failure = self._compare(samples, run, training=False)
        if failure:
            return skipped(NAME, f"the model does not take a part of a microbatch: {failure}")
        if not self._confirm(samples, found, run):
            return skipped(NAME, "the model returns something else each time, for the same samples")
        loss = self._loss.check(found.whole, found.parts, found.dims, samples.samples, batch[1])
        if loss.refusal:
            return skipped(
                NAME, f"outputs held, but the loss does not take a part of a microbatch: {loss.refusal}"
            )
        return held(NAME, "; ".join([*notes, *([loss.note] if loss.note else [])]))

    # Samples.

    def _choose(self, batch: Any) -> _Trials | None:
        """The samples of the first microbatch, at least two; of at most half of a batch that is one
        microbatch, so that all trials together cost one forward."""
        samples, microbatches = num_samples(batch), self._mesh.plan.microbatches
        (least,) = self._agreement.least(samples)
        if least > 1:
            size = part_bounds(samples, 0, microbatches)[1] if microbatches > 1 else samples // 2
            chosen = _take(batch, list(range(max(2, size))))
            chosen = share_samples(chosen, self._mesh, self._agreement)
            return _Trials(chosen, num_samples(chosen), num_samples(chosen) // 2)
        joined = None
        if least == 1 and self._mesh.plan.data > 1 and self._mesh.plan.sync != "async":
            joined = first_samples_of_replicas(batch, self._mesh, self._agreement)
        return None if joined is None else _Trials(joined, 2, 1)

    def _trial(self, samples: _Trials, begin: int, end: int, part: Any = None) -> Trial:
        scope = self._scopes.at_sample(0, samples.samples)
        return Trial(samples.part(begin, end) if part is None else part, partial(scope, begin))

    # Comparing.

    def _compare(self, samples: _Trials, run: _Run, *, training: bool = True) -> tuple[_Found, bool, str]:
        """What differs; whether a forward drew random numbers, or why a part could not be computed."""
        half, size = samples.half, samples.samples
        second = run([self._trial(samples, half, size)])
        has_drawn, has_failed = self._agreement.any(second.has_drawn, bool(second.failure))
        if has_failed or (has_drawn and training):
            return _Found(None, [], [], None), has_drawn, _failure(second.failure, has_failed)
        rest = run([self._trial(samples, 0, half), self._trial(samples, 0, size)])
        (has_failed,) = self._agreement.any(bool(rest.failure))
        first, whole = rest.outcomes
        outcomes = [(0, half, first), (half, size, second.outcomes[0])]
        parts = [Part(begin, end, outcome.output) for begin, end, outcome in outcomes if outcome is not None]
        found = _Found(None, [], [], None, rest.changed)
        if whole is not None and len(parts) == 2:
            found = _find(whole, parts, size, changed=rest.changed)
        return found, False, _failure(rest.failure, has_failed)

    def _confirm(self, samples: _Trials, found: _Found, run: _Run) -> bool:
        """Raise where the model mixes samples; False if it is never the same."""
        differs, changes = self._agreement.any(found.difference is not None, bool(found.changed))
        if not differs and not (changes and self._mesh.plan.microbatches > 1):
            return True
        sample = 0 if found.difference is None else found.difference.sample
        half, size = samples.half, samples.samples
        whole = self._trial(samples, 0, size)
        runs = [
            run([whole]),
            run([whole], disturbed=found.changed),
            run([self._trial(samples, 0, size, samples.beside_others(sample))]),
            run([self._trial(samples, 0, half), whole]),
        ]
        outputs = [each.outcomes[-1].output for each in runs if each.outcomes[-1] is not None]
        verdict = _Verdict(mixing_message, None)
        if found.whole is not None and len(outputs) == len(runs):
            verdict = _judge(found, samples, *outputs)
        if self._agreement.any(verdict.is_random)[0]:
            return False
        self._agreement.check(partial(self._raise_if, verdict, samples))
        return True

    def _raise_if(self, verdict: _Verdict, samples: _Trials) -> None:
        if verdict.difference is not None:
            half, size = samples.half, samples.samples
            count = half if verdict.difference.sample < half else size - half
            raise UserError(verdict.cause(verdict.difference, size, count, str(self._mesh.plan)))


def _failure(local: str, has_failed: bool) -> str:
    return (local or "says another rank") if has_failed else ""


def _find(whole: Outcome, parts: list[Part], samples: int, *, changed: Sequence[Slot]) -> _Found:
    try:
        dims = sample_dims(whole.output, parts[1].output, samples, parts[1].end - parts[1].begin)
    except ValueError:  # outputs of other numbers of tensors: only the loss can tell
        return _Found(whole, parts, [], None, changed)
    difference = largest_difference(whole.output, parts, dims, samples)
    return _Found(whole, parts, dims, difference, changed)


def _judge(
    found: _Found, samples: _Trials, fresh: Any, disturbed: Any, beside: Any, repeated: Any
) -> _Verdict:
    """Why outputs differ. `fresh`: of all samples, from the first state of buffers; `disturbed`: with other
    values in those that a forward changes; `beside`: of some of them among others; `repeated`: what `found`
    is of, once more. All of one size, so rounding is the same."""
    assert found.whole is not None
    size, half = samples.samples, samples.half
    compare = partial(largest_difference, dims=found.dims, samples=size, sharpness=_SHARP)
    first, everything = found.whole.output, partial(Part, 0, size)
    if compare(repeated, [everything(first)]) is not None:
        return _Verdict(mixing_message, None, is_random=True)
    carried = compare(fresh, [everything(first)]) or compare(fresh, [everything(disturbed)])
    if carried is not None:
        return _Verdict(carrying_message, carried)
    begin, end = (0, half) if found.difference is None or found.difference.sample < half else (half, size)
    mixed = compare(fresh, [Part(begin, end, select(beside, found.dims, begin, end, size))])
    if mixed is not None or (found.difference is not None and not found.difference.is_small):
        return _Verdict(mixing_message, found.difference or mixed)
    return _Verdict(mixing_message, None)


def batch_norms(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of modules that take statistics of a batch, with and without running ones beside them."""
    active = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    with_running = [name for name, module in active if module.track_running_stats]
    return with_running, [name for name, module in active if not module.track_running_stats]


def _take(batch: Any, numbers: list[int]) -> Any:
    """These samples of a batch."""
    index = torch.tensor(numbers)

    def take(leaf: Any) -> Any:
        return leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else leaf

    return tree_map(take, batch)
