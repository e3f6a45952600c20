"""The comparison of a plan's training with its reference, in float64, and its verdict."""

import dataclasses
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echelon.collectives.agreement import fingerprint
from echelon.plan import Plan
from echelon.state.ownership import MASTER
from echelon.verify.reference import TrainingResult

TOLERANCE = 1e-9
ONE_DEVICE = "one device"
LOG = "the replay of its own log"
FORMULA = "its formula, replayed on one process"
DELAYED = "one device whose gradients are one update late"

_NUMBERS = ("loss", "grad_norm", "evaluation", "loss or grad_norm")


@dataclass(frozen=True)
class Verdict:
    """The largest absolute difference of each tensor and of each number."""

    plan: Plan
    steps: int
    tensors: dict[str, float]  # by "name" for weights, "name exp_avg" for optimizer state
    numbers: dict[str, float]  # "loss", "grad_norm" over all steps, "evaluation" after them
    tolerance: float = TOLERANCE
    against: str = ONE_DEVICE
    scales: dict[str, float] = field(default_factory=dict)  # by kind, the largest value of the reference

    def __post_init__(self) -> None:
        assert self.tensors, "no tensor was compared"
        assert self.numbers, "no number was compared"

    @property
    def worst(self) -> tuple[str, float]:
        """The value that differs the most, of all that was compared, and by how much."""
        return max([*self.tensors.items(), *self.numbers.items()], key=_severity)

    @property
    def worst_tensor(self) -> tuple[str, float]:
        """The weight or optimizer state that differs the most, and by how much."""
        return max(self.tensors.items(), key=_severity)

    @property
    def worst_by_kind(self) -> dict[str, tuple[str, float]]:
        """By kind (weights, an optimizer state, loss, norm, evaluation), the value that differs most."""
        worst: dict[str, tuple[str, float]] = {}
        for item in sorted([*self.tensors.items(), *self.numbers.items()], key=_severity):
            worst[kind_of(item[0])] = item
        return worst

    def relative(self, name: str, gap: float) -> float | None:
        """A difference as a part of the largest value of its kind, so that kinds can be compared."""
        scale = self.scales.get(kind_of(name), 0.0)
        return gap / scale if scale else None

    @property
    def equal(self) -> bool:
        return self.worst[1] <= self.tolerance  # false for NaN too

    holds = equal

    @property
    def num_compared(self) -> int:
        return len(self.tensors) + len(self.numbers)

    @property
    def num_wrong(self) -> int:
        return sum(not gap <= self.tolerance for gap in [*self.tensors.values(), *self.numbers.values()])

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": str(self.plan),
            "against": self.against,
            "equal": self.equal,
            "holds": self.holds,
            "worst": self._named(self.worst),
            "worst_tensor": self._named(self.worst_tensor),
            "worst_by_kind": {kind: self._named(item) for kind, item in self.worst_by_kind.items()},
            "tolerance": self.tolerance,
            "steps": self.steps,
            "num_compared": self.num_compared,
            "num_wrong": self.num_wrong,
        }

    def _named(self, item: tuple[str, float]) -> dict[str, str | float | None]:
        relative = self.relative(*item)
        return {"name": item[0], "error": _plain(item[1]), "relative": _plain(relative)}

    def __str__(self) -> str:
        name, gap = self.worst
        after = f"after {self.steps} steps in float64"
        if self.equal:
            return (
                f"'{self.plan}' is equal to {self.against} {after}: largest difference {gap:.1e} ({name}), "
                f"allowed {self.tolerance:.0e}"
            )
        tensor, tensor_gap = self.worst_tensor
        worst_tensor = "" if tensor == name else f"worst tensor is {tensor}, by {tensor_gap:.1e}; "
        relative = self.relative(name, gap)
        part = "" if relative is None else f" ({relative:.1e} of the largest {kind_of(name)})"
        return (
            f"'{self.plan}' DIFFERS from {self.against} {after}: worst is {name}, by {gap:.1e}{part}, "
            f"allowed {self.tolerance:.0e}; {worst_tensor}{self.num_wrong} of {self.num_compared} values "
            "are out of bounds"
        )


