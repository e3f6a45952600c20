"""The layers of a model as a plan splits them: matrices over `tensor`, hidden states along the sequence, the
sequence over `context`, and experts over `expert`. Which of them there are is known here alone; layers,
losses and dropout only see it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.collectives import Group
from echelon.collectives.agreement import gather_rows
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.nn.batch import DTYPES, num_samples
from echelon.nn.dropout.modules import keyed_modules, set_global_indices
from echelon.nn.experts import Positions, gates_of
from echelon.nn.float8 import check_parts
from echelon.nn.head.deferred import Deferral
from echelon.nn.head.losses import CompiledLoss, WaitingLoss
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.losses import Loss
from echelon.nn.sequence import View, assign
from echelon.nn.wrapping import Wrapping
from echelon.parallel import sequence_checks
from echelon.parallel.context import AllToAllView, RingView, positions, put_together, take
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.expert.split import spread_experts
from echelon.parallel.own_loss import ObjectiveLoss, in_float32
from echelon.parallel.padding import HiddenPadding, LocalTargets, Padding, SplitOutput, has_positions
from echelon.parallel.pipeline import StageModule
from echelon.parallel.tensor.modules import number_layers, split_loss
from echelon.parallel.tensor.split import Sharded, split_over
from echelon.parallel.tensor.styles import Table
from echelon.program import Program
from echelon.program.build import step_program
from echelon.state.ownership import OwnedSlice, Shard


class LocalPart(NamedTuple):
    """This rank's part of the sequences of a microbatch; `true_length`: of all of them, if padded."""

    inputs: Any
    targets: LocalTargets
    true_length: int | None


@dataclass
class LogitsChoice:
    """Whether a pass needs all logits, though the engine's own loss takes parts of the vocabulary."""

    are_joined: bool = False
    are_seen: bool = False  # not by the loss alone


