"""The check for drift, as a plan has it."""

from echelon.collectives.mesh import Mesh
from echelon.engine.audit.drift import DriftCheck, find_copies
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages


def make_drift_check(local: LocalStages, layers: LayerSharding, mesh: Mesh, check_every: int) -> DriftCheck:
    sharded = layers.sharded
    whole = [] if sharded is None else [*sharded.partial, *sharded.replicated]
    return DriftCheck(find_copies(local, whole, mesh), mesh, check_every)