def _severity(item: tuple[str, float]) -> float:
    return math.inf if math.isnan(item[1]) else item[1]


def _plain(value: float | None) -> str | float | None:
    return value if value is None or math.isfinite(value) else str(value)


def kind_of(name: str) -> str:
    """kind_of("a") == "weights", kind_of("a exp_avg on rank 1") == "exp_avg", kind_of("loss") == "loss"."""
    name = re.sub(r" on rank \d+$", "", name)
    if name in _NUMBERS:
        return name
    return name.rpartition(" ")[2] if " " in name else "weights"


def kind_scales(reference: TrainingResult, against: str) -> dict[str, float]:
    """By kind, the largest absolute value of the reference that is finite."""
    values = named_tensors(reference) | {
        name: torch.tensor(numbers, dtype=torch.float64)
        for name, numbers in number_lists(reference, against).items()
    }
    scales: dict[str, float] = {}
    for name, value in values.items():
        magnitude = value.abs() if value.is_complex() else value.double().abs()
        largest = float(magnitude.max()) if value.numel() else 0.0
        if math.isfinite(largest):
            scales[kind_of(name)] = max(largest, scales.get(kind_of(name), 0.0))
    return scales


def tensor_gaps(result: TrainingResult, reference: TrainingResult) -> dict[str, float]:
    actual, expected = named_tensors(result), named_tensors(reference)
    names = sorted(actual.keys() | expected.keys())
    return {name: _gap(actual.get(name), expected.get(name)) for name in names}


def number_gaps(result: TrainingResult, reference: TrainingResult, against: str) -> dict[str, float]:
    actual, expected = number_lists(result, against), number_lists(reference, against)
    return {
        name: _gap(*(torch.tensor(numbers[name], dtype=torch.float64) for numbers in (actual, expected)))
        for name in actual
    }


def rank_gaps(results: Sequence[TrainingResult], against: str) -> dict[str, float]:
    """Return what some rank reports differently from rank 0: all must be the same to the bit.

    Only the numbers of an asynchronous worker's steps are its own.
    """
    gaps: dict[str, float] = {}
    expected = named_tensors(summarize(results[0]))
    for rank, result in enumerate(results[1:], start=1):
        actual = named_tensors(result)
        for name in sorted(actual.keys() | expected.keys()):
            first, other = actual.get(name), expected.get(name)
            if first is None or other is None or not torch.equal(first, other):
                gaps[f"{name} on rank {rank}"] = math.inf
        if against != LOG and result.numbers != results[0].numbers:
            gaps[f"loss or grad_norm on rank {rank}"] = math.inf
    return gaps


def number_lists(result: TrainingResult, against: str) -> dict[str, list[float]]:
    """The numbers to compare. The losses of an asynchronous worker are its own, and so are norms of stages
    that update at different times."""
    numbers = {"evaluation": [result.evaluation]}
    if against != LOG:
        numbers["loss"] = result.losses
    if against in (ONE_DEVICE, DELAYED):
        numbers["grad_norm"] = result.grad_norms
    return numbers


def summarize(result: TrainingResult) -> TrainingResult:
    """The same result with fingerprints in place of tensors, which is all that ranks above 0 return."""
    optimizer = {name: _fingerprints(state) for name, state in result.optimizer.items()}
    weights, masters = _fingerprints(result.weights), _fingerprints(result.masters)
    return dataclasses.replace(result, weights=weights, optimizer=optimizer, masters=masters)


def _fingerprints(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A few integers for each tensor: two over its bits, one for its type, and its shape."""
    return {
        name: torch.tensor([*fingerprint(value), zlib.crc32(str(value.dtype).encode()), *value.shape])
        for name, value in tensors.items()
    }


def named_tensors(result: TrainingResult) -> dict[str, Tensor]:
    """Weights by "name", optimizer state by "name key", masters by "name master"."""
    state = {
        f"{name} {key}": value for name, entries in result.optimizer.items() for key, value in entries.items()
    }
    masters = {f"{name} {MASTER}": value for name, value in result.masters.items()}
    return result.weights | state | masters


def is_alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _gap(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None or not is_alike(actual, expected):
        return math.inf
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    return float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0
