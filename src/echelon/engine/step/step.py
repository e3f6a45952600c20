"""One training step, from top to bottom.

Step.train            read the batch, audit it if it is due, count the step, return its metrics
FlushedRunner         start → feed → run the program → numbers
    the program       FORWARD, loss, BACKWARD of each microbatch, messages between stages: interpreter.py
                      REDUCE: gradients are summed over replicas (parallel/data, behind the backward pass)
    norm, update,     what its last instructions mean: one norm over all ranks, the optimizer, new weights
    publish           to all ranks (update/). PipeDream schedules have a runner of their own: continuous.py
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from echelon.collectives.agreement import check_on_every_rank
from echelon.engine.audit.audit_batch import GivenBatch
from echelon.engine.audit.auditing import Audit
from echelon.engine.audit.drift import DriftCheck
from echelon.engine.audit.nonfinite_search import NonfiniteSearch
from echelon.engine.setup import Setup
from echelon.engine.step.agreement import check_same_batch, measure_gradient
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.first_step import FirstStepChecks
from echelon.engine.step.metrics import Metrics, StepTimer
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.runtime.flight import Microbatch
from echelon.engine.step.side_effects import renormalises_any, without_side_effects
from echelon.engine.step.step_counter import StepCounter
from echelon.engine.watch.watch import Watch
from echelon.errors import UserError
from echelon.launching import finish_step, start_step
from echelon.nn.batch import Batch, num_samples
from echelon.nn.buffer_snapshot import BufferSnapshot
from echelon.program import Program
from echelon.program.build import step_program
from echelon.state.ownership import LocalParameter
from echelon.update.nonfinite import NonfiniteError
from echelon.update.numbers import Number, StepNumbers


@final
class Step:
    """The training steps of one engine, one after the other."""

    def __init__(
        self,
        setup: Setup,
        runner: StepRunner,
        counter: StepCounter,
        watch: Watch,
        audit: Audit,
        drift: DriftCheck,
        search: NonfiniteSearch | None,
    ) -> None:
        self._setup, self._runner, self.counter, self._watch = setup, runner, counter, watch
        self.audit, self._drift, self._search = audit, drift, search
        self._is_first = True

    def train(self, batch: Any) -> Metrics:
        """Train on this replica's part of the batch: see `Engine.step`."""
        # After many steps that were skipped, the next one must not begin before the last one is known.
        self.check_earlier(but=0 if self.counter.is_near_limit and self.counter.is_in_row else 1)
        start_step(self.counter.begun + 1)
        pair = self._read(batch)
        with self._watch.step(is_empty=self._runner.is_empty) as refusal:
            self._ask_audit(batch, pair, refusal)
            return self._train(pair)

    def _read(self, batch: Any) -> Batch:
        """The batch as (inputs, targets). What one replica refuses of its first batch is raised by all: the
        others would wait for it."""
        reader, is_first, self._is_first = self._setup.reader, self._is_first, False
        if is_first and self._setup.mesh.plan.sync != "async":
            check_on_every_rank(lambda: reader.read(batch))
        return reader.read(batch)

    def _ask_audit(self, given: Any, batch: Batch, refusal: UserError | None) -> None:
        """Raise, on every rank, if this step would train something else than one device."""
        if self.audit.is_on:
            if not self.audit.results:
                check_same_batch(batch, self._setup.mesh)
            read = GivenBatch(to_plain(given), batch, self._setup.reader.read)
            self.audit.ask(read, self.counter.begun, is_empty=self._runner.is_empty, refusal=refusal)

    def _train(self, pair: Batch) -> Metrics:
        mesh, update, number = self._setup.mesh, self._setup.update, self.counter.begun
        timer = StepTimer(mesh.device)
        mesh.ledger.start_step()
        if self._search is not None and self.counter.is_near_limit:
            self._search.keep(pair, number)
        update.set_learning_rate(number)
        numbers = self._runner.train(pair, number)
        self.counter.add(numbers)
        self._drift.after_step(number)
        self._setup.observers.tell("after_step")
        timer.stop()
        finish_step()
        if not update.deferred:
            self.check_earlier()
        return Metrics(numbers, timer)

    def check_earlier(self, *, but: int = 0) -> None:
        """Raise if an earlier step was refused; the last `but` are left for later.

        In the same call on every rank, also where the numbers were read already: ranks that raised in
        different calls could not go on together.
        """
        error = self.late_error(but=but)
        if error is not None:
            raise error

    def late_error(self, *, but: int = 0) -> UserError | None:
        of_steps = self.counter.late_error(but=but)
        if isinstance(of_steps, NonfiniteError) and self._search is not None:
            with self._watch.own_work():  # it runs passes again
                of_steps = self._search.explain(of_steps)
        known = of_steps or self._drift.error(before=self.counter.begun - but)
        return known or (self.audit.late_error() if but == 0 else None)


