"""What ranks own, put together, is the whole state: each element held by some rank, and counted once.

`RecordingRanks` takes the place of `Ranks` in `verify`, and keeps what each engine owned at the end.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.ownership import ENGINE, MASTER, VALUE, OwnedSlice, Slice
from echelon.verify import Case
from echelon.verify.contract import train_engine
from echelon.verify.reference import TrainingResult
from tests.fuzz.refusal import run_or_refuse

Owned = Sequence[OwnedSlice]  # by one rank
Key = tuple[str, str]  # name and part
Train = Callable[[Case, Plan, Any], tuple[TrainingResult, list[OwnedSlice]]]


class RecordingRanks:
    """Runs the trainings of `verify` on ranks, and keeps what they owned."""

    def __init__(self, ranks: Ranks, train: Train | None = None) -> None:
        """`train`: on each rank, in place of a training from the start."""
        self._ranks, self._train = ranks, train or train_and_list
        self.errors: list[str] = []

    def run(self, _: Any, case: Case, plan: Plan, bug: Any) -> list[TrainingResult]:
        pairs = run_or_refuse(self._ranks, self._train, case, plan, bug)
        result = pairs[0][0]
        self.errors = list(ownership_errors([owned for _, owned in pairs], expected_state(result, case)))
        self.errors += counter_errors([owned for _, owned in pairs], case)
        return [result for result, _ in pairs]


def train_and_list(case: Case, plan: Plan, bug: Any) -> tuple[TrainingResult, list[OwnedSlice]]:
    """One rank's training, and copies of what its engine owned."""
    return list_owned(*train_engine(case, plan, bug))


def list_owned(engine: Engine, result: TrainingResult) -> tuple[TrainingResult, list[OwnedSlice]]:
    """The result, with copies of what the engine owned, which is closed."""
    owned = [OwnedSlice(each.slice, each.tensor.detach().clone()) for each in engine.owned()]
    engine.close(restore=False)
    return result, owned


def expected_state(result: TrainingResult, case: Case) -> dict[Key, Tensor]:
    """The whole state of a training; a tied weight under its first name."""
    model = case.build()
    first_names = {name for name, _ in model.named_parameters()}
    other_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names
    weights = {name: value for name, value in result.weights.items() if isinstance(value, Tensor)}
    state = {(name, VALUE): value for name, value in weights.items() if name not in other_names}
    state |= {(name, MASTER): value for name, value in result.masters.items()}
    for name in first_names:
        state |= {(name, key): value for key, value in result.optimizer[name].items()}
    return {key: value for key, value in state.items() if value.numel()}


def ownership_errors(ranks: Sequence[Owned], expected: Mapping[Key, Tensor]) -> Iterator[str]:
    """What is missing, held by no rank, counted twice, or not the value of the whole state."""
    boxes = _distinct_boxes(ranks)
    for key in sorted(boxes.keys() | expected.keys()):
        label = " ".join(key)
        if key not in expected:
            yield f"{label} is owned, and is no part of the state"
        elif key not in boxes:
            yield f"no rank owns {label}"
        else:
            yield from (f"{label}: {error}" for error in _tensor_errors(boxes[key], expected[key]))


def counter_errors(ranks: Sequence[Owned], case: Case) -> Iterator[str]:
    """Every rank must own the engine's counters ("steps of worker 1" are one worker's own), and all agree."""
    values: defaultdict[str, Counter[float]] = defaultdict(Counter)
    of_all_workers: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for owned in ranks:
        for box, tensor in owned:
            if box.name == ENGINE:
                values[box.part][tensor.item()] += 1
                of_all_workers[box.part.partition(" of worker ")[0]][tensor.item()] += 1
    for part, expected in (("steps", case.steps), ("seed", case.seed)):
        seen = of_all_workers[part]
        if seen != Counter({expected: len(ranks)}):
            yield f"{ENGINE} {part} must be {expected} on {len(ranks)} ranks, but is {dict(seen)}"
    yield from (f"{ENGINE} {part} differs: {dict(seen)}" for part, seen in values.items() if len(seen) > 1)


def _distinct_boxes(ranks: Sequence[Owned]) -> dict[Key, dict[Slice, list[Tensor]]]:
    """By tensor and box, what each rank that owns the box holds."""
    boxes: dict[Key, dict[Slice, list[Tensor]]] = {}
    for owned in ranks:
        for box, tensor in owned:
            if box.name != ENGINE and box.numel:
                boxes.setdefault((box.name, box.part), {}).setdefault(box, []).append(tensor)
    return boxes


def _tensor_errors(boxes: Mapping[Slice, Sequence[Tensor]], expected: Tensor) -> Iterator[str]:
    counts = torch.zeros(expected.shape, dtype=torch.int64)
    for box, tensors in boxes.items():
        if box.shape != tuple(expected.shape):
            yield f"a slice of shape {box.shape}, where the state has {tuple(expected.shape)}"
            return
        counts[box.box] += 1
        for tensor in tensors:
            if tensor.shape != box.sizes or tensor.dtype != expected.dtype:
                yield f"{box.sizes} of {expected.dtype} is held as {tuple(tensor.shape)} of {tensor.dtype}"
            elif not torch.equal(tensor, expected[box.box]):
                yield f"a rank holds other values at {box.offsets}"
    if (counts == 0).any():
        yield f"{int((counts == 0).sum())} elements are held by no rank"
    if (counts > 1).any():
        yield f"{int((counts > 1).sum())} elements are in several slices"
