"""One device: the plain model, the plain loss and autograd, on whole weights, for the samples of an audit."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map, tree_map_only

from echelon.engine.audit.gradient_comparison import Take
from echelon.engine.audit.plain_form import PlainForm
from echelon.engine.step.feed import to_device
from echelon.engine.step.python_state import PythonState
from echelon.engine.step.samples import Scopes
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.autograd.leaves import late_hooks, twin
from echelon.nn.batch import call, cast, num_samples
from echelon.nn.dropout.training_position import CountedSamples
from echelon.nn.forward_state import ChangedBuffers, moved_integers, named_integers
from echelon.nn.losses import total_and_count
from echelon.nn.sample_gathering import Replicas
from echelon.parallel.layer_sharding import LayerSharding

Parameters = Mapping[str, nn.Parameter]
_REENTRANT = "compatible with .grad()"  # is not, says torch.utils.checkpoint


class Run(NamedTuple):
    """A run of one device. `place`: of the first sample among all that are compared. `rounding`: every
    output of a module is changed by about so much of itself, as rounding might; each `draw` in another way.
    `scale`: of the loss before its backward pass, against underflows. `is_second`: after another forward, so
    that generators have moved on. `is_total`: gradients are those of the total, not of the mean.
    `all_samples`: of all parts, if this is one. `is_precise`: in float32 what would be in 16 bits."""

    batch: Any
    step: int
    place: int = 0
    rounding: float = 0.0
    draw: int = 0
    training: bool = True
    scale: float = 1.0
    is_second: bool = False
    is_total: bool = False
    all_samples: int | None = None
    is_precise: bool = False


class Result(NamedTuple):
    """The model's output, its loss as a total of what it counts, and gradients if they were not taken."""

    output: Any
    total: float
    counted: float
    gradients: dict[str, Tensor]
    has_drawn: bool  # whether the forward or the loss drew numbers that no sample has for its own
    gathers: bool  # whether it asked for the samples of all replicas
    changes_buffers: bool
    counted_by: Mapping[str, int]  # by how much it has moved the integers of its modules
    buffers: Mapping[str, Tensor] = MappingProxyType({})  # that it has changed


