"""Trainings without a single device to be equal to, repeated on one process in plain torch.

`replay` follows the log of asynchronous workers alone. The gradient of an entry is that of the weights of
version `pulled`, on the worker's part of the batch of its step. Entries that made the same version are one
update by their mean, weighted by what the loss counted. In fp16 a worker's step that is not in the log had
gradients that were not finite. For dropout, a worker with n samples numbers them from worker · n, as if every
worker had as many.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from echelon.nn.batch import num_samples, part_bounds, take_part
from echelon.nn.losses import total_and_count
from echelon.parallel.pipeline import split_model
from echelon.plan import Plan
from echelon.update.update import Push
from echelon.verify.case import Case
from echelon.verify.reference import ReferenceModel, ReferenceScale, TrainingResult, is_finite


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
        """Return the result, without losses and norms of steps: these are each worker's own."""
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


Part = tuple[Any, int]  # (inputs, targets), and the index of the first sample in the global batch


def train_by_formula(
    case: Case,
    plan: Plan,
    boundaries: list[int],
    dtype: torch.dtype = torch.float64,
    overflows: Collection[tuple[int, int]] = (),
) -> TrainingResult:
    """Train as a pipeline of PipeDream must, for all steps of `case` and a drain. Of d stages, update t is

        pipedream             W(t+1) = W(t) − ν·∇f(W₀(t−d+1), W₁(t−d+2), …, W_{d−1}(t))     on microbatch t
        pipedream-vertical    W(t+1) = W(t) − ν·∇f(W₀(t−d+1), W₁(t−d+1), …, W_{d−1}(t−d+1)) on microbatch t
        pipedream-2bw         W(t+1) = W(t) − ν·∇f(W(t−1))                                  on batch t

    where versions before the first are the first, and "−ν·" stands for the optimizer's step. In fp16 the loss
    of a microbatch has the scale of its step, and W_i(t+1) = W_i(t) where the gradient of stage i is not
    finite. The next scale follows from the updates of all stages that were made in the step.
    `overflows`: the updates to skip in a type that has no overflows.
    """
    reference = ReferenceModel(case, dtype, keeps_masters=plan.masters)
    scale = ReferenceScale(case, dtype)
    stages = split_model(reference.model, boundaries).stages if boundaries else [reference.model]
    stage_of = {p: number for number, stage in enumerate(stages) for p in stage.parameters()}
    parameter_stages = [stage_of[p] for p in reference.parameters]
    versions = [reference.copy()]
    version_of = _version_rule(plan)
    batches = case.batches(dtype)
    losses, skipped, loss_scales = [], [], []
    found = set(overflows)
    for step, batch in enumerate(batches):
        total = count = 0.0
        for parts in _updates(batch, plan):
            newest = len(versions) - 1
            used = [version_of(newest, stage) for stage in parameter_stages]
            reference.load([versions[version][index] for index, version in enumerate(used)])
            part_total, part_count = _backward(reference, step, parts, scale.value)
            reference.load(versions[-1])
            gradients = reference.pop_gradients(scale.value)
            if scale.is_used:
                by_stage = zip(parameter_stages, gradients, strict=True)
                found |= {(newest, stage) for stage, gradient in by_stage if not is_finite([gradient])}
            kept = [
                None if (newest, stage) in found else gradient
                for stage, gradient in zip(parameter_stages, gradients, strict=True)
            ]
            reference.update(kept, step)  # without samples there are none, and nothing changes
            versions.append(reference.copy())
            total, count = total + part_total, count + part_count
        losses.append(total / count)
        skipped.append(not found.isdisjoint(_made_in(plan, step)))
        loss_scales.append(scale.value)
        scale.after_step(skipped=skipped[-1])
    result = reference.result(losses, [], batches[-1])
    result.skipped, result.loss_scales, result.overflows = skipped, loss_scales, sorted(found)
    return result


def _made_in(plan: Plan, step: int) -> set[tuple[int, int]]:
    """The (update, stage) that a step makes: stage i is d−1−i microbatches behind those taken in."""
    every = plan.microbatches // plan.updates_per_step
    made = set()
    for stage in range(plan.stages):
        behind = plan.stages - 1 - stage
        begin, end = (max(0, taken * plan.microbatches - behind) // every for taken in (step, step + 1))
        made |= {(update, stage) for update in range(begin, end)}
    return made


def _version_rule(plan: Plan) -> Callable[[int, int], int]:
    """Return the version that a stage uses in an update; the first version is number 0."""
    depth = plan.stages
    rules: dict[str, Callable[[int, int], int]] = {
        "pipedream": lambda update, stage: update - (depth - 1 - stage),
        "pipedream-vertical": lambda update, _: update - (depth - 1),
        "pipedream-2bw": lambda update, _: update - 1,
    }
    return lambda update, stage: max(0, rules[plan.schedule](update, stage))


def _updates(batch: Any, plan: Plan) -> Iterator[list[Part]]:
    """For each update of a step, the samples that it averages over: a part of every replica, or all.

    All of them run together: what batch norm normalises by is one number over all replicas.
    """
    if plan.updates_per_step == 1:
        yield [(batch, 0)]
        return
    samples = num_samples(batch)
    for number in range(plan.microbatches):
        parts: list[Part] = []
        for replica in range(plan.data):
            begin, end = part_bounds(samples, replica, plan.data)
            first, _ = part_bounds(end - begin, number, plan.microbatches)
            part = take_part(take_part(batch, replica, plan.data), number, plan.microbatches)
            parts += [(part, begin + first)] if num_samples(part) else []
        yield parts


def _backward(reference: ReferenceModel, step: int, parts: list[Part], scale: float) -> tuple[float, float]:
    """Compute the gradient of the mean loss of `parts`, times `scale`; returns the loss total and count."""
    results = [
        total_and_count(reference.loss(batch, step, first_sample), num_samples(batch))
        for batch, first_sample in parts
    ]
    count = sum(float(count) for _, count in results)
    if count == 0:
        return 0.0, 0.0
    torch.stack([total for total, _ in results]).sum().div(count).mul(scale).backward()
    return sum(float(total.detach()) for total, _ in results), count
