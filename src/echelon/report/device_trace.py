"""What the streams of GPUs did, from traces of torch.profiler in `profiler/` of the run folder, one per rank.

The terms are those of HolisticTraceAnalysis, so that both say the same of one trace:

    window      from the start of the first kernel or copy to the end of the last
    compute     a kernel runs that is none of NCCL's
    exposed     kernels of NCCL or copies run, and none that computes
    idle        nothing runs
    overlap     of the time of NCCL's kernels, the part in which another kernel runs

`idle_by` is of the stream that computes most. A kernel that was launched after the one before had ended waits
for the host. Of one that was queued in time, a short gap is between kernels, and a longer one is a wait for
what runs on other streams.
"""

import gzip
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from echelon.report.analysis import common, length, union
from echelon.report.run_files import finite, whole
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint.file_checks import open_regular

FOLDER = "profiler"
_MOST_FILES, _MOST_BYTES, _MOST_VALUES = 64, 2**28, 2**25
_LAUNCH_GAP = 30e-6  # seconds from kernel to kernel that a queue may take
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class Activity(NamedTuple):
    """A kernel, a copy or a memset, in seconds. `launched`: when the host had called for it."""

    start: float
    end: float
    stream: int
    kind: str  # compute, communication, memory
    launched: float | None


class DeviceTimes(NamedTuple):
    """Seconds of one rank."""

    rank: int
    window: float
    compute: float
    exposed: float
    idle: float
    overlap: float | None  # None: no kernel of NCCL ran
    idle_by: dict[str, float]


def read_device_times(run: Path, notes: list[str]) -> list[DeviceTimes]:
    """Of each trace that can be read, by rank; `notes` get why others cannot be."""
    folder = run / FOLDER
    paths = sorted(each for each in folder.glob("*.json*") if each.name.endswith((".json", ".json.gz")))
    if len(paths) > _MOST_FILES:
        notes.append(f"{FOLDER}/ has {len(paths)} traces: those after the first {_MOST_FILES} are left out")
    found: dict[int, DeviceTimes] = {}
    for path in paths[:_MOST_FILES]:
        try:
            about = path.stat()
            times = _read(path, about.st_size, about.st_mtime_ns)
        except (ValueError, OSError, EOFError, RecursionError) as error:
            notes.append(f"{FOLDER}/{path.name} cannot be read, and is left out: {error}")
            continue
        if times is None:
            notes.append(f"{FOLDER}/{path.name} is left out: it has no kernel of a GPU")
        elif times.rank in found:
            notes.append(f"{FOLDER}/{path.name} is left out: another trace is of rank {times.rank} too")
        else:
            found[times.rank] = times
    return [found[rank] for rank in sorted(found)]


@lru_cache(_MOST_FILES)  # a page that follows a run asks again and again; the arguments change with the file
def _read(path: Path, size: int, changed: int) -> DeviceTimes | None:  # noqa: ARG001
    with open_regular(path) as file:
        data = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(_MOST_BYTES + 1)
    trace = parse_json(data, most_bytes=_MOST_BYTES, most_values=_MOST_VALUES)
    if not isinstance(trace, dict):
        raise ValueError("it is not a JSON object")
    about = trace.get("distributedInfo")
    rank = whole(about.get("rank")) if isinstance(about, dict) else None
    return device_times(rank or 0, activities(trace.get("traceEvents")))


def activities(events: Any) -> list[Activity]:
    """What ran on the GPU, of the events of a trace; anything strange in it is left out."""
    rows = [each for each in events if isinstance(each, dict)] if isinstance(events, list) else []
    rows = [each for each in rows if each.get("ph") == "X" and isinstance(each.get("args"), dict)]
    launches = {
        each["args"]["correlation"]: start / 1e6
        for each in rows
        if each.get("cat") in _LAUNCHES
        and whole(each["args"].get("correlation")) is not None
        and (start := finite(each.get("ts"))) is not None
    }
    found = []
    for row in rows:
        start, seconds = finite(row.get("ts")), finite(row.get("dur"))
        stream, correlation = whole(row["args"].get("stream")), whole(row["args"].get("correlation"))
        if row.get("cat") in _ON_DEVICE and stream is not None and start is not None and seconds is not None:
            kind, launched = _kind(row), launches.get(correlation)
            found.append(Activity(start / 1e6, (start + seconds) / 1e6, stream, kind, launched))
    return sorted(found)


def _kind(row: dict[str, Any]) -> str:
    name = str(row.get("name"))
    if name.startswith("nccl") and "Kernel" in name:
        return "communication"
    return "compute" if row["cat"] == "kernel" else "memory"


def device_times(rank: int, found: Sequence[Activity]) -> DeviceTimes | None:
    """The sums of one rank; None of a trace without a kernel."""
    if not found:
        return None
    window = max(each.end for each in found) - min(each.start for each in found)
    busy, compute, communication = (
        union((each.start, each.end) for each in found if not kinds or each.kind in kinds)
        for kinds in ((), ("compute",), ("communication",))
    )
    computing, idle, talking = length(compute), window - length(busy), length(communication)
    overlap = length(common(communication, compute)) / talking if talking else None
    return DeviceTimes(
        rank, window, computing, window - idle - computing, idle, overlap, idle_causes(_main_stream(found))
    )


def _main_stream(found: Iterable[Activity]) -> list[Activity]:
    """What ran on the stream that computes most."""
    streams: dict[int, list[Activity]] = {}
    for each in found:
        streams.setdefault(each.stream, []).append(each)
    return max(
        streams.values(), key=lambda rows: sum(row.end - row.start for row in rows if row.kind == "compute")
    )


def idle_causes(stream: Sequence[Activity]) -> dict[str, float]:
    """Seconds between the activities of one stream, by what they wait for."""
    causes: dict[str, float] = {}
    for before, after in pairwise(stream):
        gap = after.start - before.end
        if after.launched is not None and after.launched > before.end:
            cause = "the host"
        else:
            cause = "between kernels" if gap < _LAUNCH_GAP else "other streams"
        causes[cause] = causes.get(cause, 0.0) + gap
    return causes
