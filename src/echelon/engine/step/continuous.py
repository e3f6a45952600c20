"""The step runner of PipeDream schedules, whose pipeline stays full between steps."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from echelon.collectives.agreement import check_on_every_rank
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.runtime.script import Script
from echelon.engine.step.runtime.versions import Versions
from echelon.errors import UserError
from echelon.nn.batch import Batch
from echelon.parallel.observer import ForwardPass, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.program import Program, build
from echelon.program.build import continuous_steps
from echelon.update.numbers import Number, StepNumbers
from echelon.update.synchronous_update import SynchronousUpdate


@final
class ContinuousRunner(StepRunner):
    """The pipeline is never empty between steps; each stage updates when its gradients are there.

    A step in which no sample counts is reported, but not undone: it also made updates of earlier steps'
    microbatches. Its own microbatches update no weight.

    A microbatch's loss scale is that of the step that took it in; it travels with the tally. A stage whose
    gradients overflow skips its own update of them.
    """

    def _prepare(self) -> Versions:
        self._taken = self._updates = 0  # microbatches since the pipeline was empty, updates ever
        self._loaded_updates = 0  # those that another engine has made
        self._unchecked = self._local.program.stages  # steps in which a stage may make its first update
        self._refusal: UserError | None = None
        self._program_of = continuous_steps(self._mesh.plan)
        self._update.start_step()
        self.observers.add(_FirstOfUpdate(self._local))
        self._versions = Versions(self._local.modules, self._local.reallocate)
        return self._versions

    def _train(self, batch: Batch, step: int) -> StepNumbers:
        self._normaliser.start_update()
        self.observers.tell("before_step")
        feed = self._training_feed(batch, step, begin=self._taken)
        begin, self._taken = self._taken, self._taken + len(feed)
        tally = self._run(Script(self._program_of(begin, None), self._rank, empties=False), feed)
        self._check_first_updates()
        return self._agree(tally)

    def _check_first_updates(self) -> None:
        """Raise on every rank what the first update of any stage has shown: stages make it at times of their
        own, and the ranks of others would wait for a stage that stops there."""
        if not self._unchecked:
            return
        self._unchecked -= 1
        try:
            check_on_every_rank(self._refuse)
        except UserError:
            self.is_broken = True
            raise

    def _refuse(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _agree(self, tally: Tensor) -> StepNumbers:
        """Sum the numbers of a step over all ranks. The norm is of the last update of each stage; skipped are
        the updates since the step before, of any stage: they decide on the next loss scale."""
        update, is_counted = self._update, self._mesh.group("stage").rank == 0
        assert isinstance(update, SynchronousUpdate)
        norm = update.numbers.norm if self._updates > self._loaded_updates and is_counted else 0.0
        overflows = update.pop_overflows()
        counted = [norm**2, overflows if is_counted else 0.0]
        summed = torch.cat([tally[:2], *(_as_row(number, tally) for number in counted)])
        group = self._mesh.group("all")
        with group.ledger.about("metrics"):
            group.all_reduce(summed)
        scale = _as_row(update.loss_scale, tally)
        if update.loss_scaling is not None:
            overflows, is_empty = summed[3] > 0, summed[1] == 0
            update.loss_scaling.after_step(overflows=overflows, refused=is_empty)
        return StepNumbers(torch.cat([summed[:2], summed[2:3].sqrt(), scale, summed[3:]]))

    def _pass_program(self, number: int) -> Program:
        plan = self._mesh.plan
        copies = "activations" in plan.offload
        return build("gpipe", plan.replicas, number, gather=plan.frees_weights, copies=copies, ties=False)

    @property
    def is_empty(self) -> bool:
        return self._taken == 0

    def drain(self) -> None:
        if self.is_empty:
            return
        self._run(Script(self._program_of(self._taken, 0), self._rank), {})
        self._taken = 0
        self._versions.restart()
        self._check_first_updates()

    def restore(self, numbers: Mapping[str, float]) -> None:
        super().restore(numbers)
        self._updates = self._loaded_updates = int(numbers["begun steps"]) * self._mesh.plan.updates_per_step

    def storages(self) -> list[Tensor]:
        return self._versions.storages()

    def update(self) -> None:
        self._update.set_learning_rate(self._updates // self._mesh.plan.updates_per_step)
        self._update.number = self._updates
        self.observers.tell("after_passes")
        try:
            self.observers.tell("check_first_step")
        except UserError as error:
            self._refusal = self._refusal or error
        super().update()
        self._updates += 1

    def publish(self) -> None:
        # Backward passes that are still to come have saved buffers, and autograd would refuse those that were
        # written. Gradients do not depend on what replicas share, which is statistics for evaluation.
        buffers = tuple(buffer for module in self._local.modules for buffer in module.buffers())
        with _unsafe_preserve_version_counter(buffers):
            super().publish()
        self._update.start_step()


@final
class _FirstOfUpdate(StepObserver):
    """Every microbatch is the first of an update: each iterates, as the first one of a flushed step does."""

    def __init__(self, local: LocalStages) -> None:
        self._local = local

    def around_pass(self, forward: ForwardPass) -> None:  # noqa: ARG002
        for stage in self._local.stages.values():
            stage.start_step()


def _as_row(number: Number, like: Tensor) -> Tensor:
    """Return a row of one number, where `like` is, without waiting for the device."""
    return number.double().view(1) if isinstance(number, Tensor) else like.new_full((1,), number)
