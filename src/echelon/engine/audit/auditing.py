"""When steps are audited, and what is said of it.

    "first"      the first step
    "sampled"    steps 1, 2, 4, 8, …, those whose batch shows a trait that no audited batch has shown, and
                 those after a step that ran another number of operations than any before (Ways)
    "always"     every step
    "off"        none

An engine counts its own steps: the first one after a checkpoint was loaded is audited too.
"""

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit import AuditResult, Mode
from echelon.engine.audit.audit_batch import NUM_TRAITS, GivenBatch, sample_traits, shown_traits, shows_known
from echelon.engine.audit.gradient_audit import GradientAudit
from echelon.engine.audit.plain_form import PlainForm
from echelon.engine.audit.reference import Reference
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.setup import Setup
from echelon.engine.step.nonfinite_search import check_finite_weights
from echelon.engine.step.runner import StepRunner
from echelon.errors import UserError
from echelon.nn.batch import DTYPES
from echelon.parallel.tensor.modules import split_loss
from echelon.update.numbers import HostCopy

_ASKED_AGAIN = 3  # steps in which an audit that could not compare asks for another batch


class AuditSettings(NamedTuple):
    """Settings of the audit, and the model as it was before it was split."""

    mode: Mode
    check_every: int
    form: PlainForm


class _Unread(NamedTuple):
    """A batch whose traits are on their way from a device."""

    batch: GivenBatch
    step: int
    traits: Tensor | None
    is_new: HostCopy


