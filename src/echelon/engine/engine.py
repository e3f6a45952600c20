"""The engine: one training step, and the state it acts on, whatever the plan.

A step in one line: zero, forward and backward of each microbatch, sum gradients over replicas, clip,
update. What each of these means under a plan is said by the strategies that `parallelize` composes.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.data_parallel import Push, Update
from echelon.engine.arguments import check_batch, check_loss
from echelon.engine.batch import (
    Batch,
    Loss,
    cast,
    microbatches,
    num_samples,
    take_part,
    to_device,
    total_and_count,
)
from echelon.engine.metrics import Evaluation, Metrics
from echelon.engine.samples import Scopes, no_scope
from echelon.launching import beat
from echelon.memory import Memory, Meter
from echelon.mesh import Mesh
from echelon.ownership import VALUE, Owned, all_names, assemble
from echelon.plan import Plan
from echelon.precision import DTYPES


class Engine:
    """Made by `echelon.parallelize`; the same calls on every rank."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        update: Update,
        loss: Loss,
        schedule: Callable[[int], float] | None,
        scopes: Scopes,
    ) -> None:
        self.module, self.mesh, self.optimizer = module, mesh, update.optimizer
        self.steps = 0
        self._update, self._loss, self._schedule, self._scopes = update, loss, schedule, scopes
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._meter = Meter(module, update.storages)

    # What a training loop needs.

    @property
    def plan(self) -> Plan:
        return self.mesh.plan

    @property
    def ledger(self) -> Ledger:
        """What this rank moved, by axis, operation and subject."""
        return self.mesh.ledger

    @property
    def replica(self) -> int:
        """Which part of the global batch is this rank's."""
        return self.mesh.group("data").rank

    @property
    def replicas(self) -> int:
        return self.mesh.group("data").size

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group at the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def local(self, batch: Batch) -> Batch:
        """This replica's part of a global batch."""
        part: Batch = take_part(batch, self.replica, self.replicas)
        return part

    def step(self, batch: Batch) -> Metrics:
        """Train on this replica's part of the batch. Replicas may hold different numbers of samples."""
        start = time.perf_counter()
        self.ledger.start_step()
        self._meter.start_step()
        self._set_learning_rate()
        if not self.module.training:  # and else leave alone what the user has set to evaluate
            self.module.train()
        normaliser = self._update.start_step()
        tally = self._accumulate(batch, normaliser)
        self._meter.sample()
        total, count, norm = self._update.finish_step(tally)
        self._meter.sample()
        self.steps += 1
        beat()
        return Metrics(total / count, norm, round(count), time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """The mean loss over the global batch, without training."""
        check_batch(batch)
        self.ledger.start_step()
        self._update.settle()
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            tally = self._new_tally()
            for _, total, count in self._forwards(batch, no_scope):
                _add(tally, total, count)
        finally:
            for module, training in modes.items():
                module.training = training
        loss, counted = self._update.agree(tally)
        beat()
        return Evaluation(loss / counted, round(counted))

    # The state, whole.

    def owned(self) -> list[Owned]:
        """Every slice of weights and optimizer state that this rank holds."""
        return self._update.owned()

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies)."""
        self._update.settle()
        weights = [its for its in self.owned() if its.slice.part == VALUE]
        whole = self._assemble(weights)
        first = all_names(self.module)
        # Buffers, extra state, and parameters without elements, which nobody owns, are as they are here.
        return {
            name: whole.get((first.get(name, name), VALUE), _copy(value))
            for name, value in self.module.state_dict().items()
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        self._update.settle()
        state = [its for its in self.owned() if its.slice.part != VALUE]
        whole: dict[str, dict[str, Tensor]] = {}
        for (name, part), tensor in self._assemble(state).items():
            whole.setdefault(name, {})[part] = tensor
        return {name: whole.get(first, {}) for name, first in all_names(self.module).items()}

    def _assemble(self, owned: list[Owned]) -> dict[tuple[str, str], Tensor]:
        group = self.mesh.group("data")
        return assemble(owned, group, self.mesh.device, sharded=self._update.sharded)

    def log(self) -> list[Push]:
        """Of asynchronous training: which worker's step made which version, the same on every rank."""
        return self._update.log()

    def memory(self) -> Memory:
        """Bytes on this rank by category, now and at their peak."""
        return self._meter.read()

    # The parts of a step.

    def _accumulate(self, batch: Batch, normaliser: float) -> Tensor:
        """Forward and backward of every microbatch; returns (loss total, count) of this replica."""
        tally = self._new_tally()
        check_batch(batch)
        scope = self._scopes.of_step(self.steps, num_samples(batch))
        for last, total, count in self._forwards(batch, scope):
            _add(tally, total.detach(), count)
            self._update.start_backward(last=last)
            (total / normaliser).backward()
            self._update.finish_backward()
        return tally

    def _forwards(
        self, batch: Batch, scope: Callable[[int], AbstractContextManager[None]]
    ) -> Iterator[tuple[bool, Tensor, Tensor | int]]:
        """(is it the last, loss total, count) of each microbatch, computed in its scope."""
        parts = microbatches(batch, self.plan.microbatches, always=self._update.lockstep)
        for index, (part, weight) in enumerate(parts):
            inputs, targets = to_device(part, self.mesh.device)
            inputs = cast(inputs, DTYPES[self.plan.precision])
            with self._meter.activations(), scope(index):
                result = self._loss(self.module(inputs), targets)
                check_loss(result)
                total, count = total_and_count(result, targets)
            yield index == len(parts) - 1, total * weight, count * weight

    def _new_tally(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

    def _set_learning_rate(self) -> None:
        if self._schedule is not None:
            factor = self._schedule(self.steps)
            for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base * factor


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().clone(memory_format=torch.contiguous_format)


def _add(tally: Tensor, total: Tensor, count: Any) -> None:
    tally[0] += total
    tally[1] += count
