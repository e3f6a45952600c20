"""echelon doctor: what this machine can do for training, what is missing, and what that costs.

Findings are plain data. Importing this imports no torch; each probe imports what it needs. Some findings are
measured: memory and arithmetic of one thread, the start of ranks, messages between two. Each figure is a
median of a few tries on a machine that may be busy: an order of magnitude.
"""

import dataclasses
import platform
import re
import resource
import shutil
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import echelon
from echelon import hardware
from echelon.cli.options import Json, console, print_json
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
from echelon.quantities import GIB, MIB, counted, show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["ok", "note", "warn"]
Probe = Callable[[], Iterable["Finding"]]

_MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "cyan"), "warn": ("!", "yellow")}


@dataclass(frozen=True)
class Finding:
    """One row. `value` is for people; `number` is the same in bytes, seconds, bytes per second or FLOP/s.

    `remark` says what a note or a warning means for training, and how to fix it.
    """

    name: str
    value: str
    status: Status = "ok"
    remark: str = ""
    number: float | None = None


@dataclass(frozen=True)
class Section:
    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    sections: tuple[Section, ...]

    @property
    def findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "warn"]

    def to_dict(self) -> dict[str, Any]:
        return {"warnings": len(self.warnings), **dataclasses.asdict(self)}


def section(title: str, probes: dict[str, Probe]) -> Section:
    """Run every probe. A probe that fails is itself a finding, so the doctor works on any machine."""
    findings: list[Finding] = []
    for name, probe in probes.items():
        try:
            findings += probe()
        except Exception as error:
            reason = f"could not be found out: {type(error).__name__}: {error}"
            findings.append(Finding(name, "unknown", "note", reason))
    return Section(title, tuple(findings))


