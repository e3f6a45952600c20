"""Traces of torch.profiler: what the streams did, with the numbers of HolisticTraceAnalysis."""

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from echelon.report.contents import contents
from echelon.report.device_trace import activities, device_times, idle_causes, read_device_times
from echelon.report.run_files import read_run
from tests.report.folders import write_run
from tests.report.profiler_traces import COMMUNICATION, COMPUTE, COPIES, event, write_trace
from tests.train.integrations.packages import need, run_program

CAUSES = {"host_wait": "the host", "kernel_wait": "between kernels", "other": "other streams"}


def kernel(
    name: str, start: float, end: float, stream: int = COMPUTE, launched: float = 0.0
) -> list[dict[str, Any]]:
    """A kernel and its launch, in microseconds."""
    number = int(1000 * start) + stream
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, launched, 1, {"correlation": number}),
        event(category, name, 0, stream, start, end - start, {"stream": stream, "correlation": number}),
    ]


def test_each_moment_is_compute_exposed_or_idle() -> None:
    events = [
        *kernel("gemm", 100, 140),
        *kernel("gemm", 160, 200, launched=150),
        *kernel("ncclDevKernel_AllReduce_Sum_f32", 130, 180, COMMUNICATION),
        *kernel("Memcpy DtoH", 230, 260, COPIES),
        event("cpu_op", "aten::mm", 1, 1, 0, 500, {}),
    ]
    times = device_times(3, activities(events))
    assert times is not None
    assert times.rank == 3
    wanted = (160e-6, 80e-6, 50e-6, 30e-6)
    assert times[1:5] == pytest.approx(wanted)  # window, compute, exposed, idle
    assert times.overlap == pytest.approx(30 / 50)  # 130–140 and 160–180 of 130–180
    assert times.idle_by == pytest.approx({"the host": 20e-6})
    assert device_times(0, activities([event("cpu_op", "aten::mm", 1, 1, 0, 500, {})])) is None
    without_nccl = device_times(0, activities(kernel("gemm", 1, 2)))
    assert without_nccl is not None
    assert without_nccl.overlap is None


def test_idle_time_has_causes() -> None:
    rows = [
        *kernel("a", 100, 110),
        *kernel("b", 115, 120, launched=90),  # queued: a short gap
        *kernel("c", 150, 160, launched=121),  # launched when b had ended
        *kernel("d", 200, 210, launched=100),  # queued, and waits long
    ]
    found = idle_causes(activities(rows))
    assert found == pytest.approx({"between kernels": 5e-6, "the host": 30e-6, "other streams": 40e-6})


def test_strange_traces_are_left_out_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    assert read_device_times(tmp_path, notes) == notes == []
    folder = tmp_path / "profiler"
    folder.mkdir()
    write_trace(folder / "a.pt.trace.json", 1, random.Random(0), kernels=10)
    (folder / "b.json.gz").write_bytes(gzip.compress((folder / "a.pt.trace.json").read_bytes()))
    (folder / "c.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    (folder / "d.json").write_text("[1]")
    (folder / "e.json").write_text(
        '{"traceEvents": [7, {"ph": "X", "cat": "kernel", "args": {"stream": "x"}}]}'
    )
    (folder / "f.json").mkdir()
    (folder / "g.txt").write_text("")
    found = read_device_times(tmp_path, notes)
    assert [row.rank for row in found] == [1]
    assert [note.split(":")[0].removeprefix("profiler/") for note in notes] == [
        "b.json.gz is left out",
        "c.json.gz cannot be read, and is left out",
        "d.json cannot be read, and is left out",
        "e.json is left out",
        "f.json cannot be read, and is left out",
    ]


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "profiler").mkdir()
    path = tmp_path / "profiler" / "rank.json"
    windows = []
    for seed in range(2):
        write_trace(path, 0, random.Random(seed), kernels=10)
        os.utime(path, ns=(seed, seed))
        windows += [row.window for row in read_device_times(tmp_path, [])]
    assert len(set(windows)) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_holistic_trace_analysis_finds_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("hta", "pandas", "plotly", "pydot")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")  # or it cuts every kernel to whole microseconds
    draw = random.Random(seed)
    folder = tmp_path / "profiler"
    folder.mkdir()
    paths = [write_trace(folder / f"{rank}.pt.trace.json", rank, draw) for rank in range(3)]
    theirs = run_program("trace_analysis.py", *map(str, paths), folder=tmp_path)
    notes: list[str] = []
    rows = read_device_times(tmp_path, notes)
    assert ([row.rank for row in rows], notes) == ([0, 1, 2], [])
    for row in rows:
        found = theirs[str(row.rank)]
        ours = {name: 100 * getattr(row, name) / row.window for name in ("compute", "exposed", "idle")}
        assert row.overlap is not None
        ours["overlap"] = 100 * row.overlap
        assert ours == pytest.approx({name: found[name] for name in ours}, abs=0.01)
        assert min(ours.values()) > 5  # or nothing was compared
        idle_by = {CAUSES[name]: 1e-6 * found["idle_by"][f"{COMPUTE} {name}"] for name in CAUSES}
        assert row.idle_by == pytest.approx(idle_by, abs=1e-7)


def test_the_page_has_the_numbers_of_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert contents(read_run(run), {})["devices"] == []
    (run / "profiler").mkdir()
    for rank in range(2):
        write_trace(run / "profiler" / f"{rank}.json", rank, random.Random(rank))
    rows = json.loads(json.dumps(contents(read_run(run), {})["devices"]))
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:  # numbers of six digits
        assert row["compute"] + row["exposed"] + row["idle"] == pytest.approx(row["window"], rel=1e-5)
