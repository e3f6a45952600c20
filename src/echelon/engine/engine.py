"""The engine: one training step, and the state it acts on, whatever the plan.

A step in one line: zero, forward and backward of each microbatch, sum gradients over replicas, clip,
update. What each of these means under a plan is said by the strategies that `parallelize` composes.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.data_parallel import Sync
from echelon.engine.batch import (
    Batch,
    Loss,
    split_microbatches,
    take_part,
    to_device,
    total_and_count,
)
from echelon.engine.gradients import clip_factor, scale, squared_norm
from echelon.engine.metrics import Evaluation, Metrics
from echelon.errors import UserError
from echelon.launching import beat
from echelon.memory import Memory, Meter
from echelon.mesh import Mesh
from echelon.ownership import VALUE, Owned, all_names, own_whole
from echelon.plan import Plan


class Engine:
    """Made by `echelon.parallelize`; the same calls on every rank."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        sync: Sync,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        clip: float | None,
        schedule: Callable[[int], float] | None,
    ) -> None:
        self.module, self.mesh, self.optimizer = module, mesh, optimizer
        self.steps = 0
        self._sync, self._loss, self._clip, self._schedule = sync, loss, clip, schedule
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        # Gradients are taken of total / normaliser. It is the token count of the step before: the same on
        # every rank, known before the backward pass, and right whenever the count does not change.
        self._normaliser = 1.0
        self._meter = Meter(module, optimizer)

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
        self.module.train()
        self._sync.start_step()
        tally = self._accumulate(batch)
        self._sync.finish_gradients()
        total, count = self._agree(tally)
        norm = self._update(count)
        self._sync.finish_step()
        self.steps += 1
        beat()
        return Metrics(total / count, norm, round(count), time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """The mean loss over the global batch, without training."""
        training = self.module.training
        self.module.eval()
        try:
            tally = self._new_tally()
            for microbatch in split_microbatches(batch, self.plan.microbatches):
                inputs, targets = to_device(microbatch, self.mesh.device)
                _add(tally, *total_and_count(self._loss(self.module(inputs), targets), targets))
        finally:
            self.module.train(training)
        total, count = self._agree(tally)
        beat()
        return Evaluation(total / count, round(count))

    # The state, whole.

    def owned(self) -> list[Owned]:
        """Every slice of weights and optimizer state that this rank holds."""
        owned = self._sync.owned()
        replicated = owned[0].slice.replicated if owned else ()
        for name, parameter in self._sync.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    owned += own_whole([(name, value)], replicated, part=key)
        return owned

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies)."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        whole: dict[str, dict[str, Tensor]] = {}
        for (name, part, *_), tensor in self.owned():
            if part != VALUE:
                whole.setdefault(name, {})[part] = tensor.detach().clone()
        return {name: whole.get(first, {}) for name, first in all_names(self.module).items()}

    def memory(self) -> Memory:
        """Bytes on this rank by category, now and at their peak."""
        return self._meter.read()

    # The parts of a step.

    def _accumulate(self, batch: Batch) -> Tensor:
        """Forward and backward of every microbatch; returns (loss total, count) of this replica."""
        tally = self._new_tally()
        microbatches = split_microbatches(batch, self.plan.microbatches)
        for index, microbatch in enumerate(microbatches):
            inputs, targets = to_device(microbatch, self.mesh.device)
            with self._meter.activations():
                total, count = total_and_count(self._loss(self.module(inputs), targets), targets)
            _add(tally, total.detach(), count)
            self._sync.start_backward(last=index == len(microbatches) - 1)
            (total / self._normaliser).backward()
        return tally

    def _new_tally(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

    def _agree(self, tally: Tensor) -> tuple[float, float]:
        """(loss total, count) over all replicas: the same numbers on every rank."""
        with self.ledger.about("metrics"):
            self.mesh.group("data").all_reduce(tally)
        total, count = tally.tolist()
        if count == 0:
            raise UserError(
                "no replica had a sample that the loss counts; give the step one that has"
            )
        return total, count

    def _update(self, count: float) -> float:
        """Scale to the mean over `count`, clip, step the optimizer; returns the norm before clipping."""
        gradients = [p.grad for _, p in self._sync.parameters() if p.grad is not None]
        self._meter.sample()
        to_mean = self._normaliser / count
        norm = to_mean * float(squared_norm(gradients).sqrt())
        scale(gradients, to_mean * clip_factor(norm, self._clip))
        self.optimizer.step()
        self._normaliser = count
        self._meter.sample()
        return norm

    def _set_learning_rate(self) -> None:
        if self._schedule is not None:
            factor = self._schedule(self.steps)
            for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base * factor


def _add(tally: Tensor, total: Tensor, count: Tensor | int) -> None:
    tally[0] += total
    tally[1] += count
