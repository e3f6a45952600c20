"""All that a page shows of a run, as plain data. Nothing here is HTML: texts of the run are texts."""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from echelon.quantities import show_bytes, show_seconds
from echelon.report.analysis import AXES, Analysis, analyse
from echelon.report.device_trace import read_device_times
from echelon.report.run_files import Column, RunFiles, finite, whole
from echelon.report.timeline import timeline
from echelon.report.trace_reader import read_trace

_MOST_EVENTS = 500
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
# Of the planner's seconds: which of our parts they are.
_PARTS = {
    "compute": ("compute", "recompute", "host"),
    "pipeline": ("pipeline", "bubble"),
    "other": ("offload", "stragglers"),
    **{name: (name,) for name in ("tensor", "context", "expert", "data", "optimizer")},
}


def contents(run: RunFiles, foresight: dict[str, Any]) -> dict[str, Any]:
    """One run; `foresight` as `foresee` has made it, or {}."""
    trace = read_trace(run.trace)
    analysis = analyse(trace) if trace.steps else None
    prediction = foresight.get("prediction")
    devices = read_device_times(run.path, run.notes)
    return {
        "name": run.path.name or str(run.path),
        "path": str(run.path),
        "state": str(run.about.get("state", "unknown")),
        "reason": _text(run.about.get("reason")),
        "started": _text(run.about.get("started")),
        "plan": _text(run.about.get("plan")),
        "unit": str(_table(run.about, "summary").get("unit", "tokens")),
        "figures": figures(run, prediction, analysis),
        "series": series(run),
        "marks": marks(run),
        "parts": parts(run, prediction, analysis),
        "analysis": None if analysis is None else _plain(analysis),
        "devices": [_rounded(row._asdict()) for row in devices],
        "timeline": timeline(trace) if trace.steps else None,
        "memory": memory(run, prediction),
        "bytes": moved(run, foresight.get("bytes")),
        "gates": run.gates[:64],
        "stages": stages(run),
        "plans": plans(prediction, foresight.get("plans")),
        "predicted": prediction,
        "cluster": foresight.get("cluster"),
        "machine": machine(run),
        "versions": {str(key): str(value) for key, value in _table(run.about, "versions").items()},
        "job": _rows(_table(run.about, "job")),
        "notes": [*run.notes, *foresight.get("notes", [])][:50],
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:2000]


def _table(about: dict[str, Any], key: str) -> dict[str, Any]:
    value = about.get(key)
    return value if isinstance(value, dict) else {}


