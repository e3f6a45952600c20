"""Find the first layer of a model whose output, or else whose gradient, is not finite.

A batch that was skipped is run again, forward and backward, with hooks on every module. Only then: a step of
a training has none of them. The weights are those that the batch was skipped with, since such a step changes
nothing; so are dropout masks.

    forward    the first output in the order (microbatch, stage, module), innermost module first
    loss       of outputs that are finite
    backward   the first gradient of an input, or output, in the order (microbatch, last stage first, module)
    weights    gradients of parameters, where those of all activations are finite
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from echelon.collectives.agreement import RankAgreement
from echelon.engine.audit import AuditResult, held
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.side_effects import as_checks, without_side_effects
from echelon.errors import UserError
from echelon.nn.batch import Batch, tensors_of
from echelon.parallel.observer import LossPass, StepObserver
from echelon.parallel.stage import LocalStages
from echelon.program import Instruction, Op
from echelon.state.ownership import OwnedSlice
from echelon.update.nonfinite import NonfiniteError

_NAMED = 3


@final
class NonfiniteSearch:
    """Runs a batch again on all ranks together, between steps."""

    def __init__(self, runner: StepRunner, replay: Callable[[Batch, int], None], state: EngineState) -> None:
        """`replay` runs the passes of a step again, without its update."""
        self._runner, self._replay, self._state = runner, replay, state
        mesh = state.mesh
        self._agreement = RankAgreement(mesh.group("all") if mesh.plan.ranks > 1 else None, mesh.device)
        self._kept: dict[int, Batch] = {}  # of steps that may be the last that is skipped

    def keep(self, batch: Batch, step: int) -> None:
        """Copy the batch of a step: the user may change it when the step has returned."""
        copy = tree_map_only(Tensor, torch.clone, batch)
        self._kept = {number: kept for number, kept in self._kept.items() if number == step - 1}
        self._kept[step] = copy

    def explain(self, error: NonfiniteError) -> NonfiniteError:
        """Return the error with the layer that is to blame, the same on every rank."""
        batch = self._kept.get(error.step)
        self._kept = {step: kept for step, kept in self._kept.items() if step > error.step}
        if batch is None:
            return error
        rows = self._agreement.gather(self._search(batch, error.step).firsts())  # as lists, by JSON
        reports = [Report([Finding(*each) for each in findings], *others) for findings, *others in rows]
        return NonfiniteError.of(error.count, error.step, explain(reports))

    def _search(self, batch: Batch, step: int) -> "Report":
        state, modules = self._state, self._state.modules
        mesh, local = state.mesh, state.local
        report = Report([], _wrong_weights(local), _wrong_parts(batch), [])
        names = {module: name for name, module in state.module.named_modules()}
        hooks = _PassHooks(self._runner, names, report.findings, mesh.rank)
        with (
            as_checks(mesh, modules),
            without_side_effects(local.modules, modules, mesh.device, self._runner.user_loss),
            hooks.attached(dict.fromkeys(each for stage in local.modules for each in stage.modules())),
        ):
            self._replay(batch, step)
        report.gradients.extend(_wrong_gradients(local))
        return report


@dataclass(eq=False)
class _PassHooks(StepObserver):
    """Hooks on modules and their tensors, and what they have found on this rank."""

    runner: StepRunner
    names: Mapping[nn.Module, str]
    findings: "list[Finding]"
    rank: int
    # By stage and microbatch: the first wrong gradient, by which other hooks know the same one, and which of
    # the findings it is.
    _first: dict[tuple[int, int], tuple[Tensor, int]] = field(default_factory=dict)

    @contextmanager
    def attached(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            self.runner.observers.add(self)
            stack.callback(self.runner.observers.remove, self)
            for module in modules:
                stack.callback(module.register_forward_hook(self._see_call, with_kwargs=True).remove)
            yield

    def _see_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.runner.instruction.op is Op.FORWARD:  # else a layer runs again, for its backward pass
            value = wrong_value(output)
            if value:
                self._add("output", module, value, is_input_wrong=bool(wrong_value((args, kwargs))))
        if torch.is_grad_enabled():
            _hook(output, partial(self._see_gradient, module, "output"))
            _hook((args, kwargs), partial(self._see_gradient, module, "input"))

    def after_loss(self, loss: LossPass) -> None:
        value = wrong_value(loss.total)
        if value:
            self._add("loss", None, value)

    def _see_gradient(self, module: nn.Module, side: str, gradient: Tensor) -> None:
        value = wrong_value(gradient)
        if not value:
            return
        instruction = self.runner.instruction
        slot = (instruction.stage, instruction.microbatch or 0)
        if slot not in self._first:
            self._add(f"gradient of the {side}", module, value)
            self._first[slot] = gradient, len(self.findings) - 1
            return
        first, number = self._first[slot]
        known = self.findings[number]
        if first is gradient and side == "input" and known.kind == "gradient of the output":
            # The output of one layer is the input of the next, whose backward pass has computed this.
            layer, kind = self.names.get(module, ""), type(module).__name__
            self.findings[number] = known._replace(kind="gradient of the input", layer=layer, module=kind)

    def _add(self, kind: str, module: nn.Module | None, value: str, *, is_input_wrong: bool = False) -> None:
        instruction: Instruction = self.runner.instruction
        place = (instruction.microbatch or 0, instruction.stage, len(self.findings))
        layer, name = ("", "") if module is None else (self.names.get(module, ""), type(module).__name__)
        self.findings.append(Finding(kind, layer, name, value, self.rank, place, is_input_wrong))


def _hook(structure: Any, hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors_of(structure):
        if tensor.requires_grad:
            tensor.register_hook(hook)


@torch.no_grad()
def wrong_value(structure: Any) -> str:
    """Return the worst of a structure, 'NaN', 'infinite' or '-infinite'; "" where all is finite."""
    numbers = [tensor for tensor in tensors_of(structure) if _may_be_wrong(tensor)]
    if any(bool(number.isnan().any()) for number in numbers):
        return "NaN"
    real = [torch.view_as_real(number) if number.is_complex() else number for number in numbers]
    if any(bool(number.isposinf().any()) for number in real):
        return "infinite"
    return "-infinite" if any(bool(number.isneginf().any()) for number in real) else ""


def _may_be_wrong(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout == torch.strided


def check_finite_weights(
    owned: Callable[[], Iterable[OwnedSlice]], trained: Set[str], agreement: RankAgreement
) -> AuditResult:
    """Refuse, on every rank, weights that are not finite before the training begins. `owned`: what this rank
    holds of each; a frozen one, not in `trained`, may be infinite, as masks are."""

    def check() -> None:
        values = [(each.slice.name, wrong_value(each.tensor.detach())) for each in owned()]
        wrong = [name for name, value in values if value == "NaN" or (value and name in trained)]
        if wrong:
            raise UserError(
                f"weights are NaN or infinite before the first step: {_list(_united([wrong]))}, on rank "
                f"{agreement.rank}; initialise them (torch.empty does not), or look at the file they came "
                "from; audit='off' if nothing uses them"
            )

    agreement.check(check)
    return held("finite weights")


def _wrong_weights(local: LocalStages) -> list[str]:
    """List trained weights of which this rank holds NaN or infinite values."""
    trained = {name for sharing in local.sharings for name, _ in sharing.parameter_set.trained}
    owned = [each for each in local.owned_weights() if each.slice.name in trained]
    return list(dict.fromkeys(each.slice.name for each in owned if wrong_value(each.tensor)))


def _wrong_gradients(local: LocalStages) -> list[str]:
    """List parameters whose summed gradients are not finite here."""
    with_gradients = [each for each in local.local_parameters() if each.tensor.grad is not None]
    return list(dict.fromkeys(each.name for each in with_gradients if wrong_value(each.tensor.grad)))


def _wrong_parts(batch: Batch) -> list[str]:
    return [name for name, part in zip(("inputs", "targets"), batch, strict=True) if wrong_value(part)]


# What all ranks have found, in words.


class Finding(NamedTuple):
    """A value that is not finite. `kind`: "output", "loss", "gradient of the input" or "… of the output".

    `place`: (microbatch, stage, how many were found before it on its rank).
    """

    kind: str
    layer: str  # its name in the user's model; "" for the model itself, and for what is in none of its names
    module: str  # the class
    value: str
    rank: int
    place: tuple[int, int, int]
    is_input_wrong: bool = False

    @property
    def is_masking(self) -> bool:
        """Return whether it may be meant: masks and scores of attention have −infinity."""
        return self.value == "-infinite" and self.kind == "output"

    def order(self) -> tuple[int, ...]:
        """Passes of later microbatches do not matter to earlier ones; a backward pass begins at the end."""
        microbatch, stage, number = self.place
        return (microbatch, -stage if self.kind.startswith("gradient") else stage, number, self.rank)

    def named(self) -> str:
        return f"layer '{self.layer}' ({self.module})" if self.layer else f"the model ({self.module})"

    def where(self) -> str:
        return f"{self.value}, on rank {self.rank} in microbatch {self.place[0]} of the last of these batches"


class Report(NamedTuple):
    """Findings of one rank: in passes, in its weights, in its batch, in the sums of gradients."""

    findings: list[Finding]
    weights: list[str]
    batch: list[str]
    gradients: list[str]

    def firsts(self) -> "Report":
        """Keep the first finding of each kind, of the many that follow from one."""
        firsts: dict[tuple[str, bool], Finding] = {}
        for finding in sorted(self.findings, key=Finding.order):
            firsts.setdefault((finding.kind, finding.is_masking), finding)
        return self._replace(findings=list(firsts.values()))


def explain(reports: Sequence[Report]) -> str:
    """Name the first layer that is to blame, and what is known of the reason; `reports` of all ranks."""
    found = sorted((each for report in reports for each in report.findings), key=Finding.order)
    weights = _united(report.weights for report in reports)
    batch = _united(report.batch for report in reports)
    outputs = [each for each in found if each.kind == "output"]
    strong = [each for each in outputs if not each.is_masking]
    losses = [each for each in found if each.kind == "loss"]
    gradients = [each for each in found if each.kind.startswith("gradient")]
    if strong:
        first, reason = strong[0], _reason(strong[0], weights, batch)
        return (
            f"the first output that is not finite is that of {first.named()}: {first.where()}; {reason}"
            f"{_earlier(outputs)}"
        )
    if losses:
        of = f"whose {' and '.join(batch)} are not finite" if batch else "though what the model returns is"
        return f"the first value that is not finite is the loss itself: {losses[0].where()}, {of}"
    if gradients:
        first = gradients[0]
        return (
            f"outputs and losses are finite{_earlier(outputs)}; in the backward pass the first value that "
            f"is not is the {first.kind} of {first.named()}: {first.where()}"
        )
    if outputs:
        return f"the only output that is not finite is that of {outputs[0].named()}: {outputs[0].where()}"
    names = _united(report.gradients for report in reports)
    if names:
        return (
            f"all outputs and their gradients are finite, but not the sums of the gradients of {_list(names)}"
        )
    return (
        "run again, the last of these batches gave finite outputs and gradients: either the squares of the "
        "gradients are too large for their norm, or the model draws random numbers of its own, or another "
        "step has changed the weights meanwhile"
    )


def _reason(first: Finding, weights: Sequence[str], batch: Sequence[str]) -> str:
    prefix = f"{first.layer}." if first.layer else ""
    own = [name for name in weights if name.startswith(prefix)]
    if own:
        return f"weights in it are not finite: {_list(own)}"
    if "inputs" in batch:
        return "the inputs of the batch are not finite"
    if first.is_input_wrong:
        return "its input is not finite already: look at what is computed between the layers before it"
    others = f"; weights elsewhere are not: {_list(weights)}" if weights else ""
    return f"its input and its weights are finite{others}"


def _earlier(outputs: Sequence[Finding]) -> str:
    """Name the layer in which −infinity came first, which may be meant."""
    is_first = outputs and outputs[0].is_masking
    return f" (but for −infinity, which {outputs[0].named()} returned before)" if is_first else ""


def _united(lists: Any) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
