"""What is known of a model before anything of it is split or given away."""

from typing import NamedTuple

from torch import nn

from echelon.engine.audit import Mode
from echelon.engine.audit.auditing import AuditSettings
from echelon.engine.step.balance import GateList
from echelon.nn.wrapping import Wrapping
from echelon.plan import Plan
from echelon.state.ownership import StateNames


class WholeModel(NamedTuple):
    """Names of its state, its gates, and what the audit compares."""

    names: StateNames
    gates: GateList
    audit: AuditSettings

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, audit: Mode, check_every: int, wrapping: Wrapping
    ) -> "WholeModel":
        names = StateNames.of(model)
        return cls(
            names, GateList.of(model, plan), AuditSettings.of(model, names, audit, check_every, wrapping)
        )
