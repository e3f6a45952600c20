"""The model outside of a step: what is called or read there is right under the plan, or refused with a
sentence.

    model(x), generate      tensor: all logits; pipeline, context and sequence: refused, no rank can run it
    state_dict              where ranks hold parts: refused, engine.full_state_dict() has all
    load_state_dict         where ranks hold parts, or weights come and go: refused, engine.load reads files
    layer.loss              an attribute of a layer of another stage: refused, its forward does not run here

zero=3, offload and experts need all ranks in the call, as they do in a step.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.nn.layering import stage_layers
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import GUARD, Wrapping, find_wrapper
from echelon.parallel.data.reducer import engines
from echelon.parallel.layer_sharding import LayerSharding, LogitsChoice
from echelon.parallel.observer import Observers, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.modules import Column
from echelon.plan import Plan

_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_RESULTS = (Tensor, type(None), float, list, dict, set, deque)  # what a forward may leave in an attribute


@final
class Inside:
    """True while a method of the engine runs, and in threads of the engine's own: the same call means
    something else when the user makes it.

    Hooks on the user's modules hold it. A copy of such a module belongs to no engine: it is always inside.
    """

    def __init__(self) -> None:
        self._depth, self._thread = 0, threading.get_ident()

    def __bool__(self) -> bool:
        return self._depth > 0 or threading.get_ident() != self._thread

    def __call__(self) -> "Inside":
        return self

    def __enter__(self) -> None:
        self._depth += 1
        engines.num_at_work += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        engines.num_at_work -= 1

    def __deepcopy__(self, _: Any) -> "Inside":
        return _always_inside()

    def __reduce__(self) -> tuple[Any, ...]:
        return _always_inside, ()


def _always_inside() -> Inside:
    inside = Inside()
    inside._depth = 1
    return inside


def guard_outside(
    model: nn.Module,
    mesh: Mesh,
    local: LocalStages,
    layers: LayerSharding,
    wrapping: Wrapping,
    observers: Observers,
    inside: Inside,
    parameters: Collection[str],
) -> None:
    """Let calls between steps be right, or say why they cannot be. `parameters`: the names of all."""
    plan = mesh.plan
    if layers.by_layers or plan.stages > 1:
        refusal = partial(_refuse, inside, f"plan '{plan}': {_call_sentence(plan)}")
        wrapping.before(GUARD, model, refusal, with_kwargs=True, prepend=True)
    if layers.has_split_logits:
        for column in (find_wrapper(module, Column) for module in model.modules()):
            if column is not None and column.vocabulary is not None:
                wrapping.after(GUARD, column.module, partial(_join_logits, column, inside, layers.logits))
    absent = _absent_modules(model, local, plan)
    holders = [model, *absent.values(), *_holders_of_parts(model, layers, plan)]
    if len(holders) > 1:
        _guard_state(holders, plan, wrapping, inside)
    if absent:
        reads = AbsentReads(plan, inside)
        mark_absent(absent, reads, wrapping, parameters)
        observers.add(reads)


# Hooks: partial functions, which torch can copy and pickle with their module.


@untraced
def _refuse(inside: Inside, text: str, *_: Any, **__: Any) -> None:
    if not inside:
        raise UserError(text)


@untraced
def _join_logits(
    column: Column, inside: Inside, logits: LogitsChoice, _module: nn.Module, _args: Any, output: Any
) -> Any:
    """Behind the head: return all logits between steps, and for a loss that is not one of parts."""
    return output if inside and not logits.are_joined else column.join(output)


def _refuse_state_dict(inside: Inside, text: str, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # which the engine itself asks for
        _refuse(inside, text)


def _guard_state(holders: list[nn.Module], plan: Plan, wrapping: Wrapping, inside: Inside) -> None:
    why = f"with plan '{plan}' this rank has a part of the model, or its weights only during a step"
    saves = f"state_dict(): {why}; engine.full_state_dict() returns all of it, on every rank"
    loads = (
        f"load_state_dict(): {why}; load before parallelize, or after engine.close(), or let engine.load "
        "read a checkpoint"
    )
    save_hook, load_hook = partial(_refuse_state_dict, inside, saves), partial(_refuse, inside, loads)
    for module in dict.fromkeys(holders):
        wrapping.hold(GUARD, module, module.register_state_dict_pre_hook(save_hook))
        wrapping.hold(GUARD, module, module.register_load_state_dict_pre_hook(load_hook))


def _holders_of_parts(model: nn.Module, layers: LayerSharding, plan: Plan) -> Iterator[nn.Module]:
    """Modules of this rank that have a part of a weight, or no values, between steps."""
    for path, module in model.named_modules():
        for key in module._parameters:
            if layers.shards_of(f"{path}.{key}".removeprefix(".")) or plan.frees_weights:
                yield module


def _absent_modules(model: nn.Module, local: LocalStages, plan: Plan) -> dict[str, nn.Module]:
    """Modules of other stages, by name."""
    if plan.stages == 1:
        return {}
    in_layers = {module for layer in stage_layers(model) for module in layer.modules()}
    here = {module for stage in local.modules for module in stage.modules()}
    return {name: m for name, m in model.named_modules() if m in in_layers and m not in here}


def _call_sentence(plan: Plan) -> str:
    axis = (
        f"pipeline={plan.pipeline}" if plan.stages > 1 else f"context={plan.context} sequence={plan.sequence}"
    )
    return (
        f"the model is called outside of a step, and with {axis} no rank can run all of it: ranks run its "
        "layers one after the other, each its own part; engine.evaluate(batch, measure) does, and "
        "`with engine.whole() as model:` puts the model together on every rank. See docs/loops.md"
    )


# Modules of other stages: the tree of the model has them on every rank, and no pass runs them here. What
# their forward would leave in an attribute (an auxiliary loss, a list of them) is not there, and what there
# is comes from before the start. A read of it during a step, by the loss or a layer of another stage:
#
#     first step    is noted, and gets that, or zero; all ranks refuse the step before its update
#     later         raises, and so does that of an attribute which no module ever had


class AbsentAttributeError(UserError, AttributeError):
    """An attribute of a module of another stage; `hasattr` takes it for one that is not there."""


@final
class AbsentReads(StepObserver):
    """Reads of attributes of modules that this rank does not run."""

    def __init__(self, plan: Plan, inside: Inside) -> None:
        self._plan, self.inside = plan, inside
        self._noted: UserError | None = None
        self._is_first = True  # no step was decided on yet

    def read(self, module: nn.Module, attribute: str, value: Any) -> Any:
        """Note, or refuse, a read of what is not here; return the value of before, or zero, to go on with."""
        error = self.error(module, attribute)
        if not self._is_first:
            raise error
        self._noted = self._noted or error
        return torch.zeros(()) if value is None else value

    def error(self, module: nn.Module, attribute: str) -> "AbsentAttributeError":
        return AbsentAttributeError(
            f"plan '{self._plan}': {_name_of(module)}.{attribute} is read on a rank that does not run this "
            "module, which is of another stage: what its forward leaves there stays on the rank of that "
            "stage; return it from the layer, through the layers behind it, to the loss; or use pipeline=1"
        )

    def lost_weight(self, module: nn.Module, name: str) -> "AbsentAttributeError":
        """Return the error of a read of a parameter between steps."""
        return AbsentAttributeError(f"{_name_of(module)}.{name}: {part_of_weights(self._plan, False)}")

    def call(self, module: nn.Module) -> None:
        if not self.inside:
            raise UserError(
                f"plan '{self._plan}': module {_name_of(module)} is called on a rank that does not hold it, "
                "since it is of another stage; engine.evaluate(batch) runs all stages, and "
                "`with engine.whole() as model:` puts the model together on every rank"
            )

    def check_first_step(self) -> None:
        """In the first step, before its update: raise what was noted."""
        if self._noted is not None:
            error, self._noted = self._noted, None
            raise error
        self._is_first = False

    def __deepcopy__(self, _: Any) -> "AbsentReads":
        return self


class AbsentModule:
    """Put before the class of a module of another stage."""

    _echelon_reads: AbsentReads
    _echelon_dropped: set[str]

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if (
            name in _OWN
            or not isinstance(value, _RESULTS)
            or name not in object.__getattribute__(self, "__dict__")
        ):
            return value
        reads = object.__getattribute__(self, "_echelon_reads")
        return value if _leaves_nothing(self) or not reads.inside else reads.read(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Read what is no plain attribute: a parameter, a buffer, a module, or nothing."""
        reads: AbsentReads = object.__getattribute__(self, "_echelon_reads")
        try:
            value = super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if reads.inside and not name.startswith("__"):
                raise reads.error(self, name) from error  # type: ignore[arg-type]  # hasattr may ask
            raise
        if value is None and not reads.inside and name in self._echelon_dropped:
            raise reads.lost_weight(self, name)  # type: ignore[arg-type]
        if value is not None or _leaves_nothing(self) or not reads.inside:
            return value
        return reads.read(self, name, None)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy it as a module of its own class."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, arguments, *state = reduced
        kinds = tuple(type(self).__mro__[2] if each is type(self) else each for each in arguments)
        return (_make, kinds, *state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._echelon_reads.call(self)  # type: ignore[arg-type]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def mark_absent(
    modules: dict[str, nn.Module], reads: AbsentReads, wrapping: Wrapping, parameters: Collection[str] = ()
) -> None:
    """Watch these modules, which this rank does not run. `parameters`: names of all that the model has."""
    for name, module in modules.items():
        kind = type(module)
        dropped = {key for key in module._parameters if f"{name}.{key}" in parameters}
        content = {"_echelon_reads": reads, "_echelon_name": name, "_echelon_dropped": dropped}
        content["__module__"] = kind.__module__
        absent = type(kind.__name__, (AbsentModule, kind), content)
        wrapping.assign(module, "__class__", absent)


