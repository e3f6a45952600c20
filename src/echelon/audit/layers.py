"""The layers of a plan that splits them, against the same layers unsplit, on samples of the first batch.

    samples ── layer 0 ── layer 1 ── … ── loss          as the plan runs them, to get the inputs of each layer
                  │          │
              split and unsplit, with the same input, weights, masks and gradient of the output:
              output, gradient of the input and gradients of the weights must be the same

A table that fits the shapes may still be wrong: nothing else shows that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.audit.differences import Difference
from echelon.audit.layer_comparison import LayerComparison
from echelon.audit.report import AuditResult, held, skipped
from echelon.audit.texts import first_text
from echelon.audit.unit_runs import is_real
from echelon.audit.units import AuditUnit, StageUnits
from echelon.errors import UserError
from echelon.mesh import Mesh
from echelon.plan import Plan

_NAME = "layers"
_SAMPLES = 2
_SHOWN = 4  # differences in an error

Forward = Callable[[Any], str]  # takes samples through all stages; returns what a stage raised, or nothing


class Unresolved(NamedTuple):
    """A unit that could not be compared, and why."""

    name: str
    reason: str


@final
class LayerAudit:
    """An entry of the audit."""

    def __init__(
        self,
        stages: Sequence[StageUnits],
        compare: LayerComparison,
        forward: Forward,
        mesh: Mesh,
    ) -> None:
        self._stages, self._compare, self._forward, self._mesh = stages, compare, forward, mesh

    def __call__(self, batch: Any) -> AuditResult:
        few = tree_map(lambda leaf: leaf[:_SAMPLES] if isinstance(leaf, Tensor) else leaf, batch)
        self._compare.start([stage.whole.module for stage in self._stages])
        units = [unit for stage in self._stages for unit in stage.units]
        unresolved = self._pass(few, units)
        if self._anywhere(bool(unresolved)):
            wholes = [stage.whole for stage in self._stages if _concerns(stage, unresolved)]
            unresolved = self._pass(few, wholes)
        reason = first_text(
            "; ".join(f"{each.name}: {each.reason}" for each in unresolved),
            self._mesh.group("all"),
            self._mesh.device,
        )
        return skipped(_NAME, reason) if reason else held(_NAME)

    def _pass(self, samples: Any, units: Sequence[AuditUnit]) -> list[Unresolved]:
        """Compare units while samples go through the stages; raises if one computes something else."""
        stages = [stage.whole for stage in self._stages]
        examined = _Pass(units, stages, self._compare, self._mesh.plan)
        try:
            failure = self._forward(samples)
        finally:
            examined.remove()
        finding = first_text(examined.finding, self._mesh.group("all"), self._mesh.device)
        if finding:
            raise UserError(finding)
        if failure:
            return [Unresolved("forward", failure)]
        return examined.unresolved + [
            Unresolved(unit.name, "it is not called") for unit in units if unit not in examined.seen
        ]

    def _anywhere(self, flag: bool) -> bool:
        return bool(first_text("yes" if flag else "", self._mesh.group("all"), self._mesh.device))


def _concerns(stage: StageUnits, unresolved: Sequence[Unresolved]) -> bool:
    names = {each.name for each in unresolved}
    return "forward" in names or any(unit.name in names for unit in stage.units)


class _Pass:
    """Hooks on units, for one pass of samples through the stages. Each unit is compared when it is first
    called, before its own forward runs."""

    def __init__(
        self, units: Sequence[AuditUnit], stages: Sequence[AuditUnit], compare: LayerComparison, plan: Plan
    ) -> None:
        self._compare, self._plan = compare, plan
        self._received = {stage.module for stage in stages if not stage.is_first}  # their inputs
        self._is_comparing = False
        self.seen: list[AuditUnit] = []
        self.finding, self.unresolved = "", list[Unresolved]()
        self._handles = []
        for stage in stages:  # which inputs have gradients is seen only where there are any
            before, after = stage.module.register_forward_pre_hook, stage.module.register_forward_hook
            self._handles.append(before(self._enable_gradients, with_kwargs=True))
            self._handles.append(after(self._detach, always_call=True))
        for unit in units:
            hook = self._hook_of(unit)
            self._handles.append(unit.module.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook_of(self, unit: AuditUnit) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_comparing or unit in self.seen:
                return
            self._is_comparing = True
            try:
                self.seen.append(unit)
                outcome = self._compare(unit, args, kwargs)
            finally:
                self._is_comparing = False
            self.finding = self.finding or self._describe(unit, outcome.differences)
            if outcome.unresolved:
                self.unresolved.append(Unresolved(unit.name, outcome.unresolved))

        return hook

    def _describe(self, unit: AuditUnit, differences: Sequence[Difference]) -> str:
        if not differences:
            return ""
        shown = ", ".join(
            f"{each.name} (by {each.relative:.2g} of its size)" for each in differences[:_SHOWN]
        )
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        return (
            f"plan '{self._plan}': {unit.name} computes something else split over ranks than unsplit: "
            f"{shown}{more} {'are' if len(differences) > 1 else 'is'} not the same for the first samples of "
            f"this batch; {_causes(self._plan)}"
        )

    def _enable_gradients(self, stage: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_comparing:
            return None
        torch.set_grad_enabled(True)
        if stage not in self._received:
            return None
        floats = [leaf for leaf in tree_leaves((args, kwargs)) if is_real(leaf)]
        if len(floats) > 1:  # which of them the stage before has computed is not known here
            return None
        return tree_map(
            lambda leaf: leaf.detach().requires_grad_() if is_real(leaf) else leaf, (args, kwargs)
        )

    def _detach(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._is_comparing:
            return None
        torch.set_grad_enabled(False)
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _causes(plan: Plan) -> str:
    causes = []
    if plan.tensor > 1:
        causes.append(
            "in the table of tensor parallelism look for a number that must be 'divided', a fused matrix "
            "that must be 'column/3', a softmax, a norm or another function of all features between a column "
            "and a row, a 'replicated' weight of a part of the heads or features, which must be 'heads' or "
            "'inner', and what every rank adds before a sum (parallelize(tensor_table=…), docs/tensor.md)"
        )
    if plan.context > 1 or plan.sequence:
        causes.append("look for positions that are mixed by other means than the view (docs/context.md)")
    if plan.expert > 1:
        causes.append(
            "look for experts that do more with the weight of a token than to multiply what they return, or "
            "that mix tokens"
        )
    return f"{'; '.join(causes)}; if it is meant, use audit='off'"
