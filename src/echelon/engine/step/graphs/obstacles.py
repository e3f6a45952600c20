"""Why passes are not recorded: the plan, what the model does, or what somebody wants to see of them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from echelon.engine.step.balance import DiscardStatistics
from echelon.engine.step.side_effects import FirstForward
from echelon.engine.trace import Recorder as TraceRecorder
from echelon.engine.watch.outside import AbsentReads
from echelon.memory.meter import METERED_STEPS, Meter
from echelon.nn.autograd.generators import GeneratorStates
from echelon.parallel.observer import Observers
from echelon.plan import FIELDS, Plan
from echelon.plan.plan import draft

_PASS_EVENTS = (
    "around_pass",
    "around_layers",
    "around_loss",
    "after_loss",
    "before_backwards",
    "store",
    "fetch",
    "before_backward",
    "after_backward",
    "before_unit",
)
_LATE_EVENTS = ("before_reduce", "after_passes", "after_update")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

WARM_STEPS = METERED_STEPS + 1  # the first steps measure memory, and try kernels out


def plan_obstacle(plan: Plan) -> str | None:
    """Return why the passes of this plan cannot be recorded: the rules of graphs=true."""
    asking = draft(vars(plan) | {"graphs": "true"})
    for rule in FIELDS["graphs"].rules:
        if rule.is_broken(asking):
            return rule.error(asking).partition(";")[0]
    return None


def is_seen(observers: Observers) -> bool:
    """Return whether an observer, or a mode of torch, sees single passes of this step."""
    kinds = (FirstForward, Meter, AbsentReads, DiscardStatistics)
    has_modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(has_modes) or observers.has_kind(TraceRecorder) or observers.is_heard(_PASS_EVENTS, kinds)


def sees_gradients(observers: Observers) -> bool:
    """Return whether an observer comes between passes and update, and may change gradients; or is told of the
    update by a flag, which the next replay would write again."""
    return observers.is_heard(_LATE_EVENTS, (Meter,))


def hook_obstacle(modules: Iterable[nn.Module]) -> str | None:
    """Return why not, if a hook that is not echelon's sees passes."""
    for module in modules:
        if any(not _is_own(hook) for hook in _hooks_of(module)):
            return f"a hook of a {type(module).__name__} would run in no replay"
    return None


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for kind in _HOOKS:
        yield from getattr(module, kind).values()
    for parameter in module._parameters.values():
        if parameter is not None:
            yield from (parameter._backward_hooks or {}).values()
            yield from (parameter._post_accumulate_grad_hooks or {}).values()


def _is_own(hook: Any) -> bool:
    hook = getattr(hook, "__func__", getattr(hook, "func", hook))
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("echelon.")


class DrawWatch:
    """Sees whether passes draw random numbers, which a replay would draw again."""

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]) -> None:
        self._before = GeneratorStates(device, modules)

    def obstacle(self) -> str | None:
        moved = self._before.moved_names()
        return f"passes draw from the generator of {moved[0]}" if moved else None
