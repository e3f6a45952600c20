"""What is known of a model before anything of it is split or given away."""

from typing import NamedTuple

from torch import nn

from echelon.audit import Mode
from echelon.engine.balance import GateList
from echelon.engine.first_step import AuditSettings
from echelon.ownership import StateNames
from echelon.plan import Plan


class WholeModel(NamedTuple):
    """Names of its state, its gates, and what the audit compares."""

    names: StateNames
    gates: GateList
    audit: AuditSettings

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, audit: Mode, check_every: int) -> "WholeModel":
        settings = AuditSettings.of(model, audit, check_every)
        return cls(StateNames.of(model), GateList.of(model, plan), settings)
