"""The reference: the same training on one device, written in plain torch.

It must stay independent of the code that it judges, so it repeats in the plainest way what a step means. Of
echelon's code it uses only the dropout masks and other draws of a forward, and says itself which step and
samples they are for; the hashes that stochastic rounding draws, and the settings of a loss scale, which it
applies itself; and the gates of experts, whose losses it adds as any plain loop does.
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.nn.batch import call, tensors_of
from echelon.nn.draws.sample_draws import EVALUATION, SampleDraws
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.experts import after_step, auxiliary_loss, gates_of
from echelon.nn.hashing import WEYL, hash_of, mix_, signed
from echelon.nn.losses import Sum
from echelon.nn.wrapping import Wrapping
from echelon.update.precision.loss_scaling import DynamicScale
from echelon.update.update import Push
from echelon.verify.case import Case, cast_floats

_CLOSE = 16.0  # times the largest number, or a part of it: as many parts as a sum may have, about


@dataclass
class TrainingResult:
    """The result of a training: weights, optimizer state by parameter name, and the numbers of each step."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    losses: list[float]
    grad_norms: list[float]
    evaluation: float  # the loss of the last batch after training, in evaluation mode
    log: list[Push] = field(default_factory=list)  # of asynchronous training: what happened in which order
    plan: str = ""  # as it ran, without `auto`
    boundaries: list[int] = field(default_factory=list)  # the layers before which stages begin
    masters: dict[str, Tensor] = field(default_factory=dict)  # of the weights, below float32
    skipped: list[bool] = field(default_factory=list)  # each step, by fp16's loss scaling
    loss_scales: list[float] = field(default_factory=list)  # what the loss of each step was multiplied by
    overflows: list[tuple[int, int]] = field(default_factory=list)  # of a reference: each (update, stage)

    @property
    def numbers(self) -> tuple[list[float], list[float], list[bool], list[float], float]:
        return self.losses, self.grad_norms, self.skipped, self.loss_scales, self.evaluation


