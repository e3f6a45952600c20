"""The meaning of a log: the same training on one process, in plain torch, by the log alone.

The gradient of an entry is that of the weights of version `pulled`, on the worker's part of the batch of its
step. Entries that made the same version are one update of their mean, weighed by what the loss counted.
For dropout, a worker with n samples counts them from worker · n, as if all had as many.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data_parallel.asynchronous.log import Push
from echelon.dropout import key_dropout, scope
from echelon.engine.batch import num_samples, take_part, total_and_count
from echelon.verify.case import Case
from echelon.verify.reference import Trained, evaluate, state_by_name, weights_of
from echelon.wrapping import Wrapping


class Replay:
    """A training on one process that makes the versions which a log tells of, one after the other."""

    def __init__(self, case: Case, workers: int, schedule: Callable[[int], float] | None = None) -> None:
        self._case, self._workers, self._schedule = case, workers, schedule
        self.model = case.build().train()
        key_dropout(self.model, Wrapping())
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = case.make_optimizer(self._parameters)
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._batches = case.batches()
        self._versions = [self._copy()]

    def update(self, entries: Sequence[Push]) -> None:
        """Make the version that all `entries` went into."""
        assert {entry.pushed for entry in entries} == {len(self._versions)}, entries
        sums: dict[nn.Parameter, Tensor] = {}
        counted = 0.0
        for entry in sorted(entries):
            counted += self._add_gradient(entry, sums)
        self._restore(self._versions[-1])
        for parameter in self._parameters:
            parameter.grad = sums[parameter] / counted if parameter in sums else None
        clip = self._case.clip
        nn.utils.clip_grad_norm_(self._parameters, float("inf") if clip is None else clip)
        self._set_rates()
        self._optimizer.step()
        self._versions.append(self._copy())

    def trained(self) -> Trained:
        """What the replay has come to. The numbers of single steps were the workers' own."""
        evaluation = evaluate(self.model, self._case.loss, self._batches[-1])
        state = state_by_name(self.model, self._optimizer)
        return Trained(weights_of(self.model), state, losses=[], grad_norms=[], evaluation=evaluation)

    def _add_gradient(self, entry: Push, sums: dict[nn.Parameter, Tensor]) -> float:
        """Add the gradient of an entry's loss total to `sums`; returns what the loss counted."""
        self._restore(self._versions[entry.pulled])
        self._optimizer.zero_grad()
        inputs, targets = self._part(entry)
        first = entry.worker * num_samples(inputs)
        with scope(seed=self._case.seed, step=entry.step, first_sample=first):
            result = self._case.loss(self.model(inputs), targets)
        total, count = total_and_count(result, targets)
        total.backward()
        for parameter in self._parameters:
            if parameter.grad is not None:
                sums[parameter] = sums.get(parameter, 0) + parameter.grad
        return float(count)

    def _part(self, entry: Push) -> tuple[Any, Any]:
        part: tuple[Any, Any] = take_part(self._batches[entry.step], entry.worker, self._workers)
        return part

    def _set_rates(self) -> None:
        factor = 1.0 if self._schedule is None else self._schedule(len(self._versions) - 1)
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def _copy(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters]

    def _restore(self, version: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, version, strict=True):
                parameter.copy_(value)


def replay(
    log: Iterable[Push], case: Case, workers: int, schedule: Callable[[int], float] | None = None
) -> Trained:
    """The weights and the optimizer's state that `log` leads to. `case.steps` must reach far enough."""
    replayed = Replay(case, workers, schedule)
    for _, entries in groupby(log, key=lambda entry: entry.pushed):
        replayed.update(list(entries))
    return replayed.trained()
