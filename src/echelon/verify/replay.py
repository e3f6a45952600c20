"""What a log means: the same training on one process, in plain torch, by the log alone.

The gradient of an entry is that of the weights of version `pulled`, on the worker's part of the batch of its
step. Entries that made the same version are one update by their mean, weighted by what the loss counted.
In fp16 a worker's step that is not in the log had gradients that were not finite.
For dropout, a worker with n samples numbers them from worker · n, as if every worker had as many.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from echelon.nn.batch import num_samples, take_part
from echelon.nn.losses import total_and_count
from echelon.update.update import Push
from echelon.verify.case import Case
from echelon.verify.reference import ReferenceModel, ReferenceScale, TrainingResult


class Replay:
    """A training on one process that makes the versions of a log, one after the other."""

    def __init__(self, case: Case, workers: int, dtype: torch.dtype = torch.float64) -> None:
        self._workers = workers
        self._reference = ReferenceModel(case, dtype)
        self._batches = case.batches(dtype)
        self._versions = [self._reference.copy()]
        self._scales = [ReferenceScale(case, dtype) for _ in range(workers)]
        self._next_steps = [0] * workers

    def update(self, entries: Sequence[Push]) -> None:
        """Make the version that all `entries` went into."""
        assert {entry.pushed for entry in entries} == {len(self._versions)}, entries
        sums: list[Tensor | None] = [None] * len(self._reference.parameters)
        count = 0.0
        for entry in sorted(entries):
            gradients, counted = self._gradients(entry)
            sums = [_add(total, gradient) for total, gradient in zip(sums, gradients, strict=True)]
            count += counted
        self._reference.load(self._versions[-1])
        means = [None if total is None else total / count for total in sums]
        self._reference.update(means, len(self._versions) - 1)
        self._versions.append(self._reference.copy())

    def result(self) -> TrainingResult:
        """What the replay ends with. Losses and norms of steps are each worker's own, so it has none."""
        return self._reference.result([], [], self._batches[-1])

    def _gradients(self, entry: Push) -> tuple[list[Tensor | None], float]:
        """The gradients of an entry's loss total, and what the loss counted."""
        self._reference.load(self._versions[entry.pulled])
        part: Any = take_part(self._batches[entry.step], entry.worker, self._workers)
        samples = num_samples(part)
        result = self._reference.loss(part, entry.step, entry.worker * samples)
        total, count = total_and_count(result, samples)
        scale = self._scale(entry)
        (total / count * scale).backward()
        return self._reference.pop_gradients(scale / float(count)), float(count)

    def _scale(self, entry: Push) -> float:
        """The worker's loss scale in fp16: its steps that are not in the log were skipped."""
        scale, worker = self._scales[entry.worker], entry.worker
        for _ in range(self._next_steps[worker], entry.step):
            scale.after_step(skipped=True)
        self._next_steps[worker] = entry.step + 1
        value = scale.value
        scale.after_step(skipped=False)
        return value


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def replay(
    log: Iterable[Push], case: Case, workers: int, dtype: torch.dtype = torch.float64
) -> TrainingResult:
    """The weights and the optimizer state that `log` leads to. `case` must have all the steps of the log."""
    replayed = Replay(case, workers, dtype)
    for _, entries in groupby(log, key=lambda entry: entry.pushed):
        replayed.update(list(entries))
    return replayed.result()
