"""Findings about this machine: processor, memory, disk, limits, CUDA devices, backends of torch."""

import resource
import shutil
import warnings
from pathlib import Path

from echelon import hardware
from echelon.cli.doctor.report import Finding, Section, section
from echelon.quantities import GIB, show_bytes

_MIN_OPEN_FILES = 1024
_SHARED_MEMORY = Path("/dev/shm")


def examine_machine() -> Section:
    return section(
        "Machine",
        {
            "processor": lambda: [Finding("processor", hardware.cpu_model())],
            "cores": lambda: [judge_cores(hardware.usable_cores())],
            "memory": lambda: [judge_memory(hardware.total_memory(), hardware.available_memory())],
            "shared memory": lambda: [judge_shared_memory(_shared_memory_bytes())],
            "disk": lambda: [judge_disk(shutil.disk_usage(Path.cwd()).free)],
            "open files": lambda: [judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        },
    )


def examine_devices() -> Section:
    return section("Devices", {"cuda": _cuda, "backends": _backends, "launch": _launch_backend})


def judge_cores(cores: int) -> Finding:
    if cores >= 2:
        return Finding("cores", str(cores), number=cores)
    remark = "ranks take turns on one core: results are right, but parallelism brings no speed"
    return Finding("cores", str(cores), "warn", remark, cores)


def judge_memory(total: int, available: int | None) -> Finding:
    if available is None:
        return Finding("memory", show_bytes(total), number=total)
    value = f"{show_bytes(total)}, of which {show_bytes(available)} free"
    if available >= GIB:
        return Finding("memory", value, number=total)
    remark = "a rank takes about 0.2 GiB before it holds a model: close other programs, or launch few ranks"
    return Finding("memory", value, "warn", remark, total)


def judge_shared_memory(size: int | None) -> Finding:
    name = f"shared memory ({_SHARED_MEMORY})"
    if size is None:
        return Finding(name, "none", "note", "data workers and NCCL use it if it exists")
    if size >= GIB:
        return Finding(name, show_bytes(size), number=size)
    remark = (
        "data workers and NCCL pass tensors through it and die with a bus error when it is full; "
        "in Docker: --shm-size=8g"
    )
    return Finding(name, show_bytes(size), "warn", remark, size)


def judge_disk(free: int) -> Finding:
    value = f"{show_bytes(free)} free"
    if free >= GIB:
        return Finding("disk of this folder", value, number=free)
    remark = "a trained model may not fit; make room, or run in a folder on another disk"
    return Finding("disk of this folder", value, "warn", remark, free)


def judge_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    if limit >= _MIN_OPEN_FILES:
        return Finding("open files", f"at most {limit}", number=limit)
    remark = f"ranks, pipes and data workers take many; in this shell: ulimit -n {4 * _MIN_OPEN_FILES}"
    return Finding("open files", f"at most {limit}", "warn", remark, limit)


def _shared_memory_bytes() -> int | None:
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


def _cuda() -> list[Finding]:
    import torch

    with warnings.catch_warnings(record=True) as warned:  # torch warns about a driver that does not fit
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return [_cuda_device(index) for index in range(torch.cuda.device_count())]
    if warned:
        return [Finding("CUDA devices", "none", "warn", str(warned[0].message))]
    build = "this torch is built without CUDA" if torch.version.cuda is None else "no device was found"
    return [Finding("CUDA devices", "none", "note", f"{build}; training runs on the CPU")]


def _cuda_device(index: int) -> Finding:
    import torch

    device = torch.cuda.get_device_properties(index)
    value = f"{device.name}, {show_bytes(device.total_memory)}, capability {device.major}.{device.minor}"
    return Finding(f"CUDA device {index}", value, number=device.total_memory)


def _backends() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        remark = "this torch is built without torch.distributed: only plans with one rank run"
        return [Finding("backends", "none", "warn", remark)]
    availability = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    names = [name for name, available in availability.items() if available]
    if "gloo" in names:
        return [Finding("backends", ", ".join(names))]
    remark = "without gloo, launch works only where every rank has a CUDA device"
    return [Finding("backends", ", ".join(names) or "none", "warn", remark)]


def _launch_backend() -> list[Finding]:
    from echelon.launching.group import launch_backend

    return [Finding("launch of 2 ranks uses", launch_backend(2))]