def _make(kind: type, *arguments: Any) -> Any:
    """As copyreg's, which pickle takes only for objects of the very class."""
    return kind.__new__(kind, *arguments)


def _leaves_nothing(module: object) -> bool:
    """Return whether its class is torch's or echelon's own: the forward of these leaves no result in an
    attribute, and the engine reads what there is."""
    return type(module).__mro__[2].__module__.startswith(("torch.", "echelon."))


def _name_of(module: nn.Module) -> str:
    return str(object.__getattribute__(module, "_echelon_name"))


# What each plan allows between steps.


def calls_as_one_device(plan: Plan) -> bool:
    """Return whether a step calls the model's own forward once, with the whole batch, and nothing is computed
    twice: then a hook or another forward does what it does without an engine."""
    is_one = plan.ranks == 1 and plan.microbatches == 1 and plan.stages == 1
    is_plain = plan.recompute == "none" and plan.compress == "none" and not plan.compile
    return is_one and is_plain and not plan.offload and plan.update == "step"


def needs_idle(plan: Plan) -> bool:
    """Return whether anything beside the model's own parameters follows from their values."""
    is_low = plan.precision not in ("fp32", "fp64")
    return plan.ranks > 1 or is_low or bool(plan.offload) or not plan.flushes


def updates_itself(plan: Plan) -> bool:
    """Return whether `optimizer.step()` by hand is the update of one device: the optimizer has all of the
    model's own parameters, and their gradients are those of the batch."""
    return not needs_idle(plan) and plan.update == "step"


