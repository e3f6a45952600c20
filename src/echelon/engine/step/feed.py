"""Feed: the microbatches of a batch, on the device, each with its place in the training."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.collectives.mesh import Mesh
from echelon.engine.step.normaliser import LossNormaliser, StepNormaliser
from echelon.engine.step.runtime.flight import Microbatch
from echelon.engine.step.samples import Scopes
from echelon.nn.batch import DTYPES, Batch, cast, microbatches, num_samples, shared_inputs, tensors_of
from echelon.nn.dropout.training_position import CountedSamples
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages
from echelon.update.numbers import Number

Scope = Callable[[int], AbstractContextManager[None]]  # of the microbatch with this number


class Call(NamedTuple):
    """One of the batches whose gradients add up to an update: how many came before it, and whether its loss
    is the engine's own."""

    number: int = 0
    is_own: bool = True


ONLY = Call()


@final
class Feed:
    """Cuts batches as the plan says. `fixed_count`: into exactly the plan's number of microbatches, also
    where a replica has fewer samples."""

    def __init__(
        self, mesh: Mesh, local: LocalStages, layers: LayerSharding, scopes: Scopes, *, fixed_count: bool
    ) -> None:
        self._mesh, self._layers, self._scopes, self.fixed_count = mesh, layers, scopes, fixed_count
        self._is_pipelined = local.program.stages > 1
        self._is_first, self._is_last = 0 in local.stages, local.program.stages - 1 in local.stages

    def of_training(
        self,
        batch: Batch,
        step: int,
        normaliser: LossNormaliser,
        loss_scale: Number,
        *,
        count_before: Number | None = None,
        begin: int = 0,
        scope: Scope | None = None,
        call: Call = ONLY,
    ) -> tuple[dict[int, Microbatch], StepNormaliser]:
        """The microbatches of a step, numbered from `begin`, and what their losses are divided by.
        `count_before`: what the last update was the mean of."""
        samples = num_samples(batch)
        scope = scope or self._scopes.of_step(step, samples, call.number)
        parts = self._cut(batch)
        of_step = normaliser.of_step(batch, samples, count_before, own_loss=call.is_own)
        return {
            begin + number: self._microbatch(
                part, weight, "training", partial(scope, number), of_step, loss_scale
            )
            for number, (part, weight) in enumerate(parts)
        }, of_step

    def recorded_scope(self, step: Tensor, samples: int, watched: int | None) -> Scope:
        """Return the scopes of the microbatches of a step whose number is on the device."""
        return self._scopes.of_recording(step, samples, watched)

    def of_evaluation(self, batch: Batch) -> dict[int, Microbatch]:
        scope = self._scopes.of_evaluation(num_samples(batch))
        return {
            number: self._microbatch(part, weight, "evaluation", partial(scope, number))
            for number, (part, weight) in enumerate(self._cut(batch))
        }

    def _cut(self, batch: Batch) -> list[tuple[Batch, int]]:
        return microbatches(batch, self._mesh.plan.microbatches, always=self.fixed_count)

    def _microbatch(
        self,
        part: Batch,
        weight: int,
        purpose: str,
        scope: Callable[[], AbstractContextManager[None]],
        normaliser: StepNormaliser | None = None,
        loss_scale: Number = 1.0,
    ) -> Microbatch:
        inputs, targets, true_length = self._layers.take_part(part)
        device = self._mesh.device
        form = purpose + _form(inputs) if self._is_pipelined else ""
        if self._is_first:
            inputs = cast(to_device(inputs, device), DTYPES[self._mesh.plan.precision])
        if self._is_last and (moved := to_device(targets.values, device)) is not targets.values:
            targets = targets._replace(values=moved)
        shared = shared_inputs(inputs)
        shared = to_device(shared, device) if shared else shared
        scope = partial(CountedSamples, targets.num_samples, scope)
        around = self._layers.around(true_length, shared, scope)
        return Microbatch(inputs, targets, weight, form, around, normaliser, loss_scale)

    def repeated(
        self,
        microbatch: Microbatch,
        scope: Callable[[], AbstractContextManager[None]],
        normaliser: StepNormaliser | None,
        loss_scale: Number,
    ) -> Microbatch:
        """A microbatch in memory that stays, for passes on one rank."""
        scope = partial(CountedSamples, microbatch.targets.num_samples, scope)
        around = self._layers.around(None, shared_inputs(microbatch.inputs), scope)
        return microbatch._replace(scope=around, normaliser=normaliser, loss_scale=loss_scale)


def _form(structure: Any) -> str:
    """The shapes and types of all tensors: what the form of later activations follows from, mostly."""
    return " ".join(f"{tuple(leaf.shape)}{leaf.dtype}" for leaf in tensors_of(structure))


def to_device(structure: Any, device: torch.device) -> Any:
    """The same structure on the device, without waiting for it.

    A copy to a CUDA device that the host does not wait for must be from pinned memory. Where the memory is
    not pinned, or has gaps, a pinned copy is made here. No reference to that copy is kept: torch's allocator
    of pinned memory records an event behind each such transfer, and does not reuse the memory before the
    event has passed.
    """

    if type(structure) is Tensor and structure.device == device:
        return structure

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if device.type == "cuda" and leaf.is_cpu and not (leaf.is_pinned() and leaf.is_contiguous()):
            leaf = leaf.contiguous().pin_memory()  # torch would copy what is strided through other memory
        return leaf.to(device, non_blocking=True)

    return move(structure) if type(structure) is Tensor else tree_map(move, structure)


@final
class Upload:
    """The copies of one batch to the device, all of which have been queued.

    A batch in pinned memory of the user's is copied from there. The user may fill that memory with the next
    batch as soon as the step returns. The device copies when it begins the step, so at the end of the step
    the host can wait for that without losing time.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda" and any(leaf.is_cpu and leaf.is_pinned() for leaf in tensors_of(batch)):
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> None:
        """Return when the batch may be changed."""
        if self._done is not None:
            self._done.synchronize()
