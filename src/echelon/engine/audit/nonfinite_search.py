"""Which layer of a model is the first whose output, or else whose gradient, is not finite.

A batch that was skipped is run again, forward and backward, with hooks on every module. Only then: a step of
a training has none of them. The weights are those that the batch was skipped with, since such a step changes
nothing; so are dropout masks.

    forward    the first output in the order (microbatch, stage, module), innermost module first
    loss       of outputs that are finite
    backward   the first gradient of an input, or output, in the order (microbatch, last stage first, module)
    weights    gradients of parameters, where those of all activations are finite
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.collectives.mesh import Mesh
from echelon.engine.audit.agreement import RankAgreement
from echelon.engine.audit.nonfinite_report import Finding, Report, explain
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.side_effects import without_side_effects
from echelon.nn.batch import Batch
from echelon.nn.inputs import tensors_of
from echelon.parallel.observer import LossPass, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.program import Instruction, Op
from echelon.update.nonfinite import NonfiniteError


@final
class NonfiniteSearch:
    """Runs a batch again on all ranks together, between steps."""

    def __init__(
        self,
        runner: StepRunner,
        replay: Callable[[Batch, int], None],
        mesh: Mesh,
        local: LocalStages,
        model: nn.Module,
    ) -> None:
        """`replay` runs the passes of a step again, without its update."""
        self._runner, self._replay, self._mesh, self._local = runner, replay, mesh, local
        inside = [each for stage in local.modules for each in stage.modules()]
        self._modules = list(dict.fromkeys([*model.modules(), *inside]))
        self._names = {module: name for name, module in model.named_modules()}
        self._watched = list(dict.fromkeys(inside))
        self._agreement = RankAgreement(mesh.group("all") if mesh.plan.ranks > 1 else None, mesh.device)
        self._kept: dict[int, Batch] = {}  # steps that may turn out to be the last that is skipped

    def keep(self, batch: Batch, step: int) -> None:
        """Copy the batch of a step: the user may change it when the step has returned."""
        copy = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
        self._kept = {number: kept for number, kept in self._kept.items() if number == step - 1}
        self._kept[step] = copy

    def explain(self, error: NonfiniteError) -> NonfiniteError:
        """The error with the layer that is to blame, the same on every rank."""
        batch = self._kept.get(error.step)
        self._kept = {step: kept for step, kept in self._kept.items() if step > error.step}
        if batch is None:
            return error
        found = self._search(batch, error.step)
        reports = [Report.parse(each) for each in self._agreement.gather(found.plain())]
        return NonfiniteError.of(error.count, error.step, explain(reports))

    def _search(self, batch: Batch, step: int) -> Report:
        report = Report(weights=_wrong_weights(self._local), batch=_wrong_parts(batch))
        watch = _Watch(self._runner, self._names, report.findings, self._mesh.rank)
        with (
            self._quiet(),
            without_side_effects(self._local.modules, self._modules, self._mesh.device),
            watch.attached(self._watched),
        ):
            self._replay(batch, step)
        report.gradients.extend(_wrong_gradients(self._local))
        return report

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """What is moved counts as checks; compiled layers run as they are written, so that hooks see them."""
        compiles = self._mesh.plan.compile or any(m._compiled_call_impl for m in self._modules)
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with self._mesh.ledger.only_about("checks"), eager:
            yield


@dataclass(eq=False)
class _Call:
    """A call of a module, which waits for the gradients of its inputs and outputs."""

    layer: str
    kind: str


class _Gradient(NamedTuple):
    """The first wrong gradient of a slot, kept so that other hooks can tell that it is the same."""

    tensor: Tensor
    finding: int


@dataclass(eq=False)
class _Watch(StepObserver):
    """Hooks on modules, and what they have found on this rank."""

    runner: StepRunner
    names: Mapping[nn.Module, str]
    findings: list[Finding]
    rank: int
    _first: dict[tuple[int, int], _Gradient] = field(default_factory=dict)  # by stage and microbatch
    _handles: list[Any] = field(default_factory=list)

    @contextmanager
    def attached(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            self.runner.observers.add(self)
            stack.callback(self.runner.observers.remove, self)
            for module in modules:
                stack.callback(module.register_forward_hook(self._see_call, with_kwargs=True).remove)
            yield

    def _see_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = _Call(self.names.get(module, ""), type(module).__name__)
        instruction = self.runner.instruction
        if instruction.op is Op.FORWARD:  # else a layer runs again, for its backward pass
            self._see_output(call, instruction, (args, kwargs), output)
        if torch.is_grad_enabled():
            _hook(output, partial(self._see_gradient, call, "output"))
            _hook((args, kwargs), partial(self._see_gradient, call, "input"))

    def _see_output(self, call: _Call, instruction: Instruction, inputs: Any, output: Any) -> None:
        value = wrong_value(output)
        if value:
            self._add("output", call, instruction, value, is_input_wrong=bool(wrong_value(inputs)))

    def after_loss(self, loss: LossPass) -> None:
        value = wrong_value(loss.total.detach())
        if value:
            self._add("loss", _Call("", ""), self.runner.instruction, value)

    def _see_gradient(self, call: _Call, side: str, gradient: Tensor) -> None:
        value = wrong_value(gradient)
        if not value:
            return
        instruction = self.runner.instruction
        slot = (instruction.stage, instruction.microbatch or 0)
        first = self._first.get(slot)
        if first is None:
            self._add(f"gradient of the {side}", call, instruction, value)
            self._first[slot] = _Gradient(gradient, len(self.findings) - 1)
        elif first.tensor is gradient and side == "input":
            # The output of one layer is the input of the next, whose backward pass has computed this.
            known = self.findings[first.finding]
            if known.kind == "gradient of the output":
                self.findings[first.finding] = known._replace(
                    kind="gradient of the input", layer=call.layer, module=call.kind
                )

    def _add(
        self, kind: str, call: _Call, instruction: Instruction, value: str, *, is_input_wrong: bool = False
    ) -> None:
        place = (instruction.microbatch or 0, instruction.stage, len(self.findings))
        self.findings.append(Finding(kind, call.layer, call.kind, value, self.rank, place, is_input_wrong))


def _hook(structure: Any, hook: Callable[[Tensor], None]) -> None:
    for leaf in tree_leaves(structure):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)


@torch.no_grad()
def wrong_value(structure: Any) -> str:
    """'NaN', 'infinite' or '-infinite': the worst of a structure, "" where all is finite."""
    numbers = [tensor for tensor in tensors_of(structure) if _may_be_wrong(tensor)]
    if any(bool(number.isnan().any()) for number in numbers):
        return "NaN"
    real = [torch.view_as_real(number) if number.is_complex() else number for number in numbers]
    if any(bool(number.isposinf().any()) for number in real):
        return "infinite"
    return "-infinite" if any(bool(number.isneginf().any()) for number in real) else ""


def _may_be_wrong(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout == torch.strided


def _wrong_weights(local: LocalStages) -> list[str]:
    """Trained weights of which this rank holds NaN or infinite values."""
    trained = {name for sharing in local.sharings for name, _ in sharing.parameter_set.trained}
    owned = [each for each in local.owned_weights() if each.slice.name in trained]
    return list(dict.fromkeys(each.slice.name for each in owned if wrong_value(each.tensor)))


def _wrong_gradients(local: LocalStages) -> list[str]:
    """Parameters whose summed gradients are not finite here."""
    with_gradients = [each for each in local.local_parameters() if each.tensor.grad is not None]
    return list(dict.fromkeys(each.name for each in with_gradients if wrong_value(each.tensor.grad)))


def _wrong_parts(batch: Batch) -> list[str]:
    return [name for name, part in zip(("inputs", "targets"), batch, strict=True) if wrong_value(part)]
