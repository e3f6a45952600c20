"""The user's optimizer between two steps: the same parameters, and no call that updates them by hand."""

from collections.abc import Sequence
from typing import Any, final

import torch

from echelon.engine.watch.outside import Inside
from echelon.engine.watch.snapshots import needs_idle
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.update.optim.local import FirstStates
from echelon.update.optim.needs import inner_optimizers, need_of
from echelon.update.precision.optimizer_call import has_step_hooks
from echelon.update.precision.stepper import has_other_step


@final
class OptimizerWatch:
    """Compares the groups of an optimizer, and refuses its `step` outside of the engine's."""

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan, inside: Inside) -> None:
        self._optimizer, self._plan, self._inside = optimizer, plan, inside
        self._handles: list[Any] = []
        self._state = optimizer.state
        if not updates_itself(plan):
            for each in dict.fromkeys([optimizer, *inner_optimizers(optimizer)]):
                if hasattr(each, "_optimizer_step_pre_hooks"):
                    self._handles.append(each.register_step_pre_hook(self._refuse_call))
        self.record()

    def record(self) -> None:
        self._groups = self._read()

    def check(self) -> None:
        check_coupling(self._optimizer, self._plan)
        if self.is_changed:
            raise UserError(
                f"the parameters of the optimizer's groups were changed since parallelize or the last step: "
                f"plan '{self._plan}' has put parts, masters or copies in their place, and knows no others; "
                "give all groups to the optimizer in the function that parallelize calls"
            )
        if isinstance(self._state, FirstStates) and self._optimizer.state is not self._state:
            raise UserError(
                f"optimizer.state was replaced by hand: with plan '{self._plan}' parts, masters or copies "
                "have their state in the one of before, and an update may have been under way; change that "
                "one (optimizer.state.clear(), optimizer.state.values()), or call optimizer.load_state_dict"
            )

    @property
    def is_changed(self) -> bool:
        """Whether its groups have other parameters."""
        return self._read() != self._groups

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self) -> list[list[int]]:
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups
        return [list(map(id, group["params"])) for group in groups]

    def _refuse_call(self, *_: object) -> None:
        if not self._inside:
            raise UserError(
                f"optimizer.step() outside of engine.step(): with plan '{self._plan}' gradients are summed "
                "over ranks, scaled and brought to what the optimizer updates in engine.step(batch) alone, "
                "which makes the update too; drop backward() and optimizer.step() from the loop"
            )


def check_coupling(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer whose update of one parameter may depend on others, where a rank has not all of
    them: one with hooks or another `step`, unless it says what it needs, or one that nobody knows."""
    if not (plan.zero or plan.tensor > 1 or plan.expert > 1 or plan.stages > 1):
        return
    name = type(optimizer).__name__
    for each in dict.fromkeys([optimizer, *inner_optimizers(optimizer)]):
        says = getattr(each, "needs", None) is not None and not hasattr(each, "optimizers")
        if not says and (has_other_step(each) or has_step_hooks(each)):
            way = "a replaced step()" if has_other_step(each) else "a step hook"
            raise UserError(
                f"optimizer {name} with plan '{plan}' has {way}: it may look at all parameters at once, as a "
                "clip of their norm does, and a rank has a part of them; clip with parallelize(clip=…), drop "
                'it, or, if it looks at no more than single elements, set optimizer.needs = "element"'
            )
    if plan.stages > 1 and need_of(optimizer) is None:
        raise UserError(
            f"optimizer {name} with plan '{plan}': nobody knows whether it looks at several parameters at "
            'once, and a rank has those of its own stage; set `needs = "element"` or `needs = "whole"` on '
            "its class if it looks at one parameter at a time, or use pipeline=1"
        )


def updates_itself(plan: Plan) -> bool:
    """Whether `optimizer.step()` by hand is the update of one device: the optimizer has the model's own
    parameters, all of them, and their gradients are those of the batch."""
    return not needs_idle(plan) and plan.update == "step"