@final
class Reference:
    """Runs the plain form of a model on this rank, and leaves no trace in it."""

    def __init__(
        self,
        model: nn.Module,
        form: PlainForm,
        layers: LayerSharding,
        scopes: Scopes,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.form, self._layers, self._scopes = model, form, layers, scopes
        self.device, self.dtype = device, dtype
        self._is_fresh = False

    def run(self, run: Run, whole: Mapping[str, Tensor], take: Take | None = None) -> Result:
        """`whole`: what of the weights is not here. `take` is given each gradient when it is complete, which
        is then let go."""
        noise = disturbed_outputs(run.rounding, run.draw) if run.rounding else nullcontext()
        with self._without_trace(), noise:
            if run.is_second:
                self._run(run, whole)
            differentiate = partial(self._run, run, whole, partial(_gradients, take, run.scale))
            if self._is_fresh or any(map(late_hooks, self.model.parameters())):
                return differentiate(fresh=True)
            try:
                return differentiate(fresh=False)
            except RuntimeError as error:
                if _REENTRANT not in str(error):
                    raise
                self._is_fresh = True
                return differentiate(fresh=True)

    def run_forward(self, run: Run, whole: Mapping[str, Tensor]) -> Result:
        """Without gradients. Raises what the model or the loss raises for these samples."""
        with self._without_trace():
            return self._run(run, whole)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        with warnings.catch_warnings(action="ignore"), ExitStack() as stack:
            stack.callback(GeneratorStates(self.device, self.model.modules()).restore)
            yield

    def _run(
        self,
        run: Run,
        whole: Mapping[str, Tensor],
        differentiate: Callable[..., dict[str, Tensor]] | None = None,
        *,
        fresh: bool = False,
    ) -> Result:
        before = GeneratorStates(self.device, self.model.modules())
        samples = num_samples(run.batch)
        inputs, targets = tree_map_only(Tensor, torch.clone, to_device(run.batch, self.device))
        scope = partial(self._scopes.of_plain, self.model, run.step, run.place, samples)
        with self.form.installed(whole, self.device, fresh=fresh) as parameters, ExitStack() as stack:
            dtype = torch.promote_types(self.dtype, torch.float32) if run.is_precise else self.dtype
            if run.is_precise:
                parameters = _widen(self.model, parameters)
            # What the forward and the loss change in place is put back. A call may have a loss of its own.
            stack.callback(PythonState(self.model.modules(), self._layers.user_loss).restore)
            if not run.training:
                self.model.eval()
            buffers, numbers = ChangedBuffers(self.form.buffers), named_integers(self.model)
            replicas = Replicas()  # one device
            with CountedSamples(samples, scope), replicas.gathering():
                output = call(self.model, cast(inputs, dtype))
                result = self._layers.whole_loss(output, targets)
                total, count = total_and_count(result, samples, run.all_samples)
            loss = total * run.scale / (1 if run.is_total else count)
            gradients = {} if differentiate is None else differentiate(loss, parameters, fresh=fresh)
            has_drawn, drawn = before.moved(), before.now()
            left, moved = buffers.now(), moved_integers(numbers, named_integers(self.model))
        drawn.restore()  # a second run goes on from there
        output = tree_map_only(Tensor, torch.detach, output)
        flags = has_drawn, replicas.is_used, bool(left)
        return Result(output, float(total), float(count), gradients, *flags, moved, left)


def _widen(model: nn.Module, parameters: Parameters) -> dict[str, nn.Parameter]:
    """Give modules float32 copies of what has 16 bits, until their plain form goes. Returns weights."""
    wide: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                    data = tensor.detach().float()
                    copied = twin(tensor, data) if isinstance(tensor, nn.Parameter) else data
                    tensors[key] = wide.setdefault(tensor, copied)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return {name: wide.get(parameter, parameter) for name, parameter in parameters.items()}


def _gradients(
    take: Take | None, scale: float, loss: Tensor, parameters: Parameters, *, fresh: bool
) -> dict[str, Tensor]:
    """`fresh`: parameters belong to this run alone, and may have gradients."""
    with nullcontext() if take is None else _taken(parameters, take, scale, fresh=fresh):
        found: Sequence[Tensor | None]
        if fresh:
            loss.backward()
            found = [parameter.grad for parameter in parameters.values()]
        else:
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    if take is not None:
        return {}
    pairs = zip(parameters, found, strict=True)
    return {name: _plain(gradient, scale) for name, gradient in pairs if gradient is not None}


@contextmanager
def _taken(parameters: Parameters, take: Take, scale: float, *, fresh: bool) -> Iterator[None]:
    """Give away each gradient of a backward pass when it is complete."""
    names: set[str] = set()

    def give(name: str, gradient: Tensor) -> Tensor:
        if name in names:  # the first part is gone
            raise RuntimeError(
                f"the gradient of {name} comes in several parts: several reentrant checkpoints share it"
            )
        names.add(name)
        take(name, _plain(gradient, scale))
        is_dense = gradient.layout == torch.strided
        return gradient.new_zeros(()).expand(gradient.shape) if is_dense else torch.zeros_like(gradient)

    def give_accumulated(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        give(name, parameter.grad)
        parameter.grad = None

    with ExitStack() as stack:
        for name, parameter in parameters.items():
            # torch calls hooks in the order of their registration: these after the user's.
            if fresh:
                handle = parameter.register_post_accumulate_grad_hook(partial(give_accumulated, name))
            else:
                handle = parameter.register_hook(partial(give, name))
            stack.callback(handle.remove)
        yield


@contextmanager
def disturbed_outputs(size: float, draw: int) -> Iterator[None]:
    """Change every output of a module by about `size` of itself, as rounding might."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if leaf.requires_grad and leaf.is_leaf:  # an input of a loss's autograd.grad
            return leaf
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(draw))
        wide = torch.promote_types(leaf.dtype, torch.float32)
        noise = torch.rand(leaf.shape, generator=generator, device=leaf.device, dtype=wide)
        return (leaf * (1 + size * (2 * noise - 1))).to(leaf.dtype)

    handle = register_module_forward_hook(lambda _module, _args, output: tree_map(disturb, output))
    try:
        yield
    finally:
        handle.remove()


def _plain(gradient: Tensor, scale: float) -> Tensor:
    dense = (gradient.to_dense() if gradient.layout != torch.strided else gradient).detach()
    return dense if scale == 1 else dense.to(torch.promote_types(dense.dtype, torch.float32)) / scale
