"""One unit, split and unsplit: the same inputs, weights and masks, and the same gradient of the output."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.audit.arguments import Arguments, copy_arguments
from echelon.audit.differences import (
    Difference,
    beyond_rounding,
    compare,
    tolerance_inside,
    tolerance_of,
)
from echelon.audit.reference import Place, Replaced, Weights, WholeWeights, in_a_row, with_weights
from echelon.audit.stage_agreement import CannotCompareError, StageAgreement, add_over
from echelon.audit.texts import gather_rows
from echelon.audit.unit_runs import Modes, Run, draw_gradient, gradients_of, in_modes, is_real, run
from echelon.audit.units import AuditUnit
from echelon.audit.whole_values import Division, ValueGroups, cut
from echelon.expert_parallel import Spread
from echelon.fingerprint import measures, near
from echelon.mesh import Mesh
from echelon.quantities import show_bytes
from echelon.sequence import View
from echelon.tensor_parallel import Sharded

_TAKEN = 3  # times the bytes of a unit's weights: these, their gradients, and the largest again


class Outcome(NamedTuple):
    """What differs, or why the unit could not be compared; neither where it is the same."""

    differences: Sequence[Difference] = ()
    unresolved: str = ""


class _Output(NamedTuple):
    """What this rank has of an output, and the whole one."""

    local: Tensor
    whole: Tensor
    division: Division


@final
class LayerComparison:
    """Compares units of this rank's stages, on all ranks of the stage together."""

    def __init__(
        self,
        mesh: Mesh,
        values: ValueGroups,
        view: View,
        sharded: Sharded | None,
        spread: Spread | None,
        parameters: Mapping[str, nn.Parameter],
        make_weights: Callable[[], WholeWeights],
        free_bytes: Callable[[], float],
    ) -> None:
        """`parameters`: this rank's, by name. `free_bytes`: how much memory it may take for a while."""
        self._mesh, self._values, self._view = mesh, values, view
        self._parameters, self._make_weights, self._free_bytes = parameters, make_weights, free_bytes
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._shards = {} if sharded is None else sharded.shards
        self._experts = {} if spread is None else spread.shards
        self._partial = set() if sharded is None else set(sharded.partial)
        self._agreement = StageAgreement(mesh.group("stage"), mesh.device)
        floats = [tolerance_of(p) for p in parameters.values() if p.is_floating_point()]
        self._tolerance = max(floats, default=0.0)
        self._modes: Modes = {}

    def start(self, stages: Sequence[nn.Module]) -> None:
        """Before a pass; modules are in the modes in which they train, unless all of them evaluate."""
        self._weights = self._make_weights()
        modes = {module: module.training for stage in stages for module in stage.modules()}
        self._modes = modes if any(modes.values()) else dict.fromkeys(modes, True)

    def __call__(self, unit: AuditUnit, args: Any, kwargs: Any) -> Outcome:
        try:
            self._check(unit, args, kwargs)
            weights = self._weights.assemble(unit.original_parameters)
            with Replaced(weights, self._places(weights)):
                for training in (True, False):
                    with in_modes(unit, self._modes, training=training):
                        differences = self._differences(unit, args, kwargs, weights, training=training)
                    if differences is not None:
                        return Outcome(differences)
        except CannotCompareError as error:
            return Outcome(unresolved=str(error))
        return Outcome(unresolved="it draws at random by itself, also in evaluation")

    # Before: inputs and weights.

    def _check(self, unit: AuditUnit, args: Any, kwargs: Any) -> None:
        """Refuse a unit for which inputs or weights are not there."""
        parameters = unit.original_parameters
        needed = _TAKEN * sum(parameter.nbytes for parameter in parameters)
        self._agreement.refuse(
            {
                "ranks along tensor have different inputs for it": self._has_different_inputs(args, kwargs),
                "it has weights of another stage": not self._weights.has(parameters),
                f"unsplit it takes {show_bytes(needed)}, which are not free": needed > self._free_bytes(),
            }
        )

    def _has_different_inputs(self, args: Any, kwargs: Any) -> bool:
        """Whether ranks along `tensor` differ in inputs that each has whole."""
        floats = [leaf for leaf in tree_leaves((args, kwargs)) if is_real(leaf)]
        if self._values.tensor.size == 1 or self._values.sequence or not floats:
            return False
        gathered = gather_rows(torch.stack([measures(leaf) for leaf in floats]), self._values.tensor)
        return not bool(near(gathered, max(torch.finfo(leaf.dtype).eps for leaf in floats)).all())

    def _places(self, weights: Weights) -> dict[nn.Parameter, Place]:
        """Where this rank has its part of each weight, if all ranks of the stage have memory for theirs."""
        places = {}
        for parameter in weights:
            name = self._weights.name(parameter)
            places[parameter] = Place(self._parameters[name], partial(self._take, name))
        num_missing = self._agreement.count([not place.has_memory for place in places.values()])
        held = zip(places.items(), num_missing, strict=True)
        return {parameter: place for (parameter, place), missing in held if missing == 0}

    def _take(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a weight."""
        for shard in (self._experts.get(name), self._shards.get(name)):
            whole = whole if shard is None else shard.take(whole)
        return whole

    # The comparison.

    def _differences(
        self, unit: AuditUnit, args: Any, kwargs: Any, weights: Weights, *, training: bool
    ) -> list[Difference] | None:
        """What is not the same; None if the unit draws at random by itself, or cannot train unsplit."""
        with torch.enable_grad(), with_weights(unit.originals, weights):
            of_whole = self._copy_arguments(unit, args, kwargs, whole=True)
            unsplit = self._run_unsplit(unit, of_whole, training=training)
            if unsplit is None:
                return None
            of_local = self._copy_arguments(unit, args, kwargs, whole=False)
            split = run(unit.module, of_local, [unit.module])
            if self._agreement.any(unsplit.has_drawn or split.has_drawn):
                return None
            outputs = self._pair(split.outputs, unsplit.outputs)
            return [
                *self._output_differences(unit, outputs),
                *self._gradient_differences(unit, outputs, of_local, of_whole, weights),
            ]

    def _run_unsplit(self, unit: AuditUnit, arguments: Arguments, *, training: bool) -> Run | None:
        """None if it raises while it trains: on a batch of one sample, for a norm of batches."""
        unsplit, reason = None, "an error on another rank"
        try:
            unsplit = run(in_a_row(unit.originals), arguments, unit.originals)
        except Exception as error:  # of whatever a layer does
            reason = _first_line(error)
        is_failed = self._agreement.any(unsplit is None)
        if is_failed and not training:
            raise CannotCompareError(f"unsplit it raises {reason}")
        return None if is_failed else unsplit

    def _pair(self, local: list[Tensor], whole: list[Tensor]) -> list[_Output]:
        """The outputs, with how ranks divide them. Behind the first, what has other shapes is left out: keys
        and values of this rank's heads."""
        divisions = [self._values.division_of_output(*pair) for pair in zip(local, whole, strict=False)]
        shapes = [[list(each.shape) for each in run[:1]] for run in (local, whole)]
        self._agreement.refuse(
            {
                f"it returns {len(local)} tensors, and {len(whole)} unsplit": len(local) != len(whole),
                "it returns no tensor": not local,
                f"it returns {shapes[0]}, and {shapes[1]} unsplit": divisions[:1] == [None],
            }
        )
        triples = zip(local, whole, divisions, strict=True)
        return [_Output(one, other, division) for one, other, division in triples if division is not None]

    def _output_differences(self, unit: AuditUnit, outputs: Sequence[_Output]) -> list[Difference]:
        joined = [cut(self._values.join(each.local.detach(), each.division), each.whole) for each in outputs]
        pairs = zip(joined, outputs, strict=True)
        found = [compare("its output", actual, each.whole) for actual, each in pairs]
        return beyond_rounding(found, self._tolerance_in(unit))

    def _gradient_differences(
        self,
        unit: AuditUnit,
        outputs: Sequence[_Output],
        of_local: Arguments,
        of_whole: Arguments,
        weights: Weights,
    ) -> list[Difference]:
        drawn = [draw_gradient(each.whole, number) for number, each in enumerate(outputs)]
        parts = [
            self._values.take(gradient, each.division, each.local)
            for gradient, each in zip(drawn, outputs, strict=True)
        ]
        trained = [p for p in dict.fromkeys(unit.module.parameters()) if p.requires_grad]
        whole_of = {self._weights.name(parameter): weight for parameter, weight in weights.items()}
        whole_trained = [whole_of[self._name_of[parameter]] for parameter in trained]
        split = gradients_of([*of_local.leaves, *trained], [each.local for each in outputs], parts)
        unsplit = gradients_of([*of_whole.leaves, *whole_trained], [each.whole for each in outputs], drawn)
        pairs = list(zip(split, unsplit, strict=True))
        num_inputs = len(of_local.leaves)
        found = [self._compare_input(unit, *pair) for pair in pairs[:num_inputs]]
        weight_pairs = zip(trained, pairs[num_inputs:], strict=True)
        found += [self._compare_weight(parameter, *pair) for parameter, pair in weight_pairs]
        return sorted(beyond_rounding(found, self._tolerance_in(unit)), key=lambda each: -each.relative)

    def _tolerance_in(self, unit: AuditUnit) -> float:
        return max(self._tolerance, tolerance_inside(unit.originals))

    def _compare_input(self, unit: AuditUnit, local: Tensor, whole: Tensor) -> Difference:
        division = self._values.division_of_input(local, is_first=unit.is_first)
        return compare("the gradient of its input", cut(self._values.join(local, division), whole), whole)

    def _compare_weight(self, parameter: nn.Parameter, local: Tensor, whole: Tensor) -> Difference:
        """Ranks along `context` each have a part of every gradient, those along `tensor` of some. Those along
        `expert` all have the same samples, which experts have seen once for each."""
        summed = local.detach().clone(memory_format=torch.contiguous_format)
        add_over(summed, self._values.context)
        if parameter in self._partial:
            add_over(summed, self._values.tensor)
        name = self._name_of[parameter]
        if name in self._experts:
            summed /= self._experts[name].ranks
        return compare(f"the gradient of {name}", summed, self._take(name, whole))

    def _copy_arguments(self, unit: AuditUnit, args: Any, kwargs: Any, *, whole: bool) -> Arguments:
        def whole_input(local: Tensor) -> Tensor:
            division = self._values.division_of_input(local, is_first=unit.is_first)
            joined, length = self._values.join(local, division), self._view.true_length
            return joined[:, :length] if length is not None and division != Division() else joined

        try:
            return copy_arguments(args, kwargs, whole_input if whole else _all_of)
        except Exception as error:  # of whatever a layer is called with
            raise CannotCompareError(f"its arguments cannot be copied: {_first_line(error)}") from error


def _all_of(tensor: Tensor) -> Tensor:
    return tensor


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
