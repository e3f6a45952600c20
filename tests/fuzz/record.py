"""The result of many random trainings as a file: counts, refusals by their text, and the failures."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.result import make_result

from tests.fuzz.matrix import cells
from tests.fuzz.pool import LEFT_OUT
from tests.fuzz.runner import EQUAL, FAILED, REFUSED, Attempt

_PACKAGES = ("transformers", "peft", "timm")
_LONGEST = 400  # characters of a refusal's text


def part_of(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """The attempts of one part, as plain data."""
    return [
        {
            "training": str(attempt.training),
            "model": attempt.training.model,
            "result": attempt.result,
            "seconds": round(attempt.seconds, 2),
            "texts": [] if attempt.result == EQUAL else _texts(attempt),
        }
        for attempt in attempts
    ]


def _texts(attempt: Attempt) -> list[str]:
    return attempt.rules if attempt.result == REFUSED else [attempt.summary]


def merge(
    parts: Sequence[Sequence[dict[str, Any]]], command: str, settings: dict[str, Any], name: str = "fuzz"
) -> dict[str, Any]:
    """One record of all parts."""
    attempts = [attempt for part in parts for attempt in part]
    counts = Counter(attempt["result"] for attempt in attempts)
    settings |= {"pairs": len(attempts)} | {kind.lower(): counts[kind] for kind in (EQUAL, REFUSED, FAILED)}
    settings |= {"models left out": ", ".join(LEFT_OUT) or "none"}
    record = make_result(name, command, settings, ()).to_dict()
    record["versions"] |= _versions()
    record["models"] = _by_model(attempts)
    refused = [text for each in attempts if each["result"] == REFUSED for text in each["texts"]]
    record["refusals"] = dict(Counter(text[:_LONGEST] for text in refused).most_common())
    record["failures"] = [each for each in attempts if each["result"] == FAILED]
    return record


def merge_cells(
    parts: Sequence[Sequence[dict[str, Any]]], command: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """One record of the table: each cell with its result, and why it was refused."""
    record = merge(parts, command, settings, "model-matrix")
    attempts = {attempt["training"]: attempt for part in parts for attempt in part}
    record["cells"] = [
        {**cell._asdict(), "result": attempt["result"].lower(), "text": " ".join(attempt["texts"])}
        for cell, training in cells()
        if (attempt := attempts.get(str(training))) is not None
    ]
    return record


def _by_model(attempts: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    models: dict[str, Counter[str]] = {}
    for attempt in attempts:
        models.setdefault(attempt["model"], Counter())[attempt["result"].lower()] += 1
    return {name: dict(sorted(models[name].items())) for name in sorted(models)}


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # or it is in a folder of its own, and imported already
            versions[package] = getattr(sys.modules.get(package), "__version__", "not installed")
    return versions


def write(record: Any, path: Path) -> None:
    """Replace the file at once: others read it meanwhile."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
