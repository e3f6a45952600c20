"""offload=optimizer: the user's optimizer over twins in host memory, who waits for its weights, and whether
the memory suffices: asked before any is taken. All ranks of a machine share its memory: they exchange what
each needs, and refuse together.
"""

import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from echelon.collectives.agreement import gather_rows
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.hardware import usable_cores
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.weight_access import NewWeights, ResidentWeights
from echelon.parallel.data.zero.zero import Zero
from echelon.parallel.expert.modules import experts_of
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.quantities import show_bytes
from echelon.state.ownership import LocalParameter
from echelon.update.offload.host_twins import HostTwins
from echelon.update.offload.host_worker import HostWorker
from echelon.update.offload.optimizer import HostStepper
from echelon.update.optim.needs import Need, inner_optimizers, need_of
from echelon.update.parameter_parts import has_parts
from echelon.update.precision.rounding import KeyedRounding, Placement


def updates_on_host(plan: Plan) -> bool:
    return "optimizer" in plan.offload


def make_host_stepper(
    optimizer: torch.optim.Optimizer,
    local: LocalStages,
    mesh: Mesh,
    wrapping: Wrapping,
    rounding: KeyedRounding | None,
    placements: Mapping[nn.Parameter, Placement],
    *,
    masters: bool,
) -> HostStepper:
    """Return the optimizer, of the model's own parameters, over their twins on the host."""
    plan = mesh.plan
    units = [unit for sharing in local.sharings for unit in _units(sharing)]
    runs = {
        each.tensor: sharing.host_run(each)
        for sharing in local.sharings
        for each in sharing.local_parameters()
    }
    twins = HostTwins(
        [each for unit in units for each in unit],
        mesh.boundary,
        masters=masters,
        rounding=rounding,
        placements=placements,
        host_runs={tensor: run for tensor, run in runs.items() if run is not None},
        in_place=plan.delay == 0,
    )
    stepper = HostStepper(
        optimizer,
        units,
        twins,
        mesh.boundary,
        HostWorker(mesh.device, _num_threads(mesh)),
        delay=plan.delay > 0,
        in_backward=plan.update != "step",
    )
    _guard_weights(stepper, local, wrapping)
    return stepper


def _guard_weights(stepper: HostStepper, local: LocalStages, wrapping: Wrapping) -> None:
    """Let every reader of weights wait until the new ones are there; after a failure, let none read them."""
    watched = [
        NewWeights(sharing.parameter_set, sharing.kept_whole(), stepper.wait, wrapping)
        for sharing in local.sharings
    ]

    def expect(expected: Sequence[LocalParameter]) -> None:
        for each in watched:
            each.expect(expected)

    def arrive(arrived: Sequence[LocalParameter]) -> None:
        for each in watched:
            each.arrive(arrived)

    stepper.weights.on_expect, stepper.weights.on_arrive = expect, arrive
    resident = [
        ResidentWeights(sharing.resident_parameters(), stepper.check)
        for sharing in local.sharings
        if isinstance(sharing, Zero)
    ]

    def hide_all() -> None:
        for of_set in watched:
            of_set.hide()
        for of_zero in resident:
            of_zero.hide()

    # Some weights are those of after the update and others of before: a model of both would go unnoticed.
    stepper.on_failure = hide_all
    for sharing in local.sharings:
        sharing.expect_weights(stepper.wait)