def _rows(table: dict[str, Any], path: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in table.items():
        is_table = isinstance(value, dict)
        rows += _rows(value, f"{path}{name}.") if is_table else [[f"{path}{name}", str(value)[:500]]]
    return rows[:300]


# Figures at the top.


def figures(run: RunFiles, prediction: Any, analysis: Analysis | None) -> dict[str, Any]:
    """The numbers that a person asks for first; None where they are not known."""
    steps = run.steps
    seconds = median_of(steps.get("seconds"))
    tokens = median_of(steps.get("tokens"))
    rate = tokens / seconds if seconds and tokens else None
    hidden, total = (nansum(steps.get(name)) for name in ("comm_hidden_seconds", "comm_seconds"))
    mfu = finite(prediction["mfu"]) if isinstance(prediction, dict) and seconds else None
    if mfu is not None and seconds:  # the same operations, in another time
        mfu *= float(prediction["step_seconds"]) / seconds
    validation = run.evaluations.get("loss")
    overlaps = [row.overlap for row in analysis.ranks if row.overlap is not None] if analysis else []
    return {
        "steps": None if not len(steps.get("step", ())) else int(steps["step"][-1]),
        "of_steps": whole(_table(run.about, "job").get("steps")),
        "loss": last(steps.get("loss")),
        "validation_loss": last(validation),
        "accuracy": last(run.evaluations.get("accuracy")),
        "seconds": seconds,
        "rate": rate,
        "mfu": mfu,
        "memory": max_of(steps.get("memory_bytes")),
        "sent": median_of(steps.get("moved_bytes")),
        "hidden": hidden / total if total else None,
        "overlap": sum(overlaps) / len(overlaps) if overlaps else None,
        "skipped": int(nansum(steps.get("skipped"))),
        "restarts": sum(event.get("kind") == "restart" for event in _events(run)),
        "rollbacks": len(run.rollbacks),
        "parameters": whole(_table(run.about, "summary").get("parameters")),
    }


def median_of(column: Column | None) -> float | None:
    kept = _finite(column)
    return float(np.median(kept)) if len(kept) else None


def max_of(column: Column | None) -> float | None:
    kept = _finite(column)
    return float(kept.max()) if len(kept) else None


def nansum(column: Column | None) -> float:
    return float(_finite(column).sum())


def last(column: Column | None) -> float | None:
    return None if column is None or not len(column) else finite(float(column[-1]))


def _finite(column: Column | None) -> Column:
    return np.array([]) if column is None else column[np.isfinite(column)]


# Curves and marks.


def series(run: RunFiles) -> dict[str, Any]:
    """The curves, thinned, by name."""
    steps, found = run.steps, {}
    if not steps:
        return {}
    x = steps["step"]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = steps["tokens"] / steps["seconds"]
        hidden = steps["comm_hidden_seconds"] / steps["comm_seconds"]
        found = {
            **{name: thin(x, steps[name]) for name in ("loss", "learning_rate", "grad_norm", "seconds")},
            "rate": thin(x, rates),
            "exposed": thin(x, steps["comm_seconds"] - steps["comm_hidden_seconds"]),
            "hidden": thin(x, hidden),
            "memory": thin(x, steps["memory_bytes"]),
        }
    if len(set(_finite(steps["loss_scale"]).tolist())) > 1:
        found["loss_scale"] = thin(x, steps["loss_scale"])
    if run.evaluations:
        found["validation_loss"] = thin(run.evaluations["step"], run.evaluations["loss"])
        if len(_finite(run.evaluations["accuracy"])):
            found["accuracy"] = thin(run.evaluations["step"], run.evaluations["accuracy"])
    if run.busiest:
        found["busiest"] = thin(run.busiest["step"], run.busiest["share"])
    return found


def _events(run: RunFiles) -> list[dict[str, Any]]:
    events = run.about.get("events")
    rows = events if isinstance(events, list) else []
    return [row for row in rows if isinstance(row, dict)]


def marks(run: RunFiles) -> list[dict[str, Any]]:
    """What happened beside steps: checkpoints, restarts, rollbacks, skipped steps; the last of too many."""
    found = [{"kind": "checkpoint", "step": step, "text": f"saved after step {step}"} for step in run.saved]
    skipped = run.steps.get("skipped")
    if skipped is not None:
        places = run.steps["step"][skipped == 1.0].astype(int).tolist()
        found += [{"kind": "skipped", "step": step, "text": f"step {step} was skipped"} for step in places]
    for row in run.rollbacks:
        text = f"from step {row['from']} back to {row['step']}: {row['reason']}"
        found.append({"kind": "rollback", "step": row["step"], "text": text[:500]})
    for event in _events(run):
        kind, step = str(event.get("kind"))[:40], whole(event.get("after_step"))
        if kind == "rollback":
            continue  # metrics.jsonl has it, with its batches
        text = str(event.get("reason") or event.get("text") or kind)[:500]
        found.append({"kind": kind, "step": step, "text": text, "time": _text(event.get("time"))})
    found.sort(key=lambda mark: (mark["step"] is None, mark["step"] or 0))
    return found[-_MOST_EVENTS:]


# Predicted and measured, beside each other.


def parts(run: RunFiles, prediction: Any, analysis: Analysis | None) -> dict[str, Any]:
    """Seconds of a step by part. Measured ones are of the trace; without one, what the metrics tell."""
    predicted = None
    if isinstance(prediction, dict):
        seconds = prediction["seconds"]
        predicted = {part: sum(float(seconds[name]) for name in names) for part, names in _PARTS.items()}
    if analysis is not None and analysis.ranks:
        names = list(dict.fromkeys(name for row in analysis.ranks for name in row.parts))
        count = len(analysis.ranks)
        measured = {name: sum(row.parts.get(name, 0.0) for row in analysis.ranks) / count for name in names}
        source = "trace"
    else:
        steps, step = run.steps, median_of(run.steps.get("seconds"))
        exposed = median_of(steps["comm_seconds"] - steps["comm_hidden_seconds"]) if steps else None
        measured = {} if step is None or exposed is None else {"exposed": exposed, "compute": step - exposed}
        source = "metrics"
    order = ["compute", *AXES, "all ranks", "exposed", "optimizer", "other"]
    shown = [name for name in order if measured.get(name) or (predicted or {}).get(name)]
    rows = [
        {"part": name, "predicted": (predicted or {}).get(name), "measured": measured.get(name)}
        for name in shown
    ]
    return {"source": source, "rows": rows}


def _measured_ranks(run: RunFiles) -> list[dict[str, Any]]:
    rows = run.measured.get("ranks")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def memory(run: RunFiles, prediction: Any) -> dict[str, Any]:
    """Bytes by category at the peak of each rank, and what is predicted for the stages that differ."""
    ranks = []
    for row in _measured_ranks(run)[:1024]:
        table = _table(row, "memory")
        peak, host = _table(table, "peak"), _table(table, "host_peak")
        ranks.append(
            {
                "rank": whole(row.get("rank")),
                "stage": whole(_table(row, "position").get("pipeline")),
                "peak": {name: finite(peak.get(name)) for name in _CATEGORIES},
                "total": finite(table.get("peak_total")),
                "host": sum(finite(value) or 0.0 for value in host.values()),
            }
        )
    predicted = prediction["memory"] if isinstance(prediction, dict) else []
    return {"ranks": ranks, "predicted": predicted, "categories": list(_CATEGORIES)}


def moved(run: RunFiles, predicted: Any) -> list[dict[str, Any]]:
    """Bytes that rank 0 sends in a step, by axis, operation and subject."""
    ranks = _measured_ranks(run)
    rows = ranks[0].get("moved") if ranks else None
    measured = {_key(row): finite(row.get("sent")) for row in rows or [] if isinstance(row, dict)}
    foreseen = {_key(row): finite(row.get("sent")) for row in predicted or []}
    known = isinstance(predicted, list)
    return [
        {
            "axis": key[0],
            "operation": key[1],
            "subject": key[2],
            "predicted": foreseen.get(key, 0.0) if known else None,
            "measured": measured.get(key),
        }
        for key in sorted({*measured, *foreseen})
    ]


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return str(row.get("axis")), str(row.get("operation")), str(row.get("subject"))


def stages(run: RunFiles) -> list[dict[str, Any]]:
    """What the first rank of each stage says that it holds."""
    found: dict[Any, dict[str, Any]] = {}
    for row in _measured_ranks(run):
        lines = row.get("description")
        text = [str(line).strip()[:300] for line in lines] if isinstance(lines, list) else []
        stage = whole(_table(row, "position").get("pipeline"))
        entry = found.setdefault(stage, {"stage": stage, "lines": text[:40], "ranks": []})
        entry["ranks"].append(whole(row.get("rank")))
    return list(found.values())[:256]


def plans(prediction: Any, found: Any) -> list[dict[str, Any]]:
    """The planner's best plans, with what each is predicted to gain over the plan of the run."""
    now = float(prediction["step_seconds"]) if isinstance(prediction, dict) else None
    return [
        {**row, "gain": None if now is None or not row["seconds"] else now / row["seconds"] - 1}
        for row in found or []
    ]


def machine(run: RunFiles) -> list[dict[str, Any]]:
    """Each host, with its devices."""
    hosts: dict[str, dict[str, Any]] = {}
    for row in _measured_ranks(run):
        host = hosts.setdefault(str(row.get("host"))[:200], {"devices": {}, "cores": whole(row.get("cores"))})
        device = str(row.get("device"))[:200]
        host["devices"][device] = host["devices"].get(device, 0) + 1
    return [
        {
            "host": name,
            "devices": [f"{count} × {device}" for device, count in host["devices"].items()],
            "cores": host["cores"],
        }
        for name, host in list(hosts.items())[:256]
    ]


def _plain(analysis: Analysis) -> dict[str, Any]:
    """Of many ranks, all have their times; the path has its longest parts."""
    return {
        "ranks": [_rounded(dataclasses.asdict(row)) for row in analysis.ranks[:1024]],
        "slowest": analysis.slowest,
        "slowdown": analysis.slowdown,
        "path": [_rounded(part._asdict()) for part in analysis.path[:2000]],
        "path_step": analysis.path_step,
        "path_seconds": sum(part.seconds for part in analysis.path),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


# Several runs.


def differences(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure and each setting in which runs differ, the first run first."""
    rows: list[dict[str, Any]] = []
    for figure, (name, show) in _FIGURES.items():
        values = [run["figures"].get(figure) for run in runs]
        if any(value is not None for value in values):
            texts = [None if value is None else show(value) for value in values]
            rows.append({"name": name, "values": texts, "numbers": values})
    settings = [dict(run["job"]) | {f"version of {k}": v for k, v in run["versions"].items()} for run in runs]
    names = dict.fromkeys(name for table in settings for name in table)
    for name in names:
        values = [table.get(name) for table in settings]
        if len(set(values)) > 1:
            rows.append({"name": name, "values": values, "numbers": None})
    return rows


_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("loss", lambda value: f"{value:.4f}"),
    "validation_loss": ("validation loss", lambda value: f"{value:.4f}"),
    "accuracy": ("accuracy", lambda value: f"{value:.2%}"),
    "seconds": ("seconds of a step", show_seconds),
    "rate": ("tokens or images per second", lambda value: f"{value:,.0f}"),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "memory": ("memory of a rank", show_bytes),
    "sent": ("sent in a step", show_bytes),
    "hidden": ("hidden communication", lambda value: f"{value:.0%}"),
    "steps": ("steps made", str),
    "skipped": ("skipped steps", str),
    "restarts": ("restarts", str),
}


# Curves with few points: of each part the lowest and the highest stay, so that no spike is lost.


MOST_POINTS = 2000
_DIGITS = 7


def thin(x: Column, y: Column, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
    """The curve as {"x": …, "y": …}; where y is not finite, it has a gap."""
    if len(x) > most:
        kept = _extremes(y, most // 2)
        x, y = x[kept], y[kept]
    return {"x": [_short(value) for value in x], "y": [_short(value) for value in y]}


def _extremes(y: Column, buckets: int) -> np.ndarray:
    """The places of the lowest and the highest of each bucket, in order; the first and the last too."""
    edges = np.linspace(0, len(y), buckets + 1).astype(int)
    low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    places = {0, len(y) - 1}
    for begin, end in pairwise(edges.tolist()):
        places.update((begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())))
    return np.array(sorted(places))


def _short(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
