"""The audit of layers, as a plan has it."""

from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from echelon.audit.agreement import RankAgreement
from echelon.audit.layer_comparison import LayerComparison
from echelon.audit.layers import LayerAudit
from echelon.audit.reference import WholeWeights
from echelon.audit.report import AuditEntry, AuditResult, skipped
from echelon.audit.units import StageUnits, find_units
from echelon.audit.whole_values import ValueGroups
from echelon.dropout import scope
from echelon.engine.free_memory import free_bytes
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.neighbours import share_samples
from echelon.engine.trial import Trial, TrialForward
from echelon.layering import listed_layers
from echelon.mesh import Mesh
from echelon.ownership import OwnedSlice, whole_slice
from echelon.plan import Plan
from echelon.runtime import LocalStages


def layer_audits(
    skeleton: nn.Module | str,
    local: LocalStages,
    layers: LayerSharding,
    mesh: Mesh,
    trial: TrialForward,
    agreement: RankAgreement,
) -> list[AuditEntry]:
    """One entry, if the plan splits layers."""
    plan = mesh.plan
    if plan.tensor == 1 and plan.context == 1 and plan.expert == 1:
        return []
    if isinstance(skeleton, str):
        return [partial(_skip, skeleton)]
    stages = _units(skeleton, local)
    vocabulary = None if layers.sharded is None else layers.sharded.vocabulary
    values = ValueGroups(mesh.group("context"), mesh.group("tensor"), plan.sequence, vocabulary)
    parameters = {
        name: p for sharing in local.sharings for name, p in sharing.parameter_set.parameters.items()
    }

    def make_weights() -> WholeWeights:
        return WholeWeights(skeleton, _owned(local, layers, plan), mesh.group("stage"), mesh.device)

    def forward(samples: Any) -> str:
        place = partial(scope, seed=0, step=0, first_sample=0)
        shared = share_samples(samples, mesh, agreement, always=True)
        return trial.run([Trial(shared, place)], training=False).failure

    def free() -> float:  # of a host, an equal share for every rank
        return free_bytes(mesh.device) / (plan.ranks if mesh.device.type == "cpu" else 1)

    compare = LayerComparison(
        mesh, values, layers.view, layers.sharded, layers.spread, parameters, make_weights, free
    )
    return [LayerAudit(stages, compare, forward, mesh)]


def _skip(reason: str, _: Any) -> AuditResult:
    return skipped("layers", reason)


def _units(skeleton: nn.Module, local: LocalStages) -> list[StageUnits]:
    edges = list(pairwise([0, *local.boundaries, len(listed_layers(skeleton))]))
    return [find_units(stage.module, skeleton, edges[number][0]) for number, stage in local.stages.items()]


def _owned(local: LocalStages, layers: LayerSharding, plan: Plan) -> list[OwnedSlice]:
    """This rank's weights as boxes of the whole ones."""
    if plan.frees_weights:
        owned = local.owned_weights()
    else:
        owned = [OwnedSlice(whole_slice(name, p), p) for name, p in _named_parameters(local)]
    return [part for each in owned for part in layers.in_whole(each)]


def _named_parameters(local: LocalStages) -> list[tuple[str, nn.Parameter]]:
    return [item for sharing in local.sharings for item in sharing.parameter_set.parameters.items()]
