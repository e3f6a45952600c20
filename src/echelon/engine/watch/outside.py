"""The model called outside of a step: right under the plan, or refused with a sentence.

    model(x), generate      tensor: all logits; pipeline, context and sequence: refused, no rank can run it
    state_dict              where ranks hold parts: refused, engine.full_state_dict() has all
    load_state_dict         where ranks hold parts, or weights come and go: refused, engine.load reads files

zero=3, offload and experts need all ranks in the call, as they do in a step.
"""

from collections.abc import Iterator
from typing import Any, final

from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.engine.watch.absent import AbsentReads, mark_absent
from echelon.engine.watch.inside import Inside
from echelon.errors import UserError
from echelon.nn.autograd.tracing import untraced
from echelon.nn.layering import listed_layers
from echelon.nn.wrapping import GUARD, Wrapping, find_wrapper
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor import Column
from echelon.plan import Plan


def guard_outside(
    model: nn.Module,
    mesh: Mesh,
    local: LocalStages,
    layers: LayerSharding,
    wrapping: Wrapping,
    observers: Observers,
    inside: Inside,
) -> None:
    """Let calls between steps be right, or say why they cannot be."""
    plan = mesh.plan
    if layers.by_layers or plan.stages > 1:
        refusal = Refusal(inside, f"plan '{plan}': {_call_sentence(plan)}")
        wrapping.before(GUARD, model, refusal, with_kwargs=True, prepend=True)
    elif layers.has_split_logits:
        for column in (find_wrapper(module, Column) for module in model.modules()):
            if column is not None and column.vocabulary is not None:
                wrapping.after(GUARD, column.module, WholeLogits(column, inside))
    holders = [model, *_holders_of_parts(model, local, layers, plan)]
    if len(holders) > 1:
        _guard_state(holders, plan, wrapping, inside)
    absent = _absent_modules(model, local, plan)
    if absent:
        reads = AbsentReads(plan, inside)
        mark_absent(absent, reads, wrapping)
        observers.add(reads)


@final
class Refusal:
    """A hook that raises, unless the engine is at work."""

    def __init__(self, inside: Inside, text: str) -> None:
        self._inside, self._text = inside, text

    @untraced
    def __call__(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> None:  # noqa: ARG002
        if not self._inside and not keep_vars:
            raise UserError(self._text)


@final
class WholeLogits:
    """A hook behind the head: between steps it returns all logits, and not this rank's part of them."""

    def __init__(self, column: Column, inside: Inside) -> None:
        self._column, self._inside = column, inside

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        return output if self._inside else self._column.join(output)


def _guard_state(holders: list[nn.Module], plan: Plan, wrapping: Wrapping, inside: Inside) -> None:
    why = f"with plan '{plan}' this rank has a part of the model, or its weights only during a step"
    saves = Refusal(inside, f"state_dict(): {why}; engine.full_state_dict() returns all of it, on every rank")
    loads = Refusal(
        inside,
        f"load_state_dict(): {why}; load before parallelize, or after engine.close(), or let engine.load "
        "read a checkpoint",
    )
    for module in dict.fromkeys(holders):
        wrapping.hold(GUARD, module, module.register_state_dict_pre_hook(_StateDictHook(saves)))
        wrapping.hold(GUARD, module, module.register_load_state_dict_pre_hook(loads))


@final
class _StateDictHook:
    """torch calls it with the module, the prefix and keep_vars, which the engine itself asks for."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        self._refusal(keep_vars=keep_vars)


def _holders_of_parts(
    model: nn.Module, local: LocalStages, layers: LayerSharding, plan: Plan
) -> Iterator[nn.Module]:
    """Modules of which this rank has a part, or nothing, between steps."""
    yield from _absent_modules(model, local, plan).values()
    for path, module in model.named_modules():
        for key in module._parameters:
            if layers.shards_of(f"{path}.{key}".removeprefix(".")) or plan.frees_weights:
                yield module


def _absent_modules(model: nn.Module, local: LocalStages, plan: Plan) -> dict[str, nn.Module]:
    """Modules of other stages, by name."""
    if plan.stages == 1:
        return {}
    in_layers = {module for layer in listed_layers(model) for module in layer.modules()}
    here = {module for stage in local.modules for module in stage.modules()}
    return {name: m for name, m in model.named_modules() if m in in_layers and m not in here}


def _call_sentence(plan: Plan) -> str:
    axis = (
        f"pipeline={plan.pipeline}" if plan.stages > 1 else f"context={plan.context} sequence={plan.sequence}"
    )
    return (
        f"the model is called outside of a step, and with {axis} no rank can run all of it: ranks run its "
        "layers one after the other, each its own part; engine.evaluate(batch, measure) does, and "
        "engine.close() puts the model together on every rank"
    )
