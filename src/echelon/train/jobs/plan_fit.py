"""Whether a plan can divide a job's model, before a rank starts: stages, heads, ties, a schedule file.

The engine's own code divides the model here, on the meta device and among ranks that are only pretended. So
what a rank would refuse is refused in the same words.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import final

from echelon.collectives import Group, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.engine.stage_split import split_stages
from echelon.errors import UserError
from echelon.models import ImageConfig, ModelConfig, build_without_memory, cross_entropy
from echelon.nn.dropout import key_dropout
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.plan import AUTO, Plan


def division_errors(config: ModelConfig | ImageConfig, plan: Plan) -> list[str]:
    """Why a model of these sizes cannot be divided as `plan` says; with pipeline=auto, but for its stages."""
    if plan.pipeline == AUTO:
        plan = dataclasses.replace(plan, pipeline=1)
    if plan.tensor * plan.context * plan.stages * plan.expert == 1 and not plan.schedule_is_file:
        return []
    model, mesh, wrapping = build_without_memory(config), _PretendedMesh.pretend(plan, 0), Wrapping()
    key_dropout(model, wrapping)  # every job has a seed
    by_layers = plan.sequence or plan.context > 1
    return [
        *_errors(lambda: LayerSharding(model, mesh, cross_entropy, None, wrapping)),
        *_errors(lambda: split_stages(model, mesh, None, by_layers=by_layers)),
    ]


@final
class _PretendedMesh(Mesh):
    """A mesh without process groups, also for weights that stages share."""

    def group_of_stages(self, stages: Collection[int]) -> Group:  # noqa: ARG002
        return RecordingGroup("tied", ledger=self.ledger)


def _errors(divide: Callable[[], object]) -> list[str]:
    try:
        divide()
    except UserError as refusal:
        return list(refusal.errors or (refusal.title,))
    return []