def lost_gradient(plan: Plan) -> str | None:
    """Return what to tell users of a gradient after a step, where no rank has it whole."""
    is_part = plan.zero > 0 or plan.tensor > 1 or plan.expert > 1 or plan.stages > 1
    is_gone = plan.update != "step" or "parameters" in plan.offload or plan.sync == "async"
    if not is_gone and (plan.ranks == 1 or not is_part):
        return None
    return (
        f"with plan '{plan}' no rank has it whole after a step, and the update is made already; the norm is "
        "engine.step(…).grad_norm, and parallelize(clip=…) clips it"
    )


_WAITING = "engine.zero_grad() drops it, and parallelize(clip=…) clips the norm of all. See docs/loops.md"
COPIED_GRADIENT = f"engine.update() brings it there, and drops it; {_WAITING}"


def waiting_gradient(plan: Plan) -> str | None:
    """Return what to tell users of a gradient that waits for its update, where one device has another."""
    if plan.ranks > 1:
        return f"ranks have parts of it until engine.update() sums them; {_WAITING}"
    return f"precision=fp16 scales it until engine.update(); {_WAITING}" if plan.precision == "fp16" else None


def adds_unseen(plan: Plan) -> bool:
    """Return whether a backward pass of the user's own adds to gradients that wait, and no hook sees it: only
    replicas have one (parallel/data/reducer.py)."""
    return waiting_gradient(plan) is not None and plan.ranks == plan.tensor


def changed_gradient_error(plan: Plan) -> str:
    return (
        f"gradients that wait for engine.update() were changed by hand, as loss.backward() does: with plan "
        f"'{plan}' they are scaled, or parts that ranks have; write engine.backward(loss) of what engine(x) "
        "returned. See docs/loops.md"
    )


def part_of_weights(plan: Plan, is_split: bool) -> str | None:
    """Return what to tell users who read the values of a weight, where a rank has a part of it or of all."""
    if plan.stages > 1:
        part = f"with pipeline={plan.pipeline} this rank has the weights of its own stage alone"
    elif is_split:
        part = f"with tensor={plan.tensor} expert={plan.expert} this rank has a part of it"
    else:
        return None
    return (
        f"{part}, and its values are used outside of a module's forward; engine.weights() and "
        "engine.full_state_dict() return whole weights, and `with engine.whole() as model:` puts the model "
        "together. See docs/loops.md"
    )


def changed_weight_error(
    plan: Plan, changed: Sequence[str], split: Sequence[str], *, is_empty: bool
) -> str | None:
    """Say why weights that were changed by hand cannot be taken over, if they cannot."""
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    fix = (
        "make the change before parallelize, after engine.close(), or in a checkpoint that engine.load reads"
    )
    if plan.sync == "async":
        return (
            f"{names}: changed by hand, and with sync=async the server's weights come before each step; {fix}"
        )
    if not plan.flushes and not is_empty:
        return (
            f"{names}: changed by hand while microbatches of older weights are under way "
            f"(schedule={plan.schedule}); call engine.synchronize() before the change"
        )
    if plan.stages > 1:
        return (
            f"{names}: changed by hand, and with pipeline={plan.pipeline} a rank sees the weights of its own "
            f"stage alone, so that the change may not be the same as on one device; {fix}"
        )
    if split:
        return (
            f"{split[0]}: changed by hand, and with tensor={plan.tensor} expert={plan.expert} this rank has "
            f"a part of it, so that the change may not be the same as on one device; {fix}"
        )
    return None
