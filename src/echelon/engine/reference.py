"""One device: the plain model, the plain loss and autograd, on whole weights, for the samples of an audit."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from echelon.audit.plain_form import PlainForm, late_hooks
from echelon.engine.attribute_snapshot import AttributeSnapshot
from echelon.engine.batch import Loss, cast, num_samples, total_and_count
from echelon.engine.samples import Scopes, counting
from echelon.engine.upload import to_device
from echelon.generators import GeneratorStates
from echelon.inputs import call

Scope = Callable[[], AbstractContextManager[None]]
_REENTRANT = "Checkpointing is not compatible with"  # .grad(), says torch.utils.checkpoint


class Result(NamedTuple):
    """Of a plain run: what the model returned, its loss as a total of what it counts, and the gradients of
    the mean."""

    output: Any
    total: float
    counted: float
    gradients: dict[str, Tensor]
    has_drawn: bool  # whether the forward or the loss drew numbers that no sample has for its own


@final
class Reference:
    """Runs the plain form of a model on this rank, and leaves no trace in it."""

    def __init__(
        self,
        model: nn.Module,
        form: PlainForm,
        loss: Loss,
        scopes: Scopes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self.form, self._loss, self._scopes = model, form, loss, scopes
        self.device, self.dtype = device, dtype

    def run(
        self,
        batch: Any,
        whole: Mapping[str, Tensor],
        step: int,
        *,
        place: int = 0,
        rounding: float = 0.0,
        draw: int = 0,
        training: bool = True,
        scale: float = 1.0,
        is_second: bool = False,
    ) -> Result:
        """`whole`: what of the weights is not here. `place`: of the first sample among all that are compared.
        `rounding`: every output of a module is changed by about so much of itself, as rounding might; each
        `draw` in another way.
        `scale`: of the loss before its backward pass, against underflows. `is_second`: after another forward,
        so that generators have moved on."""
        scope = partial(self._scopes.of_plain, self._model, step, place, num_samples(batch))
        with self._without_trace(), _rounded(rounding, draw) if rounding else nullcontext():
            if is_second:
                self._forward(batch, whole, scope)
            differentiate = partial(self._differentiate, batch, whole, scope, training, scale)
            if any(map(late_hooks, self._model.parameters())):
                return differentiate(fresh=True)
            try:
                return differentiate(fresh=False)
            except RuntimeError as error:
                if _REENTRANT not in str(error):
                    raise
                return differentiate(fresh=True)

    def check_takes(self, batch: Any, whole: Mapping[str, Tensor], step: int) -> None:
        """Raise what the model or the loss raises for these samples."""
        with self._without_trace():
            scope = partial(self._scopes.of_plain, self._model, step, 0, num_samples(batch))
            self._forward(batch, whole, scope)

    def _forward(self, batch: Any, whole: Mapping[str, Tensor], scope: Scope) -> None:
        with self.form.installed(whole, self.device), self._kept_attributes():
            self._mean(batch, scope)

    def _mean(self, batch: Any, scope: Scope) -> tuple[Any, Tensor, Tensor | int]:
        """What the model returns, and its loss as (total, count)."""
        inputs, targets = tree_map(_copied, to_device(batch, self.device))
        samples = num_samples(batch)
        with counting(samples, scope):
            output = call(self._model, cast(inputs, self.dtype))
            total, count = total_and_count(self._loss(output, targets), samples)
        return output, total, count

    def _differentiate(
        self,
        batch: Any,
        whole: Mapping[str, Tensor],
        scope: Scope,
        training: bool,
        scale: float,
        *,
        fresh: bool,
    ) -> Result:
        before = GeneratorStates(self.device, self._model.modules())
        with self.form.installed(whole, self.device, fresh=fresh) as parameters, self._kept_attributes():
            if not training:
                self._model.eval()
            output, total, count = self._mean(batch, scope)
            mean = total * scale / count
            if fresh:
                mean.backward()
                gradients = {name: parameter.grad for name, parameter in parameters.items()}
            else:
                found = torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)
                gradients = dict(zip(parameters, found, strict=True))
        plain = {name: _dense(each) for name, each in gradients.items() if each is not None}
        if scale != 1:
            plain = {name: each.float() / scale for name, each in plain.items()}
        return Result(tree_map(_detached, output), float(total), float(count), plain, before.moved())

    @contextmanager
    def _kept_attributes(self) -> Iterator[None]:
        """What the forward changes in place inside of attributes is put back."""
        attributes = AttributeSnapshot(list(self._model.modules()))
        try:
            yield
        finally:
            attributes.restore()

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        generators = GeneratorStates(self.device, self._model.modules())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            generators.restore()


@contextmanager
def _rounded(size: float, draw: int) -> Iterator[None]:
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(leaf: Any) -> Any:
        is_input = (
            isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf
        )  # of a loss's autograd.grad
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or is_input:
            return leaf
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(draw))
        wide = torch.promote_types(leaf.dtype, torch.float32)
        noise = torch.rand(leaf.shape, generator=generator, device=leaf.device, dtype=wide)
        return (leaf * (1 + size * (2 * noise - 1))).to(leaf.dtype)

    hook: Callable[..., Any] = lambda _module, _args, output: tree_map(disturb, output)  # noqa: E731
    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.layout != torch.strided else gradient).detach()
