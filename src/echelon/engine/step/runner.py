"""The step runner: runs programs on the microbatches of batches.

`FlushedRunner` (step.py): every step begins and ends with an empty pipeline and makes one update.
`ContinuousRunner` (PipeDream): a step leaves microbatches under way, and stages update at times of their own;
`drain` finishes what is under way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from echelon.engine.setup import Setup
from echelon.engine.step.agreement import check_same_batch, check_same_gradients
from echelon.engine.step.balance import Balance, DiscardStatistics
from echelon.engine.step.feed import ONLY, Call, Feed, Scope, Upload
from echelon.engine.step.missing_operation import missing_operation
from echelon.engine.step.normaliser import LossNormaliser, StepNormaliser
from echelon.engine.step.runtime.flight import Losses, Microbatch
from echelon.engine.step.runtime.interpreter import Interpreter
from echelon.engine.step.runtime.script import Script
from echelon.engine.step.runtime.span_timer import SpanTimer
from echelon.engine.step.runtime.versions import Versions
from echelon.engine.step.runtime.wire import Wire
from echelon.engine.step.side_effects import FirstForward, WithoutAutocastCache
from echelon.errors import UserError
from echelon.nn.batch import Batch
from echelon.nn.losses import Loss
from echelon.nn.sample_gathering import Replicas
from echelon.parallel.data.batch_norm import talks_in_forward
from echelon.program import (
    Instruction,
    Program,
    Span,
    add_gathers,
    add_transfers,
    check,
    forward_only,
    split_update,
    without_update,
)
from echelon.update.numbers import Known, Number, StepNumbers

if TYPE_CHECKING:
    from echelon.engine.step.graphs.graphed_passes import GraphedPasses

_LOST = "an earlier step failed in the middle of the pipeline, and what was under way is lost; start again"
_HALF_UPDATED = (
    "an earlier step failed in its backward pass, in which units are updated: some weights are those of "
    "after the step, and others those of before; start again from weights that were saved"
)


class StepRunner(ABC):
    """Takes batches through the stages of this rank."""

    graphs: "GraphedPasses | None" = None  # where passes may be recorded

    def __init__(self, setup: Setup, balance: Balance | None = None) -> None:
        self._mesh, self._local, self._update = setup.mesh, setup.local, setup.update
        self._model = setup.model
        self._layers, self._scopes, self.observers = setup.layers, setup.scopes, setup.observers
        self._balance = balance
        plan, program = self._mesh.plan, self._local.program
        self._rank = self._mesh.group("pipeline").rank
        self._pipelined = program.stages > 1 or not plan.flushes
        talks = self._local.lockstep or any(map(talks_in_forward, self._local.modules)) or plan.expert > 1
        # Ranks that talk within passes must run the same number of them.
        fixed_count = self._pipelined or talks or plan.schedule_is_file
        self.feed = Feed(self._mesh, self._local, self._layers, self._scopes, fixed_count=fixed_count)
        deferred = self._update.deferred or self._mesh.device.type != "cpu"  # numbers of losses are not read
        self.losses = Losses(self._layers, self.observers, deferred=deferred)
        self.replicas = Replicas(self._mesh)
        self._normaliser = LossNormaliser(
            self._mesh,
            program.placement[-1],
            is_here=len(program.placement) - 1 in self._local.stages,
            deferred=self._update.deferred,
            exact=self._update.units is not None,
        )
        self._scripts: dict[object, Script] = {}
        self._failure = _LOST  # why
        self.is_broken = False  # whether a step has failed half-way, and no rank can go on
        self._same_batch = self._same_gradients = False  # whether ranks have compared theirs
        self._measured: dict[nn.Parameter, Tensor] = {}  # gradients of a rehearsal, which are gone
        self._first_forward = FirstForward(self._local, plan)
        self.observers.add(self._first_forward)
        self.wire = Wire(self._mesh.edges(program.pairs), self._mesh.device)
        self._interpreter = Interpreter(
            self._local.stages,
            self.losses,
            self.observers,
            self,
            self.wire,
            self._mesh.device,
            self._prepare(),
            deferred=deferred,
        )

    def train(self, batch: Batch, step: int) -> StepNumbers:
        """One training step, the first of which is 0. Returns when the batch may be changed."""
        self._upload = Upload(None, self._mesh.device)
        if self.graphs is not None:
            self.graphs.start_step()
        try:
            numbers = self._train(batch, step)
            if self.graphs is not None:
                self.graphs.finish_step()
            return numbers
        finally:
            self.wait_for_batch()

    def wait_for_batch(self) -> None:
        """Return when the batch may be changed."""
        self._upload.wait()

    @abstractmethod
    def _train(self, batch: Batch, step: int) -> StepNumbers: ...

    def _prepare(self) -> Versions | None:
        """Begin what this kind of runner keeps between steps; returns the versions of weights, if any."""
        return None

    # Between steps.

    @property
    def user_loss(self) -> Loss:
        """The loss as the user gave it."""
        return self._layers.user_loss

    @property
    def is_empty(self) -> bool:
        """True if nothing is under way: only then can ranks do something else together."""
        return True

    @property
    def updates_last(self) -> bool:
        """True if a step is known to change weights and the optimizer's state only after all of its backward
        passes."""
        return False

    def counters(self) -> dict[str, Number]:
        """Return the numbers that later steps depend on, beside the owned state."""
        return self._normaliser.counters()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on from the numbers of a checkpoint; nothing is under way."""
        self._normaliser.restore(numbers)

    def drain(self) -> None:  # noqa: B027 (nothing is left where every step ends with an empty pipeline)
        """Finish what is under way, on all ranks together."""

    def close(self) -> None:
        """Nothing is under way: wait for the last bytes that were sent."""
        self.wire.close()

    def storages(self) -> list[Tensor]:
        """Memory of weights beside the newest."""
        return []

    def buffer_copies(self) -> list[Tensor]:
        """Memory of buffers as they were before the step."""
        return []

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed here; waits for a CUDA device."""
        return self.timer.spans

    @property
    def timer(self) -> SpanTimer:
        return self._interpreter.timer

    @property
    def instruction(self) -> Instruction:
        """The instruction that is executed here now."""
        return self._interpreter.instruction

    # Passes without an update.

    def forward(self, batch: Batch) -> Tensor:
        """Take a batch forward, for observers to see, in the mode that the model has; returns the tally."""
        for stage in self._local.stages.values():
            stage.start_step()  # one forward pass of one device, however it is cut
        feed = self.feed.of_evaluation(batch)
        return self._run(self.forward_script(len(feed)), feed)

    @contextmanager
    def evaluation_mode(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        modes = [module.training for module in modules]
        try:
            self._model.train(False)  # which a model may override, to keep a part of it in training mode
            for module in set(modules) - set(self._model.modules()):
                module.training = False
            yield
        finally:
            for module, training in zip(modules, modes, strict=True):
                module.training = training

    def differentiate(self, batch: Batch, step: int, scope: Scope, samples: int) -> Tensor:
        """Run the passes of a step on so many samples, which replicas may repeat, without its update, and
        with nothing of gates; returns the tally. Gradients are summed over ranks, until `local.start_step`
        clears them. All ranks must call this, with nothing under way."""
        normaliser = self._normaliser
        self._normaliser = normaliser.for_a_trial(samples)
        try:
            with self.observers.without(Balance, DiscardStatistics, FirstForward):
                self._local.start_step()  # and not that of the update, which may bring other weights
                for stage in self._local.stages.values():
                    stage.start_step()
                feed = self._training_feed(batch, step, scope=scope)
                return self._run(self._passes_script(len(feed)), feed)
        finally:
            self._interpreter.forget_losses()
            self._normaliser = normaliser

    def forward_script(self, number: int) -> Script:
        """Takes `number` microbatches forward."""
        return self._script(("forward", number), lambda: self._forward_program(number))

    def _forward_program(self, number: int) -> Program:
        program = add_transfers(forward_only(self._local.program.placement, number))
        program = add_gathers(program) if self._mesh.plan.frees_weights else program
        check(program, training=False)
        return program

    def _passes_script(self, number: int) -> Script:
        """All of a step's passes on `number` microbatches, without its update."""
        return self._script(("passes", number), lambda: without_update(self._pass_program(number)))

    @abstractmethod
    def _pass_program(self, number: int) -> Program:
        """Make the program of `number` microbatches, from an empty pipeline to an empty one."""

    def _part_script(self, number: int, *, sums: bool) -> Script:
        """A step's passes on `number` microbatches. `sums`: and the sums of their gradients over ranks."""
        return self._script(
            ("part", number, sums), lambda: split_update(self._pass_program(number))[0], sums=sums
        )

    def _update_script(self, *, sums: bool) -> Script:
        """The rest of a step. `sums`: after passes whose gradients are to be summed."""
        return self._script(
            ("update", sums), lambda: split_update(self._local.program, sums=sums)[1], continues=True
        )

    def _script(self, key: object, make: Callable[[], Program], **options: bool) -> Script:
        if key not in self._scripts:
            self._scripts[key] = Script(make(), self._rank, **options)
        return self._scripts[key]

    def _training_feed(
        self,
        batch: Batch,
        step: int,
        count_before: Number | None = None,
        begin: int = 0,
        scope: Scope | None = None,
        call: Call = ONLY,
    ) -> dict[int, Microbatch]:
        if not self._same_batch:
            check_same_batch(batch, self._mesh)
            self._same_batch = True
        feed, normaliser = self.feed.of_training(
            batch,
            step,
            self._normaliser,
            self._update.loss_scale,
            count_before=count_before,
            begin=begin,
            scope=scope,
            call=call,
        )
        if self._update.units is not None:
            self._update.units.start_passes(
                lambda: self._skips_units(normaliser), lambda: self.observers.tell("before_unit")
            )
        self._upload = Upload(batch, self._mesh.device)
        return feed

    def _skips_units(self, normaliser: StepNormaliser) -> bool | Tensor:
        """Return whether units that are updated in the backward pass must not change."""
        if self._balance is None:
            return normaliser.is_empty
        is_broken = self._balance.is_broken()
        return normaliser.is_empty | (is_broken if self._update.deferred else bool(is_broken))

    def _run(self, script: Script, feed: Mapping[int, Microbatch]) -> Tensor:
        if self.is_broken:
            raise UserError(self._failure)
        try:
            with WithoutAutocastCache(), self.replicas.gathering():
                return self._interpreter.run(script, feed)
        except BaseException as error:
            self._interpreter.forget()
            self.observers.tell("abandon")
            for stage in self._local.stages.values():
                stage.abandon_pass()
            self.is_broken = self._pipelined or self._is_half_updated
            self._failure = _HALF_UPDATED if self._is_half_updated else _LOST
            missing = missing_operation(str(error), self._mesh.plan, self._mesh.device)
            if missing is not None and isinstance(error, RuntimeError):
                raise missing from error
            raise

    @property
    def _is_half_updated(self) -> bool:
        """True if a step that has not ended has updated units already."""
        return self._update.units is not None and self._update.units.has_updated

    # What the last instructions of a program mean, when the gradients of all stages are summed.

    def tie(self) -> None:
        self._update.tie()

    def norm(self, tally: Tensor, *, own: int | None = 0, known: Known | None = None) -> None:
        gates = None
        if self._balance is not None:
            self._balance.exchange(tally)
            gates = self._balance.numbers()
        self._update.norm(tally, gates, own=own, known=known)

    def update(self) -> None:
        self.observers.tell("before_update")
        sharded = self._layers.sharded
        # An update that changes nothing has no gradients to compare.
        if not self._same_gradients and sharded is not None and not self._update.skips:
            local, group = self._local.local_parameters(), self._mesh.group("tensor")
            check_same_gradients(local, sharded.replicated, group, self._measured)
            self._same_gradients = True
        self._update.step()

    def publish(self) -> None:
        self._update.publish()
