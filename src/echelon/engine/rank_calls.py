"""The calls of an engine for what a loop says and measures beside its training."""

from numbers import Real
from typing import Any

from torch import Tensor

from echelon.collectives.agreement import gather_values
from echelon.engine.core import EngineCore
from echelon.errors import UserError


class RankCalls(EngineCore):
    """`main` and `print` are each rank's own; all ranks must call `average`."""

    @property
    def main(self) -> bool:
        """True on rank 0: the one that prints, logs and writes what all have alike."""
        return self.mesh.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, at once; the options are those of Python's print."""
        if self.main:
            print(*values, **{"flush": True, **options})

    def average(self, value: float | Tensor, count: float | Tensor = 1) -> float:
        """Return the mean of a number that each replica has, weighted by `count`, the same on every rank.

        Ranks of one replica (tensor, pipeline, context) pass the same number. NaN if nothing was counted.
        """
        self._check_open()
        own = [_number("value", value), _number("count", count)]
        rows = gather_values(own, self.mesh.group("all"), self.mesh.device)
        replicas = {self.mesh.layout.position(rank).replica: row for rank, row in enumerate(rows)}
        total = sum(number * weight for number, weight in replicas.values() if weight)
        weights = sum(weight for _, weight in replicas.values())
        return total / weights if weights else float("nan")


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, Real):
        return float(value)
    raise UserError(f"engine.average: {name} must be one number, got {type(value).__name__} {value!r}")
