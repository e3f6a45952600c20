"""The course of a batch through the stages: which program runs, on which microbatches, with what around it.

`Flushed`: every step begins and ends with an empty pipeline and makes one update; a model in one stage is the
smallest pipeline. `Endless` (PipeDream): a step leaves microbatches on their way, and stages update at times
of their own; `drain` finishes what is under way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.data_parallel import Outcome, Synchronous, Update
from echelon.engine.agreement import check_same_batch, check_same_gradients
from echelon.engine.arguments import check_batch, check_loss
from echelon.engine.batch import Batch, cast, microbatches, num_samples, to_device, total_and_count
from echelon.engine.samples import Scopes, no_scope
from echelon.engine.within import Within
from echelon.errors import UserError
from echelon.memory import Meter
from echelon.mesh import Mesh
from echelon.pipeline_parallel import (
    Interpreter,
    Microbatch,
    Replicas,
    Script,
    Task,
    Versions,
    Wire,
)
from echelon.precision import DTYPES
from echelon.program import ASYNCHRONOUS, Program, Span, add_transfers, asynchronous, build, forward_only


class Assigned(NamedTuple):
    """The stages of this rank, and how the replicas of each agree."""

    stages: Mapping[int, nn.Module]
    replicas: Mapping[int, Replicas]
    program: Program  # of a step, which also says where each stage is
    boundaries: list[int]  # the layers before which stages begin


class Course(ABC):
    """Takes batches through the stages of this rank."""

    def __init__(
        self, mesh: Mesh, held: Assigned, update: Update, within: Within, meter: Meter, scopes: Scopes
    ) -> None:
        self._mesh, self._held, self._update = mesh, held, update
        self._within, self._meter, self._scopes = within, meter, scopes
        self._rank = mesh.group("pipeline").rank
        self._several = held.program.stages > 1
        self._always = self._several or mesh.plan.schedule in ASYNCHRONOUS  # exactly so many microbatches
        self._scripts: dict[object, Script] = {}
        self._broken = False
        self._same_batch = self._same_gradients = False  # whether ranks have compared theirs
        task = Task(
            held.stages, held.replicas, self._count_loss, self._around, self._make_update, within.counts
        )
        wire = Wire(mesh.group("pipeline"), mesh.backward_group, mesh.device)
        self._interpreter = Interpreter(task, wire, mesh.device, self._versions())

    @abstractmethod
    def train(self, batch: Batch, step: int) -> Outcome:
        """One training step, the first of which is 0."""

    @abstractmethod
    def _make_update(self, tally: Tensor) -> None:
        """The gradients of the losses in `tally` are complete."""

    def _versions(self) -> Versions | None:
        return None

    def drain(self) -> None:  # noqa: B027 (nothing is left where every step ends with an empty pipeline)
        """Finish what is under way, on all ranks together."""

    def evaluate(self, batch: Batch) -> Tensor:
        """(loss total, count) of what this rank computed the loss of."""
        feed = self._feed(batch, "evaluation", no_scope)
        script = self._script(
            ("forward", len(feed)),
            lambda: add_transfers(forward_only(self._held.program.placement, len(feed))),
        )
        return self._run(script, feed)

    def storages(self) -> list[Tensor]:
        """Memory of weights beside the newest."""
        return []

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed here."""
        return self._interpreter.spans

    def _run(self, script: Script, feed: Mapping[int, Microbatch], normaliser: float = 1.0) -> Tensor:
        if self._broken:
            raise UserError(
                "an earlier step failed in the middle of the pipeline, and what was under way is lost; start "
                "anew"
            )
        try:
            return self._interpreter.run(script, feed, normaliser)
        except BaseException:
            self._interpreter.forget()
            self._broken = self._always
            raise

    def _script(self, key: object, make: Callable[[], Program]) -> Script:
        if key not in self._scripts:
            self._scripts[key] = Script(make(), self._rank)
        return self._scripts[key]

    def _training_feed(self, batch: Batch, step: int, begin: int = 0) -> dict[int, Microbatch]:
        check_batch(batch)
        if not self._same_batch:
            check_same_batch(batch, self._mesh)
            self._same_batch = True
        return self._feed(batch, "training", self._scopes.of_step(step, num_samples(batch)), begin)

    def _feed(
        self,
        batch: Batch,
        purpose: str,
        scope: Callable[[int], AbstractContextManager[None]],
        begin: int = 0,
    ) -> dict[int, Microbatch]:
        """The microbatches of a batch, numbered from `begin`."""
        check_batch(batch)
        always = self._always or self._update.lockstep
        parts = microbatches(batch, self._mesh.plan.microbatches, always=always)
        return {
            begin + number: self._microbatch(part, weight, purpose, partial(scope, number))
            for number, (part, weight) in enumerate(parts)
        }

    def _microbatch(
        self, part: Batch, weight: int, purpose: str, scope: Callable[[], AbstractContextManager[None]]
    ) -> Microbatch:
        inputs, targets = self._within.cut(part)
        look = purpose + _look(inputs) if self._several else ""
        if 0 in self._held.stages:
            inputs = cast(to_device(inputs, self._mesh.device), DTYPES[self._mesh.plan.precision])
        if self._held.program.stages - 1 in self._held.stages:
            if self._within.loss_check is not None:
                self._within.loss_check.check_targets(part[1])
            targets = to_device(targets, self._mesh.device)
        return Microbatch(inputs, targets, weight, look, scope)

    def _count_loss(self, output: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor | float]:
        result = self._within.loss(output, microbatch.targets)
        check_loss(result)
        if self._within.loss_check is not None:
            self._within.loss_check.check_result(output, microbatch.targets, result)
        total, count = total_and_count(result, microbatch.targets)
        # The samples that a mean counts are shared by the ranks along `context`.
        weight = microbatch.weight / (1 if isinstance(result, tuple) else self._mesh.plan.context)
        return total * weight, count * weight

    def _finish_update(self, tally: Tensor) -> Outcome:
        self._meter.sample()
        outcome = self._update.finish_step(tally)
        sharded = self._within.sharded
        if not self._same_gradients and sharded is not None:
            assert isinstance(self._update, Synchronous)
            group = self._mesh.group("tensor")
            check_same_gradients(self._update.sync.held(), sharded.replicated, group)
            self._same_gradients = True
        return outcome

    @contextmanager
    def _around(self, microbatch: Microbatch) -> Iterator[None]:
        with self._meter.activations(), microbatch.scope():
            yield