class LayerSharding:
    def __init__(
        self, model: nn.Module, mesh: Mesh, loss: Loss, tensor_table: Table | None, wrapping: Wrapping
    ) -> None:
        """Split `model` in place."""
        self._mesh, self._context = mesh, mesh.group("context")
        self.by_layers = mesh.plan.sequence or mesh.plan.context > 1  # the model's own forward knows neither
        layers = _layers(model, mesh) if self.by_layers else []
        sequence_checks.check_positions(layers, mesh.plan)
        sequence_checks.check_heads(model, mesh.plan)
        sequence_checks.check_masks(model, mesh.plan)
        before = list(layers[0].modules()) if layers else []  # where all of the sequence is seen
        self._before = frozenset(before)
        self._routes_padding = not all(gate.skips_padding for gate in gates_of(model))
        not_causal = sequence_checks.classes_not_causal(model, layers[1:])
        has_experts = mesh.plan.expert > 1
        self._expert_shards = spread_experts(model, mesh.group("expert"), wrapping) if has_experts else {}
        self.sharded = self._split(model, loss, tensor_table, before, wrapping)
        check_parts(model, mesh.plan)
        if mesh.plan.sequence:
            assert self.sharded is not None
            sequence_checks.check_split(model, before, self.sharded, mesh.plan)
        self.user_loss, self.whole_loss = loss, in_float32(loss, DTYPES[mesh.plan.precision])
        self.loss, self._ignores = self._loss(loss), split_loss(loss) is not None
        # Whether the last layer returns this rank's part of the vocabulary, for a loss of parts.
        self.has_split_logits = self.loss is not self.whole_loss
        self.logits, self.deferral = LogitsChoice(), Deferral()
        self._place_dropout(model, before)
        self._padding = Padding(mesh.plan, self._context.rank)
        self.view = self._make_view()  # of layers on a sequence
        self._hidden_padding = self._pad_hidden(not_causal)
        if self.by_layers:
            self._place_gates(model, wrapping)

    # Tensor.

    def _split(
        self,
        model: nn.Module,
        loss: Loss,
        tensor_table: Table | None,
        before: Sequence[nn.Module],
        wrapping: Wrapping,
    ) -> Sharded | None:
        group = self._mesh.group("tensor")
        if group.size == 1:
            return None
        sequence, joins = self._mesh.plan.sequence, split_loss(loss) is None
        return split_over(
            model, group, tensor_table, wrapping, sequence=sequence, whole_sequence=before, join_logits=joins
        )

    def _loss(self, loss: Loss) -> Loss:
        """The same, of what the last layer returns here."""
        over_parts = split_loss(loss)
        vocabulary = None if self.sharded is None else self.sharded.vocabulary
        if over_parts is None or vocabulary is None:
            return self.whole_loss
        group = self._mesh.group("tensor")
        return lambda output, targets: over_parts(output, targets, group, vocabulary)

    def compile_loss(self, options: dict[str, Any] | None) -> None:
        """Let the logits of a loss that is not known wait, too, and compile it with the head's matrix. One in
        float32 at least, and one that the model computes, is called as it is."""
        is_known = isinstance(self.whole_loss, WaitingLoss) or self.whole_loss is self.user_loss
        if is_known or self.has_split_logits or isinstance(self.user_loss, ObjectiveLoss):
            return
        place, frees_weights = self._mesh.position, self._mesh.plan.frees_weights
        warns = place.data == place.tensor == place.context == 0
        self.whole_loss = self.loss = CompiledLoss(
            self.whole_loss, options, frees_weights=frees_weights, warns=warns
        )

    @contextmanager
    def using(self, loss: Loss | None, *, whole_logits: bool = False) -> Iterator[None]:
        """Inside, passes compute this loss, if any. `whole_logits`: others look at the output too."""
        own = self.user_loss, self.whole_loss, self.loss, self._ignores
        if loss is not None:
            self.user_loss, self.whole_loss = loss, in_float32(loss, DTYPES[self._mesh.plan.precision])
        is_whole = whole_logits or not self.has_split_logits  # the head has joined them already
        self.loss = self.whole_loss if is_whole else self._loss(self.user_loss)
        self._ignores = split_loss(self.user_loss) is not None
        self.logits.are_joined = self.has_split_logits and self.loss is self.whole_loss
        self.logits.are_seen = whole_logits
        try:
            yield
        finally:
            self.user_loss, self.whole_loss, self.loss, self._ignores = own
            self.logits.are_joined = self.logits.are_seen = False

    def deferring(self, *, trains: bool) -> AbstractContextManager[None] | None:
        """Around a forward pass whose output goes to the loss: logits may wait for one that is known."""
        takes_deferred = isinstance(self.loss, WaitingLoss) and self.loss.takes_deferred
        knows_loss = takes_deferred or split_loss(self.user_loss) is not None
        return self._allowing(trains) if knows_loss and not self.logits.are_seen else None

    @contextmanager
    def _allowing(self, trains: bool) -> Iterator[None]:
        self.deferral.is_allowed, self.deferral.differentiates = True, trains
        try:
            yield
        finally:
            self.deferral.is_allowed = False

    @property
    def counts_loss(self) -> bool:
        """Return whether losses are this rank's to count: the ranks along `tensor` compute the same."""
        return self._mesh.position.tensor == 0

    def sees_part(self, module: nn.Module) -> bool:
        """Return whether the ranks along `tensor` call the module with different positions."""
        return self._mesh.plan.sequence and module not in self._before

    def shared_gradients(self, module: nn.Module) -> list[SharedGradient]:
        """Return the gradients of which each tensor rank has a part: they sum them."""
        if self.sharded is None:
            return []
        group, inside = self._mesh.group("tensor"), set(module.parameters())
        partial_gradients = [p for p in self.sharded.partial if p in inside and p.requires_grad]
        return [SharedGradient(p, group, counts_norm=self.counts_loss) for p in partial_gradients]

    @property
    def norm_elsewhere(self) -> frozenset[nn.Parameter]:
        """The parameters whose gradients the first tensor rank counts in the norm."""
        if self.sharded is None or self.counts_loss:
            return frozenset()
        return frozenset(self.sharded.replicated)

    def overlap(self, model: nn.Module, program: Program) -> None:
        """Let sums of gradients go on behind those of weights, where one backward pass computes both and it
        is known which weights are there at once. What is compiled goes its own way."""
        if self.sharded is None:
            return
        plan, layers = self._mesh.plan, listed_layers(model)
        number_layers(layers)
        self.sharded.region.overlaps = (
            not program.halves
            and not plan.compile
            and plan.precision != "fp8"  # whose products are nodes of the graph one by one
            and (not plan.frees_weights or bool(layers))
        )

    def shard_of(self, name: str) -> Shard | None:
        """Return the part of a parameter that this rank has along `tensor`; None if it has all."""
        return None if self.sharded is None else self.sharded.shards.get(name)

    def shards_of(self, name: str) -> list[Shard]:
        """Return the shards of a parameter here: the first of the whole one, each next of the one before."""
        experts, matrices = self.experts_of(name), self.shard_of(name)
        return [shard for shard in (experts, matrices) if shard is not None]

    def experts_of(self, name: str) -> Shard | None:
        """Return the experts of a parameter that this rank has; None if all, or if it is of no experts."""
        return self._expert_shards.get(name)

    def in_whole(self, owned: OwnedSlice) -> list[OwnedSlice]:
        """Return what this rank owns of its part of a tensor, as boxes of the whole tensor."""
        boxes = [owned]
        for shard in reversed(self.shards_of(owned.slice.name)):
            boxes = [whole for box in boxes for whole in shard.in_whole(box)]
        return boxes

    # The sequence.

    def connect(
        self, model: nn.Module, stages: Mapping[int, nn.Module], program: Program, wrapping: Wrapping
    ) -> None:
        """Let the layers of this rank's stages know which part of the sequence they see."""
        self.overlap(model, program)
        for stage in stages.values():
            if isinstance(stage, StageModule):  # and not the model, whose forward knows no view
                assign(stage, self.view, wrapping)
        if self._hidden_padding is not None:
            num_stages = step_program(self._mesh.plan, ties=False).stages
            self._hidden_padding.connect(stages, num_stages, wrapping)
        if self._mesh.plan.sequence and 0 in stages:
            assert self.sharded is not None
            first = listed_layers(stages[0])[0]
            wrapping.after("sequence", first, SplitOutput(self.sharded.region.part, self._hidden_padding))

    def _make_view(self) -> View:
        plan = self._mesh.plan
        shared = AllToAllView if plan.attention == "all-to-all" else RingView
        view: View = shared(self._context) if plan.context > 1 else View()
        view.stretch = plan.tensor if plan.sequence else 1
        return view

    def _pad_hidden(self, not_causal: Sequence[str]) -> HiddenPadding | None:
        plan = self._mesh.plan
        if not plan.sequence or plan.context > 1:
            return None
        assert self.sharded is not None
        by_heads = self.sharded.by_heads
        return HiddenPadding(plan, self.view, not_causal, by_heads, routes_padding=self._routes_padding)

    def take_part(self, batch: tuple[Any, Any]) -> LocalPart:
        """This rank's part of the sequences of a batch, padded where ranks cannot share them evenly."""
        length = self._padding.true_length(batch)
        if length is not None:
            by_heads = [] if self.sharded is None else self.sharded.by_heads
            sequence_checks.check_weight_masks(by_heads, self._mesh.plan, length)
            if self._routes_padding:
                sequence_checks.check_gate_padding(self._mesh.plan, length)
            batch = self._padding.pad(batch, length)
        inputs, targets = batch
        if self._context.size > 1:
            take_local = partial(take, rank=self._context.rank, ranks=self._context.size)
            inputs, targets = tree_map(lambda leaf: take_local(leaf) if has_positions(leaf) else leaf, batch)
        return LocalPart(inputs, self._padding.targets(targets, length, num_samples(batch)), length)

    def without_padding(self, output: Any, targets: LocalTargets) -> tuple[Any, Any]:
        """Return the output of the model and its targets as the loss takes them; inside of `around`."""
        if self._hidden_padding is None:
            return targets.without_padding(output, ignores=self._ignores)
        return self._hidden_padding.without_padding(output, targets.values, ignores=self._ignores)

    def around(
        self,
        true_length: int | None,
        shared: Mapping[str, Any],
        scope: Callable[[], AbstractContextManager[None]],
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return what opens a forward pass: layers know the true length of the sequence, and what all may ask
        for."""
        if true_length is None and not shared and self._hidden_padding is None:
            return scope  # the view stays as it is
        return lambda: _inside(self.view.seeing(true_length, shared), scope)

    # Dropout and gates.

    def _place_dropout(self, model: nn.Module, before: Sequence[nn.Module]) -> None:
        """Masks are those of one device: a dropout is told which part of the whole it is given."""
        by_heads = [] if self.sharded is None else self.sharded.by_heads
        inner = [] if self.sharded is None else self.sharded.inner
        for module in keyed_modules(model):
            if module in by_heads:
                set_global_indices(module, self._heads)
            elif self.by_layers:
                split = self._mesh.plan.sequence and module not in before and module not in inner
                set_global_indices(module, self._stream if split else self._positions)

    def _place_gates(self, model: nn.Module, wrapping: Wrapping) -> None:
        """Noise and capacity are those of one device: a gate is told which part of a sequence it sees."""
        for gate in gates_of(model):
            is_split = self.sees_part(gate)
            stream = self._mesh.group("tensor") if is_split else None
            numbers = self._stream if is_split else self._positions
            wrapping.assign(gate, "positions", SharedPositions(numbers, self._context, stream, self.view))

    def _heads(self, count: int) -> Tensor:
        return torch.arange(count, device=self._mesh.device) + count * self._mesh.position.tensor

    def _positions(self, length: int) -> Tensor:
        return positions(length, self._context.rank, self._context.size, self._mesh.device)

    def _stream(self, length: int) -> Tensor:
        """Return the positions of this rank along `tensor`, out of its part along `context`."""
        plan = self._mesh.plan
        return self._positions(length * plan.tensor).chunk(plan.tensor)[self._mesh.position.tensor]


@contextmanager
def _inside(
    outer: AbstractContextManager[None], scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with outer, scope():
        yield


def _layers(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    layers = listed_layers(model)
    if not layers:
        raise UserError(
            f"plan '{mesh.plan}': {type(model).__name__} lists no layers, between which sequences are split; "
            f"{how_to_list(model)}"
        )
    return layers


# The positions that a gate of experts sees, where ranks share sequences (`context`, `sequence`).


@final
class SharedPositions(Positions):
    """This rank's part of the sequences, of which every rank has an equal number of positions."""

    def __init__(
        self, numbers: Callable[[int], Tensor], context: Group, stream: Group | None, view: View
    ) -> None:
        """`numbers`: from the number of positions here to their places in the whole sequence. `stream`: the
        ranks that divide the part of a context rank. `view` knows what is padding."""
        self._numbers, self._context, self._stream, self._view = numbers, context, stream, view

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedPositions":
        """A copy of a gate sees the same part: it is called inside of the same passes."""
        return self

    def numbers(self, length: int) -> Tensor:
        return self._numbers(length)

    def is_true(self, length: int) -> Tensor | None:
        true_length = self._view.true_length
        return None if true_length is None else self._numbers(length) < true_length

    def whole_length(self, length: int) -> int:
        true_length = self._view.true_length
        parts = self._context.size * (1 if self._stream is None else self._stream.size)
        return length * parts if true_length is None else true_length

    def gather(self, x: Tensor) -> Tensor:
        if self._stream is not None:
            x = torch.cat(_all(x, self._stream), 1)
        return put_together(_all(x, self._context))


def _all(x: Tensor, group: Group) -> list[Tensor]:
    if group.size == 1:
        return [x]
    return list(gather_rows(x.detach(), group, "routing"))
