"""The step runner of schedules whose steps begin and end with an empty pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.collectives.agreement import check_on_every_rank
from echelon.collectives.mesh import Mesh
from echelon.engine.step.agreement import measure_gradient
from echelon.engine.step.runtime import Microbatch
from echelon.engine.step.side_effects import renormalises_any, without_side_effects
from echelon.engine.step.step_runner import StepRunner
from echelon.errors import UserError
from echelon.nn.batch import Batch, num_samples
from echelon.nn.buffer_snapshot import BufferSnapshot
from echelon.parallel.stage import LocalStages
from echelon.program import Program, without_update
from echelon.program.build import step_program
from echelon.state.ownership import LocalParameter
from echelon.update.numbers import StepNumbers


@final
class FlushedRunner(StepRunner):
    """Every step runs the whole program and makes one update, or is refused and changes nothing."""

    def _prepare(self) -> None:
        self._buffers = BufferSnapshot(self._local.modules)
        self.first_step = FirstStepChecks(self._mesh, self._local)
        if self._balance is not None:
            self.first_step.check_gates = self._balance.check_gradients
        self._is_rehearsed = self._update.units is None
        self._has_trained = False  # the first step tries things out
        self._renormalises = any(map(renormalises_any, self._local.modules))

    def _train(self, batch: Batch, step: int) -> StepNumbers:
        self._update.number = step
        if self._is_rehearsed and self._update.units is not None:
            self._is_rehearsed = not self._normaliser.reopen(batch, num_samples(batch))
        if not self._is_rehearsed:
            numbers = self._rehearse(batch, step)
            if numbers.error() is not None:  # a refused step, which keeps its number
                return numbers
        return self._train_step(batch, step)

    def _rehearse(self, batch: Batch, step: int) -> StepNumbers:
        """Run a step without updates, where these come before its end: it may be refused, and shows what
        losses count."""
        units = self._update.units
        assert units is not None
        modules = [each for module in self._local.modules for each in module.modules()]
        try:
            with (
                without_side_effects(self._local.modules, modules, self._mesh.device),
                units.rehearse(self._measure),
            ):
                numbers = self._train_step(batch, step)
        finally:
            self._measured.clear()
        if numbers.error() is None:
            self._normaliser.learn(numbers.outcome.counted)
            self._is_rehearsed = True
        return numbers

    def _measure(self, local: Sequence[LocalParameter]) -> None:
        """Ranks compare the gradients of some parameters, when all of them are there."""
        compared = set() if self._layers.sharded is None else set(self._layers.sharded.replicated)
        self._measured |= {p.tensor: measure_gradient(p.tensor) for p in local if p.parameter in compared}

    def _train_step(self, batch: Batch, step: int) -> StepNumbers:
        count_before = self._update.start_step()
        for stage in self._local.stages.values():
            stage.start_step()
        self._buffers.take()
        if self._balance is not None:
            self._balance.start_step()
        try:
            feed = self._training_feed(batch, step, count_before)
            self._record_statistics(feed)
            script = self._script(("step", len(feed)), lambda: self._pass_program(len(feed)))
            self._run(script, feed)
            self._has_trained = True
        except UserError:  # a check refuses the step
            self._buffers.restore(refused=True)
            raise
        return self._update.numbers

    def replay(self, batch: Batch, step: int) -> None:
        """Run the passes of a step again, without its update, on all ranks together. The next step clears
        the gradients that this leaves."""
        count_before = self._update.start_step()
        for stage in self._local.stages.values():
            stage.start_step()
        if self._balance is not None:
            self._balance.start_step()
        feed = self._training_feed(batch, step, count_before)
        self._record_statistics(feed)
        script = self._script(("replay", len(feed)), lambda: without_update(self._pass_program(len(feed))))
        self._run(script, feed)

    def _record_statistics(self, feed: Mapping[int, Microbatch]) -> None:
        """Take all microbatches forward once, without a trace, where the gradient of an auxiliary loss is
        asked for before the last of them has passed the gates."""
        if self._balance is None or not self._balance.needs_pass:
            return
        modules = [each for module in self._local.modules for each in module.modules()]
        # Their messages have another form: nothing wants a gradient. A model may change its inputs.
        copies = {
            number: each._replace(look="statistics " + each.look, inputs=_copied(each.inputs))
            for number, each in feed.items()
        }
        with torch.no_grad(), without_side_effects(self._local.modules, modules, self._mesh.device):
            tally = self._run(self.forward_script(len(copies)), copies)
        self._balance.exchange(tally)
        for stage in self._local.stages.values():
            stage.start_step()

    @property
    def updates_last(self) -> bool:
        # With delay=1 a step begins with the weights of the update before the last.
        is_update_last = self._update.units is None and not self._mesh.plan.delay
        changes_weights = any(changes.is_changed for changes in self._weight_changes)
        return self._has_trained and is_update_last and not changes_weights and not self._renormalises

    def buffer_copies(self) -> list[Tensor]:
        return self._buffers.storages()

    def norm(self, tally: Tensor) -> None:
        if self._update.units is not None:
            self._update.units.finish_passes()
        self.first_step.decide()
        super().norm(tally)

    def publish(self) -> None:
        self._buffers.restore(self._update.undoes)
        is_rehearsed = self._update.units is not None and self._update.units.rehearsal is not None
        if self._balance is not None and not is_rehearsed:
            self._balance.after_step(self._update.skips)
        super().publish()

    def _pass_program(self, number: int) -> Program:
        """The plan's program; a replica with few samples may have fewer microbatches than the plan."""
        if number == self._local.program.microbatches:
            return self._local.program
        return step_program(self._mesh.plan, ties=False, microbatches=number)


def _copied(structure: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, structure)


# What the first step shows of a model, all ranks told before its update: a step that one rank refuses for
# it is refused by all, and no weight has changed.


@final
class FirstStepChecks:
    """Open until a step was not refused for what it has shown."""

    def __init__(self, mesh: Mesh, local: LocalStages) -> None:
        self._mesh, self._local = mesh, local
        self._is_open = mesh.plan.sync != "async"  # asynchronous workers wait for nobody
        self.compares_buffers = True
        self.check_gates: Callable[[], None] = lambda: None  # raises if one was not recorded

    def decide(self) -> None:
        """The gradients are there: raise on every rank what any has found."""
        for stage in self._local.stages.values():
            stage.finish_passes()
        if not self._is_open:
            self._check_second_runs()  # of asynchronous workers, each for itself
            return
        differing = self._differing_buffers()
        check_on_every_rank(lambda: self._check(differing))
        self._is_open = False

    def _differing_buffers(self) -> list[str]:
        if not self.compares_buffers:
            return []
        return [name for stage in self._local.stages.values() for name in stage.differing_buffers()]

    def _check_second_runs(self) -> None:
        for stage in self._local.stages.values():
            stage.check_second_runs()

    def _check(self, differing: list[str]) -> None:
        for sharing in self._local.sharings:
            sharing.end_watch()
        self._check_second_runs()
        self.check_gates()
        if differing:
            raise UserError(
                f"plan '{self._mesh.plan}': {', '.join(differing)}: the forward computes these buffers from "
                "its batch, and each replica has those of its own samples; use data=1, or average them over "
                "ranks in the forward, or audit='off' to keep those of replica 0"
            )
