"""The engine: one training step, and the state it acts on, whatever the plan.

A step is a program: forwards, backwards and messages of each microbatch, then the sum of gradients over
replicas, clip, update. Its course (course.py) runs it; what each part means under a plan is said by the
strategies that `parallelize` composes.
"""

import copy
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.data_parallel import Push, Update
from echelon.engine.batch import Batch, take_part
from echelon.engine.course import Assigned, Course, Endless, Flushed
from echelon.engine.metrics import Evaluation, Metrics
from echelon.engine.samples import Scopes
from echelon.engine.within import Within
from echelon.launching import beat
from echelon.memory import Memory, Meter
from echelon.mesh import Mesh
from echelon.ownership import VALUE, Owned, StateNames, assemble, whole_slice
from echelon.plan import Plan
from echelon.program import ASYNCHRONOUS, Span

_Whole = dict[tuple[str, str], Tensor]  # by name and part


class Engine:
    """Made by `echelon.parallelize`; the same calls on every rank."""

    def __init__(
        self,
        module: nn.Module,
        names: StateNames,
        mesh: Mesh,
        held: Assigned,
        update: Update,
        within: Within,
        schedule: Callable[[int], float] | None,
        scopes: Scopes,
    ) -> None:
        self.module, self.mesh, self.optimizer = module, mesh, update.optimizer
        self.steps = 0
        self._names, self._held, self._within = names, held, within
        self._update, self._schedule = update, schedule
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._stashed: Callable[[], list[Tensor]] = list  # none before there is a course
        self._meter = Meter(module, self._storages)
        self._course: Course
        if mesh.plan.schedule in ASYNCHRONOUS:
            self._course = Endless(mesh, held, update, within, self._meter, scopes, self._set_learning_rate)
        else:
            self._course = Flushed(mesh, held, update, within, self._meter, scopes)
        self._stashed = self._course.storages
        stages = [its for stage in held.stages.values() for its in stage.modules()]
        self._modules = list(dict.fromkeys([*module.modules(), *stages]))  # layers may be made on the fly

    # What a training loop needs.

    @property
    def plan(self) -> Plan:
        return self.mesh.plan

    @property
    def boundaries(self) -> list[int]:
        """The layers before which the stages of the pipeline begin."""
        return self._held.boundaries

    @property
    def ledger(self) -> Ledger:
        """What this rank moved, by axis, operation and subject."""
        return self.mesh.ledger

    @property
    def replica(self) -> int:
        """Which part of the global batch is this rank's."""
        return self.mesh.position.replica

    @property
    def replicas(self) -> int:
        return self.plan.data

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
        self._set_learning_rate(self.steps)
        if not self.module.training:  # and else leave alone what the user has set to evaluate
            self._set_mode(training=True)
        total, count, norm = self._course.train(batch, self.steps)
        self._meter.sample()
        self.steps += 1
        beat()
        return Metrics(total / count, norm, round(count), time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """The mean loss over the global batch, without training."""
        self.ledger.start_step()
        self.settle()
        modes = {module: module.training for module in self._modules}
        self._set_mode(training=False)
        try:
            tally = self._course.evaluate(batch)
        finally:
            for module, training in modes.items():
                module.training = training
        loss, counted = self._update.agree(tally)
        beat()
        return Evaluation(loss / counted, round(counted))

    # The state, whole.

    def owned(self) -> list[Owned]:
        """Every slice of weights and optimizer state that this rank holds."""
        return [its for owned in self._update.owned() for its in self._within.in_whole(owned)]

    def settle(self) -> None:
        """Bring every rank to the newest weights: all ranks must call this, between steps."""
        self._course.drain()
        self._update.settle()

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies)."""
        self.settle()
        mine = self.module.state_dict()
        weights = [its for its in self._update.owned() if its.slice.part == VALUE]
        whole = self._assemble(weights, mine if self.plan.stages > 1 else {})
        # Extra state, and parameters without elements, which nobody owns, are as they are here.
        return {
            name: whole[first, VALUE] if (first, VALUE) in whole else _copy(mine[name])
            for name, first in self._names.state.items()
            if (first, VALUE) in whole or name in mine
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        self.settle()
        state = [its for its in self._update.owned() if its.slice.part != VALUE]
        whole: dict[str, dict[str, Tensor]] = {}
        for (name, part), tensor in self._assemble(state).items():
            whole.setdefault(name, {})[part] = tensor
        return {name: whole.get(first, {}) for name, first in self._names.parameters.items()}

    def _assemble(self, owned: list[Owned], more: Mapping[str, Any] = MappingProxyType({})) -> _Whole:
        """Put together what the ranks with the same weights own, then what those along `tensor` do, then all
        stages; `more` is of the stage."""
        device = self.mesh.device
        whole = assemble(owned, self.mesh.group("weights"), device, sharded=self._update.sharded)
        if self.plan.tensor > 1:
            pieces = [
                piece
                for (name, part), its in whole.items()
                for piece in self._within.in_whole(Owned(whole_slice(name, its, (), part), its))
            ]
            whole = assemble(pieces, self.mesh.group("tensor"), device, sharded=True)
        if self.plan.stages == 1:
            return whole
        others = {(name, VALUE): its for name, its in more.items() if isinstance(its, Tensor)}
        pieces = [
            Owned(whole_slice(name, its, (), part), its)
            for (name, part), its in {**others, **whole}.items()
            if (name, part) in whole or name not in self._names.parameters
        ]
        return assemble(pieces, self.mesh.group("pipeline"), device, sharded=True)

    def log(self) -> list[Push]:
        """Of asynchronous training: which worker's step made which version, the same on every rank."""
        return self._update.log()

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed on this rank."""
        return self._course.spans

    def memory(self) -> Memory:
        """Bytes on this rank by category, now and at their peak."""
        return self._meter.read()

    def _set_mode(self, *, training: bool) -> None:
        self.module.train(training)
        for module in set(self._modules) - set(self.module.modules()):
            module.training = training

    def _storages(self) -> dict[str, list[Tensor]]:
        found = self._update.storages()
        found["parameters"] = [*found["parameters"], *self._stashed()]
        return found

    def _set_learning_rate(self, step: int) -> None:
        if self._schedule is not None:
            factor = self._schedule(step)
            for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                group["lr"] = base * factor


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().clone(memory_format=torch.contiguous_format)
