"""The audit as a step runs it: which entries a plan has, and when they are asked."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from torch import nn

from echelon.audit import AuditEntry, AuditResult, Mode
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.samples import Scopes
from echelon.engine.step_runner import StepRunner
from echelon.mesh import Mesh
from echelon.runtime import LocalStages

_ASKED_AGAIN = 3  # steps in which an entry may ask for another batch


class AuditSettings(NamedTuple):
    """What `parallelize` was told, and the model as it was before it was split, or why it is not there."""

    mode: Mode
    check_every: int
    skeleton: nn.Module | str


@final
class Audit:
    """Asks all entries before the first step; those that could not tell, before the next ones too."""

    def __init__(self, entries: Sequence[AuditEntry], mode: Mode) -> None:
        self._entries = list(entries) if mode != "off" else []
        self._is_repeated = mode == "always"
        self._open = dict(enumerate(self._entries))
        self._num_asked = 0
        self.results: list[AuditResult] = []

    @property
    def is_over(self) -> bool:
        """Whether no later step asks anything."""
        return not self._open

    def ask(self, batch: Any) -> None:
        """Raise a UserError, on every rank, if the plan would train something else than one device."""
        self._num_asked += 1
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
) -> Audit:
    """The entries of a plan, in the order in which they are asked."""
    entries: list[AuditEntry] = []
    return Audit(entries, settings.mode)
