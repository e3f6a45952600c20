"""What is in a run folder. A file that is missing, cut off or strange is an empty one, and a note says so."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.errors import UserError
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint.file_checks import open_regular, read_regular
from echelon.state.checkpoint.folder import RUN_FILE
from echelon.train.events import MEASURED, METRICS
from echelon.train.loop import TRACE
from echelon.train.run import SAVED

_LONGEST_LINE = 2**22
_MOST_BYTES = 2**29
_MOST_TRACE_BYTES, _MOST_TRACE_VALUES = 2**28, 2**24
COLUMNS = (
    *("loss", "grad_norm", "learning_rate", "tokens", "seconds", "moved_bytes", "comm_seconds"),
    *("comm_hidden_seconds", "memory_bytes", "loss_scale", "skipped"),
)
Column = npt.NDArray[np.float64]


@dataclass
class RunFiles:
    """The files of one run, read. `notes` say what could not be."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, Column] = field(default_factory=dict)  # by name, `step` among them
    evaluations: dict[str, Column] = field(default_factory=dict)
    gates: list[dict[str, Any]] = field(default_factory=list)  # of the last step that has them
    busiest: dict[str, Column] = field(default_factory=dict)  # step → the largest share of an expert
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(path: Path) -> RunFiles:
    """Read a run folder; a UserError for what is none."""
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path}: {state}; give the folder of a run, like runs/train-20260102-030405")
    if not any((path / name).exists() for name in (RUN_FILE, METRICS)):
        raise UserError(f"{path}: is not the folder of a run: it has neither {RUN_FILE} nor {METRICS}")
    run = RunFiles(path)
    run.about = _object(run, RUN_FILE, needed=True)
    _read_metrics(run)
    run.saved = [step for row in _lines(run, SAVED) if (step := whole(row.get("step"))) is not None]
    run.measured = _object(run, MEASURED)
    run.trace = _object(run, TRACE, most_bytes=_MOST_TRACE_BYTES, most_values=_MOST_TRACE_VALUES)
    return run


def _object(run: RunFiles, name: str, *, needed: bool = False, **limits: int) -> dict[str, Any]:
    path = run.path / name
    if not path.exists():
        if needed:
            run.notes.append(f"{name} is missing: the job, the plan and the versions are not known")
        return {}
    try:
        value = parse_json(read_regular(path, limits.get("most_bytes", 2**26)), **limits)
    except (ValueError, OSError, RecursionError) as error:
        run.notes.append(f"{name} cannot be read, and is left out: {error}")
        return {}
    if not isinstance(value, dict):
        run.notes.append(f"{name} is left out: it is not a JSON object")
        return {}
    return value


def _lines(run: RunFiles, name: str) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. A killed process leaves half a line: it is left out."""
    path, num_bad = run.path / name, 0
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST_LINE):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                else:
                    num_bad += 1
                if file.tell() > _MOST_BYTES:
                    run.notes.append(f"{name} is longer than {_MOST_BYTES:,} bytes: the rest is left out")
                    break
    except (ValueError, OSError) as error:
        run.notes.append(f"{name} cannot be read: {error}")
    if num_bad:
        run.notes.append(f"{name}: {num_bad} lines that are not JSON objects are left out")


def _read_metrics(run: RunFiles) -> None:
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    busiest: dict[int, float] = {}
    for row in _lines(run, METRICS):
        step = whole(row.get("step"))
        if step is None:
            continue
        kind = row.get("kind")
        if kind == "step":
            steps[step] = row
            gates = _gates(row.pop("experts", None))
            if gates:
                run.gates = gates
                busiest[step] = max(gate["busiest"] for gate in gates)
        elif kind == "evaluation":
            evaluations[step] = row
        elif kind == "rollback":
            begin, reason = whole(row.get("from_step")), row.get("reason")
            run.rollbacks.append({"step": step, "from": begin, "reason": reason})
    run.steps = _columns(steps, COLUMNS)
    run.evaluations = _columns(evaluations, ("loss", "accuracy"))
    if busiest:
        run.busiest = {
            "step": np.array(sorted(busiest), dtype=np.float64),
            "share": np.array([busiest[step] for step in sorted(busiest)]),
        }


def _columns(rows: dict[int, dict[str, Any]], names: tuple[str, ...]) -> dict[str, Column]:
    order = sorted(rows)
    if not order:
        return {}
    columns = {name: np.array([number(rows[step].get(name)) for step in order]) for name in names}
    return {"step": np.array(order, dtype=np.float64), **columns}


def _gates(rows: Any) -> list[dict[str, Any]]:
    """The gates of a step, each with the share of its busiest expert as a multiple of the fair one."""
    gates = []
    for row in rows if isinstance(rows, list) else []:
        tokens = row.get("tokens") if isinstance(row, dict) else None
        if not isinstance(tokens, list) or not tokens:
            continue
        counts = [max(0.0, value) if math.isfinite(value := number(each)) else 0.0 for each in tokens]
        total = sum(counts)
        gates.append(
            {
                "gate": str(row.get("gate")),
                "tokens": counts,
                "dropped": finite(row.get("dropped")),
                "entropy": finite(row.get("entropy")),
                "busiest": max(counts) * len(counts) / total if total else 1.0,
            }
        )
    return gates


def number(value: Any) -> float:
    """A number of a file; NaN for anything else."""
    if isinstance(value, bool):
        return float(value)
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def finite(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if is_whole else None


def file_mark(path: Path) -> str:
    """The size and the time of a file, which tell whether it has changed; '-' if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_size}.{status.st_mtime_ns}"
