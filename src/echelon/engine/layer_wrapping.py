"""What is put around the layers of this rank once their weights have a place, as far as the plan says so."""

from typing import NamedTuple

from echelon.collectives.mesh import Mesh
from echelon.engine.compiling import compile_layers
from echelon.engine.sharing import accumulate_gradients
from echelon.memory.activation_offload import ActivationOffload, offload_activations
from echelon.memory.gist import CompressionReport, compress_layers
from echelon.memory.recompute import recompute_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages


class MemorySavers(NamedTuple):
    """What keeps the memory of a step small, and hears of its steps."""

    compression: CompressionReport | None = None
    activation_offload: ActivationOffload | None = None


def wrap_layers(local: LocalStages, mesh: Mesh, layers: LayerSharding, wrapping: Wrapping) -> MemorySavers:
    """Layers are compiled, gradients add up in place, and what layers save is encoded, dropped, or goes to
    host memory; in this order from the inside outward."""
    compile_layers(local.modules, mesh.plan, wrapping)
    accumulate_gradients(local, mesh.plan, wrapping)
    compression = compress_layers(local.modules, mesh, wrapping)
    recompute_layers(local, mesh, layers.view, wrapping)
    return MemorySavers(compression, offload_activations(local, mesh, wrapping))
