"""One training step, from top to bottom.

Step.train            read the batch, audit it if it is due, count the step, return its metrics
FlushedRunner         start → feed → run the program → numbers
    the program       FORWARD, loss, BACKWARD of each microbatch, messages between stages: interpreter.py
                      REDUCE: gradients are summed over replicas (parallel/data, behind the backward pass)
    norm, update,     what its last instructions mean: one norm over all ranks, the optimizer, new weights
    publish           to all ranks (update/). PipeDream schedules have a runner of their own: continuous.py
"""

from typing import Any, final

from torch import Tensor

from echelon.collectives.agreement import check_on_every_rank
from echelon.engine.audit.audit_batch import GivenBatch
from echelon.engine.audit.auditing import Audit
from echelon.engine.audit.drift import DriftCheck
from echelon.engine.setup import Setup
from echelon.engine.step.agreement import check_same_batch
from echelon.engine.step.batch_reader import BatchReader, to_plain
from echelon.engine.step.feed import ONLY, Call
from echelon.engine.step.first_step import FirstStepChecks
from echelon.engine.step.metrics import Metrics, StepTimer
from echelon.engine.step.nonfinite_search import NonfiniteSearch
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.runtime.flight import Microbatch
from echelon.engine.step.samples import number_of
from echelon.engine.step.side_effects import Ways, renormalises_any
from echelon.engine.step.side_passes import SidePasses
from echelon.engine.step.step_counter import StepCounter
from echelon.engine.watch.watch import Watch
from echelon.errors import UserError
from echelon.launching import finish_step, start_step
from echelon.nn.batch import Batch, num_samples
from echelon.nn.forward_state import BufferSnapshot
from echelon.program import Program
from echelon.program.build import step_program
from echelon.update.nonfinite import NonfiniteError
from echelon.update.numbers import Known, StepNumbers, Tallies


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
        self._check_earlier_steps()
        pair = self._read(batch, self._setup.reader)
        with self._watch.step(is_empty=self._runner.is_empty) as refusal:
            self._ask_audit(batch, pair, refusal, self._setup.reader)
            timer = self._begin(pair)
            return self._finish(self._runner.train(pair, self.counter.begun), timer)

    def _check_earlier_steps(self) -> None:
        # After many steps that were skipped, the next one must not begin before the last one is known.
        self.check_earlier(but=0 if self.counter.is_near_limit and self.counter.is_in_row else 1)
        start_step(self.counter.begun + 1)

    def _read(self, batch: Any, reader: BatchReader) -> Batch:
        """The batch as (inputs, targets). What one replica refuses of its first batch is raised by all: the
        others would wait for it."""
        is_first, self._is_first = self._is_first, False
        if is_first and self._setup.mesh.plan.sync != "async":
            check_on_every_rank(lambda: reader.read(batch))
        return reader.read(batch)

    def _ask_audit(self, given: Any, batch: Batch, refusal: UserError | None, reader: BatchReader) -> None:
        """Raise, on every rank, if this step would train something else than one device."""
        if self.audit.is_on:
            if not self.audit.results:
                check_same_batch(batch, self._setup.mesh)
            read = GivenBatch(to_plain(given), batch, reader.read)
            took_other_way = self.counter.pop_other_way()
            self.audit.ask(
                read,
                self.counter.begun,
                is_empty=self._runner.is_empty,
                refusal=refusal,
                took_other_way=took_other_way,
            )

    def _begin(self, pair: Batch | None) -> StepTimer:
        timer = StepTimer(self._setup.mesh.device)
        self._setup.mesh.ledger.start_step()
        if self._search is not None and self.counter.is_near_limit and pair is not None:
            self._search.keep(pair, self.counter.begun)
        self._setup.update.set_learning_rate(self.counter.begun)
        return timer

    def _finish(self, numbers: StepNumbers, timer: StepTimer) -> Metrics:
        self.counter.add(numbers)
        self._drift.after_step(self.counter.begun - 1)
        self._setup.observers.tell("after_step")
        timer.stop()
        finish_step()
        if not self._setup.update.deferred:
            self.check_earlier()
        metrics = Metrics(numbers, timer)
        self._setup.observers.tell("after_timing", self.counter.begun, metrics)
        return metrics

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
class FlushedRunner(SidePasses):
    """Every step runs the whole program and makes one update, or is refused and changes nothing."""

    def _prepare(self) -> None:
        self._buffers = BufferSnapshot(self._local.modules)
        self.first_step = FirstStepChecks(self._mesh, self._local, self.observers)
        self._is_rehearsed = self._update.units is None
        self._has_trained = False  # the first step tries things out
        self.tallies = Tallies()  # of the update that is under way
        self._ways = Ways()
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
        self.begin(step)
        self.pass_through(batch, last=True)
        if self.graphs is not None:  # nothing of the user's comes between passes and update
            self.tallies.replayed = self.graphs.numbers
        return self.finish()

    # The parts of a step: passes of one batch, or of several whose gradients add up, and the update.

    def begin(self, step: int) -> None:
        """Clear what the last step has left."""
        self._number = self._update.number = step
        self._start()
        self._buffers.take()
        self.tallies = Tallies()
        self._ways.start()

    def pass_through(self, batch: Batch, *, last: bool, own_loss: bool = True) -> Tensor:
        """Take a batch forward and back; its gradients add to those that are there. Returns the tally of its
        losses on this rank. `last`: no other follows, so that sums over ranks go on behind the passes.
        `own_loss`: the loss is the engine's own, of which earlier steps tell what it counts."""
        try:
            call = Call(self.tallies.next_pass(), own_loss)
            if call.number and self._balance is not None:
                self._balance.next_batch()
            for stage in self._local.stages.values():
                stage.start_step()  # each batch is one forward pass of one device, however it is cut
            feed = self._step_feed(batch, self._number, call)
            script = self._part_script(len(feed), sums=last)
            number, graphs = number_of(self._number, call.number), self.graphs
            tally = self.run_as_is(script, feed) if graphs is None else graphs.run(script, feed, number)
            self.tallies.add(tally, is_own=own_loss, is_summed=last)
        except UserError:  # a check refuses the step
            self._buffers.restore(refused=True)
            raise
        return tally.row

    def finish(self) -> StepNumbers:
        """Sum gradients over ranks, if they are not, and make the update."""
        try:
            self._run(self._update_script(sums=not self.tallies.is_summed), {})
        except UserError:  # a check refuses the step
            self._buffers.restore(refused=True)
            raise
        self._has_trained = True
        return self._update.numbers

    def _start(self) -> None:
        self._count_before = self._update.start_step()
        self._normaliser.start_update()
        self.observers.tell("before_step")

    def _pass_program(self, number: int) -> Program:
        """The plan's program; a replica with few samples may have fewer microbatches than the plan."""
        program = self._local.program
        is_whole = number == program.microbatches
        return program if is_whole else step_program(self._mesh.plan, ties=False, microbatches=number)

    def _step_feed(self, batch: Batch, step: int, call: Call = ONLY) -> dict[int, Microbatch]:
        feed = self._training_feed(batch, step, self._count_before, call=call)
        if self._balance is not None and self._balance.needs_pass:
            self._record_statistics(feed)
        return feed

    def norm(self, tally: Tensor, *, own: int | None = 0, known: Known | None = None) -> None:  # noqa: ARG002
        if self._update.units is not None:
            self._update.units.finish_passes()
        self.first_step.decide()
        self._update.took_other_way = not self._enters_other_nodes and self._ways.is_new()
        super().norm(self.tallies.joined(), own=self.tallies.own, known=self.tallies.known)

    def publish(self) -> None:
        self._buffers.restore(self._update.undoes)
        units = self._update.units
        if units is None or units.rehearsal is None:
            self.observers.tell("after_update", self._update.skips)
        super().publish()

    @property
    def updates_last(self) -> bool:
        # With delay=1 a step begins with the weights of the update before the last.
        is_update_last = self._update.units is None and not self._mesh.plan.delay
        return self._has_trained and is_update_last and not self.changes_weights

    @property
    def changes_weights(self) -> bool:
        """Return whether a forward pass does."""
        return self._first_forward.has_changed or self._renormalises

    def buffer_copies(self) -> list[Tensor]:
        return self._buffers.storages()