@final
class Audit:
    """Asked before every step, on all ranks together; does nothing before most."""

    def __init__(
        self,
        mode: Mode,
        gradients: GradientAudit | None,
        check_weights: Callable[[], AuditResult],
        agreement: RankAgreement,
        *,
        watches: bool,
    ) -> None:
        """`check_weights`: the entry that is asked once. `watches`: whether the traits of batches count."""
        self._mode, self._gradients, self._check_weights = mode, gradients, check_weights
        self._agreement = agreement
        self._watches = watches and mode == "sampled" and gradients is not None
        self._num_steps = self._num_skipped = self._num_other = 0
        self._next = 1 if gradients is not None else 0  # the next step that is due, of this engine's
        self._known = torch.zeros(NUM_TRAITS, dtype=torch.bool)  # traits of audited batches
        self._is_known = self._known.tolist()  # the same, for a look at each batch
        self._unread: _Unread | None = None
        self._last: deque[GivenBatch] = deque(maxlen=1 + agreement.is_late)
        self._warned: set[str] = set()
        self.results: list[AuditResult] = []

    @property
    def is_on(self) -> bool:
        """Return whether steps may be audited, from the next one on."""
        return self._next > 0 or self._watches

    def ask(
        self,
        batch: GivenBatch,
        step: int,
        *,
        is_empty: bool,
        refusal: UserError | None = None,
        took_other_way: bool = False,
    ) -> None:
        """Raise a UserError, on every rank, if the plan would train something else than one device.
        `is_empty`: nothing is under way, so that ranks can do something together. `refusal`: why this rank
        refuses the step already, which says more than a comparison can. `took_other_way`: a step since the
        last call ran code of the model that none before had run."""
        self._num_steps += 1
        self._ask_late()
        is_due = 0 < self._next <= self._num_steps
        has_look = self._watches and not is_due and not self._agreement.is_late
        is_known = has_look and shows_known(batch.pair, self._is_known)
        traits = sample_traits(batch.pair) if self._watches and not is_known else None
        if took_other_way and is_empty and not is_due and self._mode == "sampled":
            self._compare_other_way(step)
        if is_empty and (is_due or (self._watches and self._shows_new(batch, step, traits))):
            refused = next(filter(None, self._agreement.gather(str(refusal or ""))), "")
            if refused:
                raise UserError(refused)
            self._compare(batch, step, traits)
            if is_due:
                self._set_next()
        self._last.append(batch)

    def _compare_other_way(self, step: int) -> None:
        """Compare all samples of the batch that took it: few might not. Some models take another way with
        every batch, and are not asked forever."""
        if self._last and self._num_other < self._num_steps.bit_length():
            self._num_other += 1
            self._compare(self._last[0], step, None, all_samples=True)

    def _set_next(self) -> None:
        """Powers of two, or the next step where nothing could be compared."""
        is_open = not self.results[-1].is_final and self._num_skipped < _ASKED_AGAIN
        if self._mode == "always" or is_open:
            self._num_skipped += is_open
            self._next = self._num_steps + 1
        else:
            self._next = 2 ** self._num_steps.bit_length() if self._mode == "sampled" else 0

    def _shows_new(self, batch: GivenBatch, step: int, traits: Tensor | None) -> bool:
        """Return whether any replica's batch has a trait that was not compared yet; this one's has none
        without `traits`. On a device the next step tells: to read there is to wait."""
        if traits is None and self._agreement.group is None:
            return False
        flag = torch.zeros(1, dtype=torch.int64) if traits is None else self._new(traits).any().long().view(1)
        self._unread = _Unread(batch, step, traits, HostCopy(self._agreement.largest(flag)))
        if self._agreement.is_late:
            return False
        unread, self._unread = self._unread, None
        return unread.is_new.wait()[0] > 0

    def _new(self, traits: Tensor) -> Tensor:
        self._known = self._known.to(traits.device)  # in the first step; then it is there
        return shown_traits(traits) & ~self._known

    def _ask_late(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None and unread.is_new.wait()[0] > 0:
            self._compare(unread.batch, unread.step, unread.traits)

    def _compare(
        self, batch: GivenBatch, step: int, traits: Tensor | None, *, all_samples: bool = False
    ) -> None:
        assert self._gradients is not None
        traits = sample_traits(batch.pair) if traits is None and self._watches else traits
        new, source = None, 0
        if traits is not None:
            shown, new = shown_traits(traits), self._new(traits)
            own = [bool(new.any()), shown.nonzero().flatten().tolist(), self._gradients.replica]
            rows = self._agreement.gather(own)
            source = next((replica for has_new, _, replica in rows if has_new), 0)
            for _, numbers, _ in rows:
                self._known[numbers] = True
            self._is_known = self._known.tolist()
        if not self.results:
            self.results = [self._check_weights()]
        result = self._gradients(batch, step, traits=traits, new=new, source=source, all_samples=all_samples)
        self._warn(result)
        self.results[1:] = [result]

    def _warn(self, result: AuditResult) -> None:
        """Say once, on rank 0, why nothing could be compared."""
        if result.outcome == "skipped" and result.is_final and result.reason not in self._warned:
            self._warned.add(result.reason)
            if self._agreement.rank == 0:
                warnings.warn(
                    f"the audit of gradients was skipped: {result.reason}; nothing shows that this plan "
                    "trains as one device does; try echelon verify on a smaller model of the same code",
                    stacklevel=5,
                )

    def late_error(self) -> UserError | None:
        """Return the error of the last batch that is still on its way; all ranks ask together. Waits for the
        device."""
        try:
            self._ask_late()
        except UserError as error:
            return error
        return None


def make_audit(settings: AuditSettings, setup: Setup, state: EngineState, runner: StepRunner) -> Audit:
    """Make the audit of a plan, whose model is split and wrapped by now."""
    mesh, local, layers, plan = setup.mesh, setup.local, setup.layers, setup.mesh.plan
    # Asynchronous workers do not wait for each other.
    group = mesh.group("all") if plan.ranks > 1 and plan.sync != "async" else None
    agreement = RankAgreement(group, mesh.device)
    trained = frozenset(name for sharing in local.sharings for name, _ in sharing.parameter_set.trained)
    check_weights = partial(check_finite_weights, local.owned_weights, trained, agreement)
    settings.form.settle()
    if settings.mode == "off":
        return Audit("off", None, check_weights, agreement, watches=False)
    reference = Reference(
        setup.model, settings.form, layers, setup.scopes, mesh.device, DTYPES[plan.precision]
    )
    gradients = GradientAudit(state, runner, setup.scopes, reference, agreement)
    is_cut = plan.data * plan.microbatches > 1 and split_loss(layers.user_loss) is None
    return Audit(settings.mode, gradients, check_weights, agreement, watches=is_cut)