def check_host_optimizer(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    name, plan = type(optimizer).__name__, mesh.plan
    if any(group.get("capturable") for each in inner_optimizers(optimizer) for group in each.param_groups):
        raise UserError(
            f"optimizer {name}(capturable=True) with plan '{plan}': it is for CUDA graphs, and the update "
            "runs on the host; drop capturable, or offload=optimizer"
        )
    need = need_of(optimizer)
    if has_parts(plan) and need is Need.WHOLE:
        raise UserError(
            f"optimizer {name} with plan '{plan}': it needs whole parameters, which ranks would put together "
            "on a device, and the update runs on the host; use zero=0, tensor=1 and expert=1, or drop "
            "offload=optimizer"
        )
    if has_parts(plan) and need is Need.SUMS and mesh.device.type == "cuda" and mesh.group("all").size > 1:
        raise UserError(
            f"optimizer {name} with plan '{plan}': ranks add up its sums over a network of GPUs, and the "
            "update runs on the host; use zero=0, tensor=1 and expert=1, another optimizer, or drop "
            "offload=optimizer"
        )


def _units(sharing: Sharing) -> list[list[LocalParameter]]:
    """Return the local parameters of a set by its units, in the model's order; those in no unit come last."""
    units = sharing.parameter_set.units
    number = {parameter: index for index, unit in enumerate(units) for _, parameter in unit.parameters}
    groups: list[list[LocalParameter]] = [[] for _ in range(len(units) + 1)]
    for each in sharing.local_parameters():
        groups[number.get(each.parameter, len(units))].append(each)
    return [group for group in groups if group]


def _num_threads(mesh: Mesh) -> int | None:
    """Return a rank's share of the cores, beside a GPU; on the CPU, those that the rank computes with."""
    if mesh.device.type != "cuda":
        return None
    return max(1, usable_cores() // max(1, min(mesh.plan.ranks, torch.cuda.device_count())))


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_LIMIT = 2**62


def check_host_memory(needs: Mapping[str, int], mesh: Mesh) -> None:
    """Raise, on every rank, if the ranks of some machine need more of its memory than is there. All ranks
    call this with the same categories; `needs`: the bytes of each that this rank will take."""
    if not mesh.plan.offload:
        return
    free = mesh.free_host_memory()
    own = [_machine(), _NO_LIMIT if free is None else free, *needs.values()]
    own_row = torch.tensor(own, dtype=torch.int64, device=mesh.device)
    rows: list[list[int]] = gather_rows(own_row, mesh.group("all"), "agreement").tolist()
    for machine in dict.fromkeys(row[0] for row in rows):
        local = [row[1:] for row in rows if row[0] == machine]
        sizes = dict(zip(needs, map(sum, zip(*(row[1:] for row in local), strict=True)), strict=True))
        free = min(row[0] for row in local)
        if sum(sizes.values()) > free:
            raise UserError(_message(sizes, free, len(local), mesh))


def parameter_bytes(modules: Mapping[int, nn.Module], mesh: Mesh, resident_bytes: int) -> int:
    """Return the bytes that offload=parameters adds on the host; on a CPU, weights with values only move."""
    if "parameters" not in mesh.plan.offload:
        return 0
    parameters = {p for module in modules.values() for p in module.parameters()}
    if mesh.device.type == "cpu" and not any(p.is_meta for p in parameters):
        return 0
    experts = {p for module in modules.values() for p in experts_of(module)}
    total = _held_bytes(parameters - experts, mesh, "shard")
    total += _held_bytes(experts, mesh, "expert_shard") if experts else 0
    return max(0, total - resident_bytes)


def _held_bytes(parameters: Iterable[nn.Parameter], mesh: Mesh, axis: str) -> int:
    """Return the bytes of this rank's part, if the ranks along `axis` share parameters out."""
    parts = mesh.group(axis).size if mesh.plan.zero == 3 else 1
    return sum(p.numel() * p.element_size() for p in parameters) // parts


def _machine() -> int:
    """The same number for all processes of one machine, or container."""
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    return zlib.crc32(f"{socket.gethostname()} {boot}".encode())


def _message(sizes: Mapping[str, int], free: int, ranks: int, mesh: Mesh) -> str:
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes.items() if size)
    together = f"the {ranks} ranks of a machine put" if ranks > 1 else "it puts"
    return (
        f"plan '{mesh.plan}': {together} {show_bytes(sum(sizes.values()))} into host memory ({parts}), and "
        f"{show_bytes(free)} of it is available; offload less, use more machines with zero=3, or a smaller "
        "model; with offload=parameters resident_bytes keeps a part of the weights on the device"
    )
