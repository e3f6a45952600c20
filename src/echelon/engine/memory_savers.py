"""What keeps the memory of a step small, around the layers of this rank: each part if the plan says so."""

from typing import NamedTuple

from echelon.activation_offload import Carrier
from echelon.engine.compressing import CompressionReport, compress_layers
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.offloading import offload_activations
from echelon.engine.recomputing import recompute_layers
from echelon.engine.sharing import accumulate_gradients
from echelon.mesh import Mesh
from echelon.runtime import LocalStages
from echelon.wrapping import Wrapping


class MemorySavers(NamedTuple):
    """Those that a step speaks to."""

    compression: CompressionReport | None = None
    carrier: Carrier | None = None


def save_memory(local: LocalStages, mesh: Mesh, layers: LayerSharding, wrapping: Wrapping) -> MemorySavers:
    """Gradients add up in place, and what layers save is encoded, dropped, or goes to host memory; in this
    order from the inside outward."""
    accumulate_gradients(local, mesh.plan, wrapping)
    compression = compress_layers(local.modules, mesh, wrapping)
    recompute_layers(local, mesh, layers.view, wrapping)
    return MemorySavers(compression, offload_activations(local, mesh, wrapping))
