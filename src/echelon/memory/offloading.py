"""offload=activations: the layers of this rank's stages give what they save to host memory."""

from functools import partial

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.hardware import available_memory, total_memory
from echelon.memory.activation_offload import Carrier, HostPool, OffloadedLayer
from echelon.memory.recompute import goes_back_at_once
from echelon.memory.recompute.layer_call import weight_storages
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.stage import LocalStages, Stage
from echelon.program import Program

_SPARED = 32  # the part of the host's memory that is left to others


def offload_activations(local: LocalStages, mesh: Mesh, wrapping: Wrapping) -> Carrier | None:
    """If the plan says so, let what layers save go to host memory."""
    if "activations" not in mesh.plan.offload:
        return None
    going_back = {
        number: len(listed_layers(stage.module))
        for number, stage in local.stages.items()
        if _goes_back(local.program, number)
    }
    pool = HostPool(mesh.boundary, _free_bytes)
    carrier = Carrier(mesh.boundary, mesh.ledger, mesh.device, pool, going_back)
    for stage in local.stages.values():
        layers = listed_layers(stage.module)
        if not layers:
            raise UserError(
                f"plan '{mesh.plan}': {type(stage.module).__name__} lists no layers, whose activations would "
                f"go to host memory one after the other; {how_to_list(stage.module)}"
            )
        for layer in layers:
            weights = partial(weight_storages, list(layer.modules()))
            wrapping.wrap(OffloadedLayer(layer, carrier, weights))
        _refuse_later(stage, mesh, carrier)
    return carrier


def _goes_back(program: Program, stage: int) -> bool:
    """Whether all of the backward pass of a stage follows its forward pass at once."""
    return goes_back_at_once(program, stage) and not program.halves


def _refuse_later(stage: Stage, mesh: Mesh, carrier: Carrier) -> None:
    """In the first step, before its update, all ranks refuse what does not fit into the memory of one's host.
    Later, what does not fit stays on the device."""
    before = stage.check_second_runs

    def check() -> None:
        if carrier.pool.refusal is not None:
            raise UserError(
                f"plan '{mesh.plan}': activations of rank {mesh.rank} do not fit into the memory of its "
                f"host: {carrier.pool.refusal}; use smaller or fewer microbatches in flight, recompute=full, "
                "or drop activations from offload"
            )
        before()

    stage.check_second_runs = check


def _free_bytes() -> int | None:
    available = available_memory()
    return None if available is None else available - total_memory() // _SPARED
