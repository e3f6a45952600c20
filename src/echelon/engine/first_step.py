"""The audit as a step runs it: which entries a plan has, and when they are asked."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

from torch import nn

from echelon.audit import AuditEntry, AuditResult, Mode, make_skeleton
from echelon.audit.agreement import RankAgreement
from echelon.audit.finite_weights import FiniteWeights
from echelon.engine.arguments import check_audit
from echelon.engine.forward_audit import ForwardAudit
from echelon.engine.layer_audit import layer_audits
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.loss_audit import LossAudit, TargetCheck
from echelon.engine.sample_audit import SampleAudit
from echelon.engine.samples import Scopes
from echelon.engine.step_runner import StepRunner
from echelon.engine.trial import TrialForward
from echelon.engine.weight_changes import WeightChanges, frees_weights, kept_weights, may_change_weights
from echelon.errors import UserError
from echelon.gist import uncompressed
from echelon.mesh import Mesh
from echelon.ownership import OwnedSlice
from echelon.pipeline_parallel import StageModule
from echelon.plan import Plan
from echelon.runtime import LocalStages

_ASKED_AGAIN = 3  # steps in which an entry may ask for another batch


class AuditSettings(NamedTuple):
    """What `parallelize` was told, and the model as it was before it was split, or why it is not there."""

    mode: Mode
    check_every: int
    skeleton: nn.Module | str

    @classmethod
    def of(cls, model: nn.Module, mode: Mode, check_every: int) -> "AuditSettings":
        check_audit(mode, check_every)
        return cls(mode, check_every, "audit='off'" if mode == "off" else make_skeleton(model))


@final
class Audit:
    """Asks all entries before the first step; those that could not tell, before the next ones too."""

    def __init__(
        self,
        entries: Sequence[AuditEntry],
        mode: Mode,
        loss: LossAudit | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`around`: what is watched while entries run the model."""
        self._loss, self._around = loss, around
        self._is_repeated = mode == "always"
        self._open = dict(enumerate(entries))
        self._num_asked = 0
        self.results: list[AuditResult] = []

    @property
    def target_check(self) -> TargetCheck | None:
        """What looks at the targets of every batch, if the loss makes it necessary."""
        return None if self._loss is None else self._loss.target_check

    def late_error(self) -> UserError | None:
        """What was not yet known of the last batch; all ranks ask together. Waits for the device."""
        return None if self.target_check is None else self.target_check.late_error()

    @property
    def is_over(self) -> bool:
        """Whether no later step asks anything."""
        return not self._open

    def ask(self, batch: Any) -> None:
        """Raise a UserError, on every rank, if the plan would train something else than one device."""
        self._num_asked += 1
        with self._around(), uncompressed():
            for number, entry in list(self._open.items()):
                result = entry(batch)
                self.results[number : number + 1] = [result]
                is_given_up = self._num_asked >= _ASKED_AGAIN
                if not self._is_repeated and (result.is_final or is_given_up):
                    del self._open[number]


def make_audit(
    settings: AuditSettings,
    runner: StepRunner,
    mesh: Mesh,
    local: LocalStages,
    layers: LayerSharding,
    scopes: Scopes,
    model: nn.Module,
    owned: Callable[[], list[OwnedSlice]],
) -> Audit:
    """The entries of a plan, in the order in which they are asked."""
    if settings.mode == "off":
        return Audit([], settings.mode)
    plan = mesh.plan
    # Asynchronous workers wait for nobody.
    group = mesh.group("all") if plan.ranks > 1 and plan.sync != "async" else None
    agreement = RankAgreement(group, mesh.device)
    trials = TrialForward(runner, mesh, local, layers, model)
    trained = frozenset(name for sharing in local.sharings for name, _ in sharing.parameter_set.trained)
    entries: list[AuditEntry] = [FiniteWeights(local.owned_weights, trained, agreement)]
    entries += layer_audits(settings.skeleton, local, layers, mesh, trials, agreement)
    loss = LossAudit(layers.loss, layers.user_loss, plan, agreement, mesh.device)
    if plan.data > 1 or plan.microbatches > 1:
        entries.append(SampleAudit(trials, mesh, scopes, agreement, loss, model))
    if any(isinstance(module, StageModule) for module in local.modules):
        speaks = _is_compared(mesh, local)
        entries.append(
            ForwardAudit(
                trials, mesh, layers, scopes, agreement, model, settings.skeleton, owned, speaks=speaks
            )
        )
    return Audit(entries, settings.mode, loss, partial(_unchanged_weights, local, plan, agreement))


@contextmanager
def _unchanged_weights(local: LocalStages, plan: Plan, agreement: RankAgreement) -> Iterator[None]:
    """Raise, on every rank, if trials have changed weights: the first step would not find out any more. Where
    a forward may change them, they are put back. With zero=3, whoever frees a weight looks."""
    if may_change_weights(plan) and not frees_weights(plan):
        with kept_weights(local.modules):
            yield
        return
    changes = [WeightChanges(module, plan) for module in local.modules] if not frees_weights(plan) else []
    before = [change.states() for change in changes]
    yield

    def check() -> None:
        for change, states in zip(changes, before, strict=True):
            change.check(states)

    agreement.check(check)


def _is_compared(mesh: Mesh, local: LocalStages) -> bool:
    """Whether the output of this rank's last stage is that of rank 0's sample: one rank of each part."""
    last = local.program.placement[-1][0]
    position = mesh.position
    return mesh.group("pipeline").rank == last and position.replica == 0 and position.tensor == 0
