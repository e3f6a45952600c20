"""The step runner: which program runs on which microbatches, and what its instructions mean for this plan.

`FlushedRunner`: every step begins and ends with an empty pipeline and makes one update. `ContinuousRunner`
(PipeDream): a step leaves microbatches on their way, and stages update at times of their own; `drain`
finishes what is under way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.collectives.mesh import Mesh
from echelon.engine.arguments import check_loss
from echelon.engine.step.agreement import check_same_batch, check_same_gradients
from echelon.engine.step.balance import Balance, recording_of
from echelon.engine.step.measuring import Measure, Measuring
from echelon.engine.step.missing_operation import missing_operation
from echelon.engine.step.normaliser import LossNormaliser, StepNormaliser
from echelon.engine.step.runtime import Interpreter, Microbatch, MicrobatchLoss, Script, Slot, Versions, Wire
from echelon.engine.step.samples import Scopes, counting
from echelon.engine.step.side_effects import WeightChanges, frees_weights, without_autocast_cache
from echelon.engine.step.upload import Upload, to_device
from echelon.errors import UserError
from echelon.memory import Meter
from echelon.memory.activation_offload import ActivationOffload
from echelon.memory.recompute.selective import selective_of
from echelon.nn.batch import DTYPES, Batch, cast, microbatches, num_samples, shared_inputs, tensors_of
from echelon.nn.losses import total_and_count
from echelon.parallel.data import talks_in_forward
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.padding import LocalTargets
from echelon.parallel.stage import LocalStages, Stage
from echelon.program import (
    Instruction,
    Program,
    Span,
    add_gathers,
    add_transfers,
    check,
    forward_only,
    without_update,
)
from echelon.update.numbers import Number, StepNumbers
from echelon.update.update import Update

_LOST = "an earlier step failed in the middle of the pipeline, and what was under way is lost; start again"
_HALF_UPDATED = (
    "an earlier step failed in its backward pass, in which units are updated: some weights are those of "
    "after the step, and others those of before; start again from weights that were saved"
)


class StepRunner(ABC):
    """Takes batches through the stages of this rank. The interpreter's StageRuntime."""

    def __init__(
        self,
        mesh: Mesh,
        local: LocalStages,
        update: Update,
        layers: LayerSharding,
        meter: Meter,
        scopes: Scopes,
        offload: ActivationOffload | None = None,
        balance: Balance | None = None,
    ) -> None:
        self._mesh, self._local, self._update = mesh, local, update
        self._layers, self._meter, self._scopes, self._activation_offload = layers, meter, scopes, offload
        self._balance, self._records_gates = balance, True
        self._rank = mesh.group("pipeline").rank
        plan = mesh.plan
        self._pipelined = local.program.stages > 1 or not plan.flushes
        # Whether every replica runs exactly the plan's microbatches, also where its samples do not suffice.
        talks = local.lockstep or any(map(talks_in_forward, local.modules)) or plan.expert > 1
        self.fixed_count = self._pipelined or talks or plan.schedule_is_file
        self._scripts: dict[object, Script] = {}
        self._failure = _LOST  # why
        self.is_broken = False  # whether a step has failed half-way, and nobody can go on
        self._recompute = selective_of(plan)
        self._measuring = Measuring()
        self._same_batch = self._same_gradients = False  # whether ranks have compared theirs
        placement = local.program.placement
        is_here = len(placement) - 1 in local.stages
        in_backward = update.units is not None
        self._normaliser = LossNormaliser(
            mesh, placement[-1], is_here=is_here, deferred=update.deferred, exact=in_backward
        )
        if update.units is not None:
            update.units.on_unit = meter.sample
        self._measured: dict[nn.Parameter, Tensor] = {}  # gradients of a rehearsal, which are gone
        self.on_loss: Callable[[Tensor], None] | None = None  # sees the loss of each microbatch
        self.before_update: Callable[[], None] = lambda: None  # is called before weights change
        self._weight_changes: list[WeightChanges] = []
        if not frees_weights(plan):
            for stage in local.stages.values():
                stage.first_forward = changes = WeightChanges(stage.module, plan)
                self._weight_changes.append(changes)
        self.wire = Wire(mesh.edges(local.program.pairs), mesh.device)
        self._interpreter = Interpreter(local.stages, self, self.wire, mesh.device, self._prepare())

    def train(self, batch: Batch, step: int) -> StepNumbers:
        """One training step, the first of which is 0. Returns when the batch may be changed."""
        self._upload = Upload(None, self._mesh.device)
        try:
            return self._train(batch, step)
        finally:
            self._upload.wait()

    @abstractmethod
    def _train(self, batch: Batch, step: int) -> StepNumbers: ...

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way: only then can ranks do something else together."""
        return True

    def _prepare(self) -> Versions | None:
        """Begin what this kind of runner keeps between steps; returns the versions of weights, if any."""
        return None

    @property
    def updates_last(self) -> bool:
        """Whether a step is known to change weights and the optimizer's state only after all of its backward
        passes."""
        return False

    def counters(self) -> dict[str, Number]:
        """What later steps depend on, beside what is owned."""
        return self._normaliser.counters()

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on from the numbers of a checkpoint; nothing is under way."""
        self._normaliser.restore(numbers)

    def drain(self) -> None:  # noqa: B027 (nothing is left where every step ends with an empty pipeline)
        """Finish what is under way, on all ranks together."""

    def close(self) -> None:
        """Nothing is under way: wait for the last bytes that were sent."""
        self.wire.close()

    def evaluate(self, batch: Batch, measure: Measure | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The tally of what this rank computed the loss of, and (total, count) of what was measured there."""
        feed = self._feed(batch, "evaluation", self._scopes.of_evaluation(num_samples(batch)))
        with self._measuring.using(measure):
            tally = self._run(self.forward_script(len(feed)), feed)
        return tally, self._measuring.sums

    def forward_script(self, number: int) -> Script:
        """Takes `number` microbatches forward."""
        return self._script(("forward", number), lambda: self._forward_program(number))

    def _forward_program(self, number: int) -> Program:
        program = add_transfers(forward_only(self._local.program.placement, number))
        program = add_gathers(program) if self._mesh.plan.frees_weights else program
        check(program, training=False)
        return program

    def differentiate(
        self, batch: Batch, step: int, scope: Callable[[int], AbstractContextManager[None]]
    ) -> Tensor:
        """Run the passes of a step on some samples, without its update, and with nothing of gates; returns
        the tally. Gradients are summed over ranks, until `local.start_step` clears them. All ranks must call
        this, with nothing under way."""
        normaliser, balance = self._normaliser, self._balance
        watches = {stage: stage.first_forward for stage in self._local.stages.values()}
        self._normaliser, self._balance, self._records_gates = normaliser.for_a_trial(), None, False
        try:
            self._local.start_step()  # and not that of the update, which may bring other weights
            for stage in watches:
                stage.start_step()
                stage.first_forward = None
            feed = self._training_feed(batch, step, scope=scope)
            program = ("gradients", len(feed))
            return self._run(
                self._script(program, lambda: without_update(self._pass_program(len(feed)))), feed
            )
        finally:
            self._interpreter.forget_losses()
            self._normaliser, self._balance, self._records_gates = normaliser, balance, True
            for stage, watch in watches.items():
                stage.first_forward = watch

    @abstractmethod
    def _pass_program(self, number: int) -> Program:
        """Of a step with so many microbatches, from an empty pipeline to an empty one."""

    def storages(self) -> list[Tensor]:
        """Memory of weights beside the newest."""
        return []

    def buffer_copies(self) -> list[Tensor]:
        """Memory of buffers as they were before the step."""
        return []

    @property
    def spans(self) -> list[Span]:
        """When each instruction of the last step was executed here."""
        return self._interpreter.spans

    @property
    def instruction(self) -> Instruction:
        """What is executed here now."""
        return self._interpreter.instruction

    def _run(self, script: Script, feed: Mapping[int, Microbatch]) -> Tensor:
        if self.is_broken:
            raise UserError(self._failure)
        try:
            with without_autocast_cache():
                return self._interpreter.run(script, feed)
        except BaseException as error:
            self._interpreter.forget()
            if self._activation_offload is not None:
                self._activation_offload.forget()
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
        """Whether a step that has not ended has updated units already."""
        return self._update.units is not None and self._update.units.has_updated

    def _script(self, key: object, make: Callable[[], Program]) -> Script:
        if key not in self._scripts:
            self._scripts[key] = Script(make(), self._rank)
        return self._scripts[key]

    # Microbatches.

    def _training_feed(
        self,
        batch: Batch,
        step: int,
        count_before: Number | None = None,
        begin: int = 0,
        scope: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> dict[int, Microbatch]:
        if not self._same_batch:
            check_same_batch(batch, self._mesh)
            self._same_batch = True
        samples = num_samples(batch)
        feed = self._feed(batch, "training", scope or self._scopes.of_step(step, samples), begin)
        normaliser = self._normaliser.of_step(batch, samples, count_before)
        if self._update.units is not None:
            self._update.units.skip = lambda: self._skips_units(normaliser)
        scale = self._update.loss_scale
        feed = {n: each._replace(normaliser=normaliser, loss_scale=scale) for n, each in feed.items()}
        self._upload = Upload(batch, self._mesh.device)
        return feed

    def _skips_units(self, normaliser: StepNormaliser) -> bool | Tensor:
        """Whether units that are updated in the backward pass must not change."""
        if self._balance is None:
            return normaliser.is_empty
        is_broken = self._balance.is_broken()
        return normaliser.is_empty | (is_broken if self._update.deferred else bool(is_broken))

    def _feed(
        self,
        batch: Batch,
        purpose: str,
        scope: Callable[[int], AbstractContextManager[None]],
        begin: int = 0,
    ) -> dict[int, Microbatch]:
        """The microbatches of a batch, numbered from `begin`."""
        parts = microbatches(batch, self._mesh.plan.microbatches, always=self.fixed_count)
        return {
            begin + number: self.make_microbatch(part, weight, purpose, partial(scope, number))
            for number, (part, weight) in enumerate(parts)
        }

    def make_microbatch(
        self, part: Batch, weight: int, purpose: str, scope: Callable[[], AbstractContextManager[None]]
    ) -> Microbatch:
        inputs, targets, true_length = self._layers.take_part(part)
        look = purpose + _look(inputs) if self._local.program.stages > 1 else ""
        if 0 in self._local.stages:
            inputs = cast(to_device(inputs, self._mesh.device), DTYPES[self._mesh.plan.precision])
        if self._local.program.stages - 1 in self._local.stages:
            targets = targets._replace(values=to_device(targets.values, self._mesh.device))
        shared = to_device(shared_inputs(inputs), self._mesh.device)
        scope = partial(counting, num_samples(part), scope)
        around = partial(self._layers.around, true_length, shared, scope)
        return Microbatch(inputs, targets, weight, look, around)

    # What instructions mean (StageRuntime).

    @property
    def counts_loss(self) -> bool:
        return self._layers.counts_loss

    def loss(self, output: Any, microbatch: Microbatch) -> MicrobatchLoss:
        targets: LocalTargets = microbatch.targets
        with self._local.stages[self._local.program.stages - 1].during_loss():
            seen = self._layers.without_padding(output, targets)
            result = self._layers.loss(*seen)
            self._measuring.add(*seen, targets.num_samples, counts=microbatch.weight > 0)
        check_loss(result)
        total, count = total_and_count(result, targets.num_samples)
        if self.on_loss is not None:
            self.on_loss(total)
        # The samples that a mean counts are shared by the ranks along `context`.
        is_pair = isinstance(result, tuple)
        weight = microbatch.weight * (1 if is_pair else targets.share)
        normaliser: Number = 1.0
        if microbatch.normaliser is not None:  # in training
            normaliser = microbatch.normaliser.of_loss(count, targets.values, is_pair=is_pair)
            normaliser = normaliser / microbatch.loss_scale
        return MicrobatchLoss(total * weight, count * weight, normaliser)

    @contextmanager
    def around(self, microbatch: Microbatch, slot: Slot, value: Any) -> Iterator[None]:
        with (
            self._meter.activations(),
            self._offload(microbatch, slot, value),
            self._recompute(),
            self._recording(microbatch),
            microbatch.scope(),
        ):
            yield

    def _recording(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """In training, gates tell what they have seen."""
        if microbatch.normaliser is None or not self._records_gates:
            return nullcontext()
        return recording_of(self._balance, microbatch.weight)

    def _offload(self, microbatch: Microbatch, slot: Slot, value: Any) -> AbstractContextManager[None]:
        """What the forward pass saves goes to host memory; what it is given stays."""
        if self._activation_offload is None:
            return nullcontext()
        resident = tree_leaves((value, microbatch.inputs, microbatch.targets.values))
        return self._activation_offload.passing(slot, [leaf for leaf in resident if isinstance(leaf, Tensor)])

    def store(self, slot: Slot) -> None:
        if self._activation_offload is not None:
            self._activation_offload.store(slot)

    def fetch(self, slot: Slot) -> None:
        if self._activation_offload is not None:
            self._activation_offload.fetch(slot)

    def set_aside(self, slot: Slot) -> None:
        if self._activation_offload is not None:
            self._activation_offload.pause_backward(slot)

    def start_backwards(self, tally: Tensor) -> None:
        if self._balance is not None and self._balance.is_early:
            self._balance.exchange(tally)

    def reduce(self, stage: Stage) -> None:
        self._meter.sample()
        stage.reduce()

    def tie(self) -> None:
        self._update.tie()

    def norm(self, tally: Tensor) -> None:
        if self._balance is None:
            self._update.norm(tally)
            return
        self._balance.exchange(tally)
        self._update.norm(tally, self._balance.numbers())

    def update(self) -> None:
        self.before_update()
        sharded = self._layers.sharded
        # An update that changes nothing has no gradients to compare.
        if not self._same_gradients and sharded is not None and not self._update.skips:
            local, group = self._local.local_parameters(), self._mesh.group("tensor")
            check_same_gradients(local, sharded.replicated, group, self._measured)
            self._same_gradients = True
        self._update.step()

    def publish(self) -> None:
        self._update.publish()


def _look(structure: Any) -> str:
    """The shapes and types of all tensors: what the form of later activations follows from, mostly."""
    leaves = tensors_of(structure)
    return " ".join(f"{tuple(leaf.shape)}{leaf.dtype}" for leaf in leaves)