def render(report: Report) -> "RenderableType":
    """Make a row per finding under the titles of the sections, and a line with the number of warnings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for section in report.sections:
        table.add_row("", Text(section.title, "bold"))
        for finding in section.findings:
            # Text, not str: a value may be taken for markup.
            mark, remark = Text(*_MARKS[finding.status]), Text(finding.remark, "dim")
            table.add_row(mark, Text(finding.name), Text(finding.value), remark)
        table.add_row()
    if not report.warnings:
        return Group(table, Text("No problems found.", "green"))
    warned = counted(len(report.warnings), "warning")
    return Group(table, Text(f"{warned}: see the lines with !", "yellow"))


def doctor(as_json: Json = False) -> None:
    """Show what this machine can do, what is missing, and what that costs."""
    screen = console(as_json)
    with screen.status("measuring …"):
        report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        screen.print(render(report))


def examine() -> Report:
    """Examine this machine; takes a few seconds, most of them for measuring."""
    probes = (examine_versions, examine_machine, examine_devices, examine_speed, examine_extras)
    return Report(tuple(probe() for probe in probes))


_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)  # that echelon is tested with
_TESTED = "tested with: 2.11 to 2.13"
_TORCH_ADVICE = f'required: pip install "torch>=2.11" ({_TESTED})'
_OLDEST_PYTHON = (3, 11)
_MIN_OPEN_FILES = 1024
_SHARED_MEMORY = Path("/dev/shm")

# What echelon depends on, in the order of pyproject.toml, without torch, whose version is judged too.
REQUIRED = ("numpy", "safetensors", "typer", "rich", "pydantic", "pillow", "xxhash")
# Optional packages: what is lost without each, and how to install it.
EXTRAS = {
    "transformers": 'models of transformers cannot be trained as they are: pip install "echelon[hf]"',
    "tensorboard": 'no logs for TensorBoard: pip install "echelon[tensorboard]"',
}


def examine_machine() -> Section:
    return section(
        "Machine",
        {
            "processor": lambda: [Finding("processor", hardware.cpu_model())],
            "cores": lambda: [judge_cores(hardware.usable_cores())],
            "memory": lambda: [judge_memory(hardware.total_memory(), hardware.available_memory())],
            "shared memory": lambda: [
                judge_shared_memory(
                    shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None
                )
            ],
            "disk": lambda: [judge_disk(shutil.disk_usage(Path.cwd()).free)],
            "open files": lambda: [judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        },
    )


def examine_devices() -> Section:
    return section("Devices", {"cuda": _cuda, "backends": _backends, "launch": _launch_backend})


def _judge(name: str, value: str, number: int, is_enough: bool, remark: str) -> Finding:
    return Finding(name, value, "ok" if is_enough else "warn", "" if is_enough else remark, number)


def judge_cores(cores: int) -> Finding:
    remark = "ranks take turns on one core: results are right, but parallelism brings no speed"
    return _judge("cores", str(cores), cores, cores >= 2, remark)


def judge_memory(total: int, available: int | None) -> Finding:
    if available is None:
        return Finding("memory", show_bytes(total), number=total)
    value = f"{show_bytes(total)}, of which {show_bytes(available)} free"
    remark = "a rank takes about 0.2 GiB before it holds a model: close other programs, or launch few ranks"
    return _judge("memory", value, total, available >= GIB, remark)


def judge_shared_memory(size: int | None) -> Finding:
    name = f"shared memory ({_SHARED_MEMORY})"
    if size is None:
        return Finding(name, "none", "note", "data workers and NCCL use it if it exists")
    remark = (
        "data workers and NCCL pass tensors through it and die with a bus error when it is full; "
        "in Docker: --shm-size=8g"
    )
    return _judge(name, show_bytes(size), size, size >= GIB, remark)


def judge_disk(free: int) -> Finding:
    remark = "a trained model may not fit; make room, or run in a folder on another disk"
    return _judge("disk of this folder", f"{show_bytes(free)} free", free, free >= GIB, remark)


def judge_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit")
    remark = f"ranks, pipes and data workers take many; in this shell: ulimit -n {4 * _MIN_OPEN_FILES}"
    return _judge("open files", f"at most {limit}", limit, limit >= _MIN_OPEN_FILES, remark)


def _cuda() -> list[Finding]:
    import torch

    with warnings.catch_warnings(record=True) as warned:  # torch warns about a driver that does not fit
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            Finding(
                f"CUDA device {index}",
                f"{each.name}, {show_bytes(each.total_memory)}, capability {each.major}.{each.minor}",
                number=each.total_memory,
            )
            for index, each in enumerate(devices)
        ]
    if warned:
        return [Finding("CUDA devices", "none", "warn", str(warned[0].message))]
    build = "this torch is built without CUDA" if torch.version.cuda is None else "no device was found"
    return [Finding("CUDA devices", "none", "note", f"{build}; training runs on the CPU")]


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


def examine_versions() -> Section:
    return section(
        "Versions",
        {
            "echelon": lambda: [Finding("echelon", echelon.__version__)],
            "python": lambda: [judge_python(platform.python_version())],
            "torch": lambda: [judge_torch(installed("torch"))],
            "packages": lambda: [
                _judge_package(name, "warn", f"required: pip install {name}") for name in REQUIRED
            ],
        },
    )


def examine_extras() -> Section:
    return section(
        "Optional packages",
        {"extras": lambda: [_judge_package(name, "note", remark) for name, remark in EXTRAS.items()]},
    )


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge_python(installed_version: str) -> Finding:
    if _numbers(installed_version) >= _OLDEST_PYTHON:
        return Finding("Python", installed_version)
    return Finding("Python", installed_version, "warn", "echelon needs Python 3.11 or later")


def judge_torch(installed_version: str | None) -> Finding:
    if installed_version is None or _numbers(installed_version) < _OLDEST_TORCH:
        return Finding("torch", installed_version or "missing", "warn", _TORCH_ADVICE)
    if _numbers(installed_version)[:2] <= _NEWEST_TORCH:
        return Finding("torch", installed_version)
    return Finding("torch", installed_version, "note", f"newer than echelon was {_TESTED}")


def _judge_package(name: str, status_if_missing: Status, remark: str) -> Finding:
    found = installed(name)
    return Finding(name, "missing", status_if_missing, remark) if found is None else Finding(name, found)


def _numbers(installed_version: str) -> tuple[int, ...]:
    """(2, 13, 0) of '2.13.0+cpu' and of '2.13.0rc1'."""
    leading = re.match(r"\d+(\.\d+)*", installed_version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


_COPY_BYTES = 64 * MIB  # beyond the caches of most processors
_MATRIX = 1024
_LARGE, _SMALL = 16 * MIB, 8
_DEADLINE = 20.0  # for ranks that hang on a broken machine


def examine_speed() -> Section:
    return section(
        "Measured here",
        {
            "memory copy": lambda: [_memory_copy()],
            "matrix multiply": lambda: [_matrix_multiply()],
            "launch of 2 ranks": _two_ranks,
        },
    )


def _memory_copy() -> Finding:
    import torch

    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    with _one_thread():
        rate = _COPY_BYTES / _median_seconds(lambda: target.copy_(source), tries=7)
    return Finding("memory copy, one thread", show_rate(rate), number=rate)


def _matrix_multiply() -> Finding:
    import torch

    a, b = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    with _one_thread():
        rate = 2 * _MATRIX**3 / _median_seconds(lambda: a @ b, tries=5)
    return Finding("matrix multiply, one thread", f"{rate / 1e9:.0f} GFLOP/s in float32", number=rate)


def _two_ranks() -> list[Finding]:
    try:
        first, all_reduce = _start_and_run()
        again, _ = _start_and_run()
    except (RankFailed, UserError, OSError) as error:
        remark = f"only plans of one rank run: {str(error).splitlines()[0]}"
        return [Finding("launch of 2 ranks", "fails", "warn", remark)]
    large_seconds, small_seconds = all_reduce
    rate = _LARGE / large_seconds  # two ranks send 2(N−1)/N = 1 buffer each
    large = f"{show_rate(rate)} ({show_bytes(_LARGE)} in {show_seconds(large_seconds)})"
    small = f"{show_seconds(small_seconds)} ({_SMALL} bytes)"
    return [
        Finding("launch of 2 ranks", f"{show_seconds(again)} (first: {show_seconds(first)})", number=again),
        Finding("all-reduce, 2 ranks, gloo", large, number=rate),
        Finding("all-reduce latency", small, number=small_seconds),
    ]


def _start_and_run() -> tuple[float, tuple[float, float]]:
    """Return the seconds until two ranks had started, and what they measured."""
    start = time.perf_counter()
    with Ranks(2, backend="gloo", deadline=_DEADLINE) as ranks:
        seconds = time.perf_counter() - start
        return seconds, ranks.run(time_all_reduce)[0]


def time_all_reduce() -> tuple[float, float]:
    """Return the seconds of an all-reduce of a large buffer, and of a small one; in both ranks."""
    import torch
    import torch.distributed as dist

    from echelon.collectives import Ledger, TorchGroup

    assert dist.group.WORLD is not None
    group = TorchGroup("data", dist.group.WORLD, Ledger())
    large, small = torch.zeros(_LARGE // 4), torch.zeros(_SMALL // 4)
    return (
        _median_seconds(lambda: group.all_reduce(large), tries=7),
        _median_seconds(lambda: group.all_reduce(small), tries=50),
    )


def _median_seconds(fn: Callable[[], object], tries: int) -> float:
    fn()  # the first call pays for memory and connections
    return median(timeit.repeat(fn, number=1, repeat=tries))


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
