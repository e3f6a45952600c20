"""What this process knows of its host and its GPUs, for `placement.py`."""

import os
import socket
from pathlib import Path

import torch

from echelon.errors import UserError
from echelon.launching.placement import RankReport

# Of torchrun, SLURM, Open MPI, MPICH and Intel MPI, and PALS, in this order.
_LOCAL_RANK_NAMES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def report_visible() -> RankReport:
    """The report of a rank that has not chosen its GPU yet: it lists every GPU that it sees."""
    return RankReport(socket.gethostname(), host_id(), local_rank(), visible_gpus())


def report_current() -> RankReport:
    """The report of a rank whose user has chosen a GPU: it lists the current one."""
    gpus = (_gpu_id(torch.cuda.current_device()),) if torch.cuda.is_available() else ()
    return RankReport(socket.gethostname(), host_id(), local_rank(), gpus)


def host_id() -> str:
    """Equal for processes that NCCL takes for processes of one host."""
    if identity := os.environ.get("NCCL_HOSTID"):
        return identity
    # Containers may have the name of another host, and a name that is not unique has another boot id.
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}"


def local_rank() -> int | None:
    """The number of this rank on its host, if the launcher gave one."""
    for name in _LOCAL_RANK_NAMES:
        if text := os.environ.get(name):
            if not text.isdecimal():
                raise UserError(f"{name}={text!r} in the environment: must be an integer of at least 0")
            return int(text)
    return None


def visible_gpus() -> tuple[str, ...]:
    """The identities of the GPUs that this process sees, in CUDA's order."""
    if _was_forked_after_cuda():
        raise UserError(
            "CUDA was started in the fork server, so no rank can use it: a module that ranks preload "
            "uses CUDA when it is imported. Move that into a function, or do not pass the module to "
            "echelon.launching.preload."
        )
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu_id(index) for index in range(torch.cuda.device_count()))


def _was_forked_after_cuda() -> bool:
    return bool(torch.cuda._is_in_bad_fork())


def _gpu_id(index: int) -> str:
    """The same for every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(index).uuid)
