"""Setup: a model with the strategies of a plan around it, as `parallelize` has composed them."""

from dataclasses import dataclass

from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.engine.step.balance import GateList
from echelon.engine.step.batch_reader import BatchReader
from echelon.engine.step.samples import Scopes
from echelon.engine.updates import UpdateRule
from echelon.nn.layering import called_layers, listed_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages
from echelon.state.ownership import StateNames
from echelon.update.update import Update


@dataclass(frozen=True)
class Setup:
    """All that the parts of an engine are made from. `names` and `gates` are those of the whole model."""

    model: nn.Module
    names: StateNames
    gates: GateList
    mesh: Mesh
    layers: LayerSharding  # tensor, sequence, context, expert
    local: LocalStages  # pipeline, data, zero
    update: Update
    rule: UpdateRule
    scopes: Scopes  # of dropout and other draws
    reader: BatchReader
    observers: Observers  # memory savers, and what else hears of a step
    wrapping: Wrapping

    def describe(self) -> str:
        """Return the plan and rank, and this rank's stages with what wraps their modules, line by line."""
        plan = self.mesh.plan
        lines = [f"'{plan}', rank {self.mesh.rank} of {plan.ranks})"]
        called = None if listed_layers(self.model) else called_layers(self.model)
        lines += [] if called is None else [f"  layers: {called.describe()}"]
        for stage in self.local.stages.values():
            entries = self.wrapping.entries(stage.module.modules())
            stack = ", ".join(f"{entry} ×{count}" for entry, count in entries.items()) or "nothing"
            lines += [f"  {stage.describe()}", f"    wrapping, innermost first: {stack}"]
        return "\n".join(lines)
