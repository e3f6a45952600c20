"""Errors of predictions against published runs, by source."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, final

from echelon.errors import UserError
from echelon.planner.validate.columns import Row
from echelon.planner.validate.rows import Run, read_rows, run_of


@final
@dataclass
class SourceErrors:
    """Relative errors of one source; `refused` are the reasons why rows have no prediction."""

    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        prediction = run.predict()
        if run.seconds:
            self.seconds.append(abs(prediction.step_seconds / run.seconds - 1))
        if run.peak:
            peak = prediction.memory[-1].peak if run.is_last_rank else prediction.peak
            self.memory.append(abs((peak + run.overhead) / run.peak - 1))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "refused": len(self.refused),
            "mean_error": mean(self.seconds) if self.seconds else None,
            "median_error": median(self.seconds) if self.seconds else None,
            "max_error": max(self.seconds, default=None),
            "memory_mean_error": mean(self.memory) if self.memory else None,
        }


def validate(path: Path) -> dict[str, SourceErrors]:
    """Predict each run of a file, and compare: by source, in the order of the file."""
    return compare(read_rows(path))


def compare(rows: Iterable[Row]) -> dict[str, SourceErrors]:
    """Predict each row, and compare. A row that tells too little counts as refused."""
    sources: dict[str, SourceErrors] = {}
    for row in rows:
        errors = sources.setdefault(row["source"], SourceErrors())
        errors.rows += 1
        try:
            errors.add(run_of(row))
        except UserError as error:
            errors.refused.append(f"{row['model']}: {error}")
    return sources
