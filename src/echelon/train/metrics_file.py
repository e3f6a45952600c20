"""metrics.jsonl as events again, for a run that goes on: what was before its checkpoint stays."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.train import strict_json
from echelon.train.events import Evaluated, GateLoad, Stepped

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> list[Stepped | Evaluated]:
    """The events of a file, in order. Lines that cannot be read are left out: a process that was killed may
    have left half a line."""
    if not path.exists():
        return []
    events = []
    for entry in _entries(path):
        event = _event(entry)
        if event is not None:
            events.append(event)
    return events


def metrics_until(path: Path, step: int) -> str:
    """The lines of a file, but for those of later steps and those that cannot be read."""
    entries = (entry for entry in _entries(path) if not _is_after(entry.get("step"), step))
    return "".join(f"{strict_json.dump(entry)}\n" for entry in entries)


def _is_after(value: Any, step: int) -> bool:
    return isinstance(value, int) and value > step


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry


def _event(entry: dict[str, Any]) -> Stepped | Evaluated | None:
    kind = {"step": Stepped, "evaluation": Evaluated}.get(str(entry.get("kind")))
    if kind is None:
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    values = {name: _number(value) for name, value in entry.items() if name in names}
    try:
        if "experts" in values:
            values["experts"] = tuple(_gate(gate) for gate in values["experts"])
        event: Stepped | Evaluated = kind(**values)
    except (KeyError, TypeError):
        return None
    return event if isinstance(event.step, int) else None


def _number(value: Any) -> Any:
    return math.nan if value is None else value  # what is not finite is written as null


def _gate(entry: dict[str, Any]) -> GateLoad:
    return GateLoad(entry["gate"], tuple(entry["tokens"]), entry["dropped"], entry["entropy"])