@final
class FlushedRunner(StepRunner):
    """Every step runs the whole program and makes one update, or is refused and changes nothing."""

    def _prepare(self) -> None:
        self._buffers = BufferSnapshot(self._local.modules)
        self.first_step = FirstStepChecks(self._mesh, self._local, self.observers)
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

    def _train_step(self, batch: Batch, step: int) -> StepNumbers:
        count_before = self._start()
        self._buffers.take()
        try:
            feed = self._step_feed(batch, step, count_before)
            script = self._script(("step", len(feed)), lambda: self._pass_program(len(feed)))
            self._run(script, feed)
            self._has_trained = True
        except UserError:  # a check refuses the step
            self._buffers.restore(refused=True)
            raise
        return self._update.numbers

    def _start(self) -> Number | None:
        """Clear what the last step has left; returns what its update was the mean of."""
        count_before = self._update.start_step()
        for stage in self._local.stages.values():
            stage.start_step()
        self.observers.tell("before_step")
        return count_before

    def _step_feed(self, batch: Batch, step: int, count_before: Number | None) -> dict[int, Microbatch]:
        feed = self._training_feed(batch, step, count_before)
        self._record_statistics(feed)
        return feed

    def _pass_program(self, number: int) -> Program:
        """The plan's program; a replica with few samples may have fewer microbatches than the plan."""
        program = self._local.program
        is_whole = number == program.microbatches
        return program if is_whole else step_program(self._mesh.plan, ties=False, microbatches=number)

    def norm(self, tally: Tensor) -> None:
        if self._update.units is not None:
            self._update.units.finish_passes()
        self.first_step.decide()
        super().norm(tally)

    def publish(self) -> None:
        self._buffers.restore(self._update.undoes)
        units = self._update.units
        if units is None or units.rehearsal is None:
            self.observers.tell("after_update", self._update.skips)
        super().publish()

    # Passes beside those of the step.

    def _rehearse(self, batch: Batch, step: int) -> StepNumbers:
        """Run a step without updates, where these come before its end: it may be refused, and shows what
        losses count."""
        units = self._update.units
        assert units is not None
        try:
            with self._no_side_effects(), units.rehearse(self._measure):
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

    def _record_statistics(self, feed: Mapping[int, Microbatch]) -> None:
        """Take all microbatches forward once, without a trace, where the gradient of an auxiliary loss is
        asked for before the last of them has passed the gates."""
        if self._balance is None or not self._balance.needs_pass:
            return
        # Their messages have another form: nothing wants a gradient. A model may change its inputs.
        copies = {
            number: each._replace(
                form="statistics " + each.form, inputs=tree_map_only(Tensor, torch.clone, each.inputs)
            )
            for number, each in feed.items()
        }
        with torch.no_grad(), self._no_side_effects():
            tally = self._run(self.forward_script(len(copies)), copies)
        self._balance.exchange(tally)
        for stage in self._local.stages.values():
            stage.start_step()

    def replay(self, batch: Batch, step: int) -> None:
        """Run the passes of a step again, without its update, on all ranks together. The next step clears
        the gradients that this leaves."""
        feed = self._step_feed(batch, step, self._start())
        self._run(self._passes_script(len(feed)), feed)

    def _no_side_effects(self) -> AbstractContextManager[None]:
        modules = [each for module in self._local.modules for each in module.modules()]
        return without_side_effects(self._local.modules, modules, self._mesh.device)

    @property
    def updates_last(self) -> bool:
        # With delay=1 a step begins with the weights of the update before the last.
        is_update_last = self._update.units is None and not self._mesh.plan.delay
        changes_weights = self._first_forward.has_changed or self._renormalises
        return self._has_trained and is_update_last and not changes_weights

    def buffer_copies(self) -> list[Tensor]:
        return self._buffers.storages()