@final
class ReferenceScale:
    """The loss scale of fp16, written out again: 2**16, halved when a step is skipped, doubled after 2,000
    that are not; or the case's own. In other types it is 1."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        choice = case.options.get("loss_scale") or "dynamic"
        self.is_used = dtype == torch.float16
        rule = DynamicScale() if choice == "dynamic" else choice
        self._rule = rule if isinstance(rule, DynamicScale) and self.is_used else None
        self.value = (rule.start if isinstance(rule, DynamicScale) else float(rule)) if self.is_used else 1.0
        self._good = 0

    def after_step(self, *, skipped: bool) -> None:
        if self._rule is None:
            return
        if skipped:
            self.value, self._good = max(self.value / self._rule.factor, 1.0), 0
            return
        self._good += 1
        if self._good == self._rule.interval:
            self.value, self._good = self.value * self._rule.factor, 0


@final
class ReferenceModel:
    """The model of a case on one device, in one type, and its optimizer.

    Below float32, the optimizer updates float32 copies of the weights, the masters; after each update the
    weights are the masters, rounded. Without `keeps_masters` they are rounded stochastically, and the next
    update begins with what they are then.
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64, *, keeps_masters: bool = True) -> None:
        self._case, self._dtype = case, dtype
        self._keeps_masters = keeps_masters or dtype.itemsize >= 4
        self._num_updates = 0
        self.model = case.build(dtype=dtype)
        key_dropout(self.model, Wrapping())
        self._draws = SampleDraws(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = self.parameters
        if dtype.itemsize < 4:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = case.make_optimizer(self.masters)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]

    def loss(self, batch: Any, step: int, first_sample: int = 0) -> Any:
        """Return the loss function's value for samples of a step, from `first_sample` of its batch on."""
        with self._scope(step, batch, first_sample):
            return self._loss(batch)

    def _scope(self, step: int, batch: Any, first_sample: int = 0) -> AbstractContextManager[None]:
        (samples,) = {len(tensor) for tensor in tensors_of(batch)}
        return scope(
            seed=self._case.seed, step=step, first_sample=first_sample, samples=samples, draws=self._draws
        )

    def auxiliary_loss(self) -> Tensor | float:
        """Return the loss of all gates, for the samples since the last call."""
        return auxiliary_loss(self.model)

    def balance(self, *, skipped: bool) -> None:
        """An update was made of the samples since the last call, or was skipped."""
        if not skipped:
            after_step(self.model)
        for gate in gates_of(self.model):
            gate.seen = None

    def pop_gradients(self, scale: float = 1.0) -> list[Tensor | None]:
        """The gradients of all parameters in the optimizer's type, divided by the loss's `scale`."""
        gradients = [
            None if p.grad is None else p.grad.to(master.dtype) / scale
            for p, master in zip(self.parameters, self.masters, strict=True)
        ]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def update(self, gradients: Sequence[Tensor | None], step: int) -> float:
        """One optimizer step at the rate of `step`, clipped as the case says; returns the unclipped norm."""
        schedule = self._case.options.get("schedule")
        for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base if schedule is None else base * schedule(step)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        clip = float("inf") if self._case.clip is None else self._case.clip
        norm = nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._num_updates += 1
        if self._keeps_masters:
            self.load(self.masters)
        else:
            self._round()
        return float(norm)

    @torch.no_grad()
    def _round(self) -> None:
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        for name, parameter, master in zip(names, self.parameters, self.masters, strict=True):
            parameter.copy_(round_keyed(master, self._case.seed, self._num_updates, name))
            master.copy_(parameter)

    def copy(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.copy_(value)

    def result(self, losses: list[float], grad_norms: list[float], batch: Any) -> TrainingResult:
        weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model.eval()
        with torch.no_grad(), self._scope(EVALUATION, batch):
            evaluation = float(mean(self._loss(batch)))
        master_of = dict(zip(self.parameters, self.masters, strict=True))
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            entries: dict[str, Any] = self.optimizer.state.get(master_of.get(parameter, parameter), {})
            state[name] = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
        masters: dict[str, Tensor] = {}
        if self.masters is not self.parameters and self._keeps_masters:
            masters = {
                name: master_of[parameter].detach().clone()
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            }
        return TrainingResult(weights, state, losses, grad_norms, evaluation, masters=masters)

    def _loss(self, batch: Any) -> Any:
        output, targets = self._call(batch)
        if self._dtype.itemsize < 4:
            output = _in_float32(output)
        return output.loss if self._case.loss is None else self._case.loss(output, targets)

    def _call(self, batch: Any) -> tuple[Any, Any]:
        """Return the output of the model, and the targets. A dict has the arguments of its forward by name;
        labels are the targets, which a model takes for its own loss alone."""
        if not isinstance(batch, Mapping):
            inputs, targets = batch
            return call(self.model, cast_floats(inputs, self._dtype)), targets
        arguments = dict(cast_floats(batch, self._dtype))
        if self._case.loss is not None:
            labels = arguments.pop("labels")
            return self.model(**arguments), labels
        with self._case.without_casts(self._dtype):
            return self.model(**arguments), batch["labels"]


def train_on_one_device(
    case: Case,
    dtype: torch.dtype = torch.float64,
    *,
    keeps_masters: bool = True,
    followed: Sequence[bool] = (),
    overflows: Collection[tuple[int, int]] = (),
    delay: int = 0,
) -> TrainingResult:
    """Train on the whole of each batch at once.

    `delay`: gradients are those at the weights of so many updates before, 0 or 1; before the first there was
    none: W(t+1) = W(t) − ν·∇f(W(t−1)), where W(−1) is W(0), and "−ν·" is the optimizer's step.

    In fp16 a step is skipped where gradients are not finite; close to that, where the `followed` training
    skipped it. `overflows`: what to skip in a type that has no overflows.
    """
    reference = ReferenceModel(case, dtype, keeps_masters=keeps_masters)
    scale = ReferenceScale(case, dtype)
    losses, grad_norms, skipped, loss_scales = [], [], [], []
    batches = case.batches(dtype)
    before = reference.copy()
    for step, batch in enumerate(batches):
        newest = reference.copy()
        if delay:
            reference.load(before)
        loss = mean(reference.loss(batch, step)).to(torch.promote_types(dtype, torch.float32))
        loss = loss + reference.auxiliary_loss()
        gradients = _gradients(reference, loss, scale.value)
        skips = (step, 0) in overflows
        if scale.is_used:
            skips = not is_finite(gradients)
            if step < len(followed) and skips != followed[step] and _is_close(reference, loss, scale.value):
                skips = followed[step]
        if delay:
            reference.load(newest)
            before = newest
        grad_norms.append(math.inf if skips else reference.update(gradients, step))
        reference.balance(skipped=skips)
        losses.append(float(loss.detach()))
        skipped.append(skips)
        loss_scales.append(scale.value)
        scale.after_step(skipped=skips)
    result = reference.result(losses, grad_norms, batches[-1])
    result.skipped, result.loss_scales = skipped, loss_scales
    result.overflows = [(step, 0) for step, skips in enumerate(skipped) if skips]
    return result


def _in_float32(output: Any) -> Any:
    """Return the output of a model, which may be a dataclass of the user's own."""
    if not is_dataclass(output) or isinstance(output, type):
        return cast_floats(output, torch.float32)
    converted = copy.copy(output)
    for each in fields(output):
        object.__setattr__(converted, each.name, cast_floats(getattr(output, each.name), torch.float32))
    return converted


def is_finite(gradients: Iterable[Tensor | None]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def _gradients(reference: ReferenceModel, loss: Tensor, scale: float) -> list[Tensor | None]:
    (loss * scale).backward(retain_graph=True)
    return reference.pop_gradients(scale)


def _is_close(reference: ReferenceModel, loss: Tensor, scale: float) -> bool:
    """Return whether gradients are near the largest number: a plan computes parts, and sums in float32."""
    smaller, larger = (_gradients(reference, loss, scale * factor) for factor in (1 / _CLOSE, _CLOSE))
    return is_finite(smaller) and not is_finite(larger)


def mean(result: Any) -> Tensor:
    """The mean that a loss function returned, as it is or as (total, count); or the sum."""
    if isinstance(result, Sum):
        return result.total
    value: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
    return value


# Stochastic rounding of the reference (masters=false), written out: the noise of every element is a hash of
# seed, update, parameter and element.


@torch.no_grad()
def round_keyed(value: Tensor, seed: int, update: int, name: str) -> Tensor:
    """A float32 parameter in bf16 after update number `update`, the first of which is 1."""
    key = hash_of(seed, update, hash_of(*name.encode()))
    words = torch.arange(-(-value.numel() // 4))  # one hash for four elements, 16 bits each
    noise = mix_(words * signed(WEYL) + signed(key)).view(torch.int16).int() & 0xFFFF
    bits = value.flatten().view(torch.int32) + noise[: value.numel()]
    return (bits >> 16).to(torch.int16).view(torch.bfloat16).view_as(value)