@final
class Flushed(Course):
    """Every step runs the whole program and makes one update."""

    _outcome: Outcome

    def train(self, batch: Batch, step: int) -> Outcome:
        normaliser = self._update.start_step()
        feed = self._training_feed(batch, step)
        script = self._script(("step", len(feed)), lambda: self._program(len(feed)))
        self._run(script, feed, normaliser)
        return self._outcome

    def _program(self, number: int) -> Program:
        if self._several:
            return self._held.program
        return build("naive", (1,), number)  # a replica with few samples has fewer microbatches

    def _make_update(self, tally: Tensor) -> None:
        self._outcome = self._finish_update(tally)


@final
class Endless(Course):
    """The pipeline is never empty between steps; each stage updates when its gradients are there."""

    def __init__(
        self,
        mesh: Mesh,
        held: Assigned,
        update: Update,
        within: Within,
        meter: Meter,
        scopes: Scopes,
        set_rate: Callable[[int], None],
    ) -> None:
        self._set_rate = set_rate  # for the update of a step
        self._taken = self._updates = 0  # microbatches since the pipeline was empty, updates ever
        self._norm = 0.0
        super().__init__(mesh, held, update, within, meter, scopes)
        self._update.start_step()

    def train(self, batch: Batch, step: int) -> Outcome:
        feed = self._training_feed(batch, step, begin=self._taken)
        plan = self._mesh.plan
        begin, self._taken = self._taken, self._taken + len(feed)
        program = asynchronous(plan.schedule, plan.stages, plan.microbatches, begin=begin, drain=False)
        tally = self._run(Script(add_transfers(program), self._rank, empties=False), feed)
        square = self._norm**2 if self._mesh.group("stage").rank == 0 else 0.0
        numbers = torch.cat([tally, tally.new_tensor([square])])
        group = self._mesh.group("all")
        with group.ledger.about("metrics"):
            group.all_reduce(numbers)
        total, count, square_of_all = numbers.tolist()
        if count == 0:
            raise UserError("no replica had a sample that the loss counts; give the step one that has")
        return Outcome(total, count, square_of_all**0.5)

    def drain(self) -> None:
        if self._taken == 0:
            return
        plan = self._mesh.plan
        program = asynchronous(plan.schedule, plan.stages, plan.microbatches, begin=self._taken, taken=0)
        self._run(Script(add_transfers(program), self._rank), {})
        self._taken = 0
        self._stash.restart()

    def _versions(self) -> Versions:
        assert isinstance(self._update, Synchronous)
        self._stash = Versions(list(self._held.stages.values()), self._update.sync.renew)
        return self._stash

    def storages(self) -> list[Tensor]:
        return self._stash.storages()

    def _make_update(self, tally: Tensor) -> None:
        plan = self._mesh.plan
        a_step = 1 if plan.schedule == "pipedream-2bw" else plan.microbatches
        self._set_rate(self._updates // a_step)
        self._norm = self._finish_update(tally.clone()).norm
        self._updates += 1
        self._update.start_step()


def _look(structure: Any) -> str:
    """The shapes and types of all tensors: what the form of later activations follows from, mostly."""
    leaves = [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]
    return " ".join(f"{tuple(leaf.shape)}{leaf.dtype}" for leaf in leaves)
