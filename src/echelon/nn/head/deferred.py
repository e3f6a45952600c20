"""Logits that wait: what the head returns in a step whose loss is a cross entropy that the engine knows.

    head(h)                  DeferredLogits, no values: h and the matrix are remembered
    fused_cross_entropy      computed with the matrix, chunk by chunk (nn/losses.py): never whole
    any function of torch    gets the logits, computed now: as if they had been there

One node of autograd stands where the matrix product would, so that hooks on the head's output see its
backward pass begin. It adds up what comes by two ways: the gradients that the fused loss has made already,
times that of the loss; and a gradient of logits, from all that has read them.

    hidden, weight, bias ─ _Deferred ─┬─ _FusedLoss ─ loss        gradient of _Deferred: nothing, one number
                                      ├─ _Factors ─ region ─ loss                        nothing
                                      └─ _Computed ─ logits ─ …                          of logits

In the memory of deferred logits is one number, NaN: what reads them past torch's functions is not silent.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.losses import IGNORED_TARGET, VocabularyPart, Wanted, linear_cross_entropy
from echelon.nn.tracing import FUNCTIONS_WITHOUT_VALUES, is_transformed
from echelon.nn.wrapping import Wrapper, has_entry, replaced_forward


@final
@dataclass
class _Product:
    """What logits are made of. The weight is the parameter itself, which may be freed and gathered again."""

    hidden: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    part: VocabularyPart | None  # that the matrix makes
    wanted: Wanted
    version: int  # of the hidden states
    is_differentiated: bool
    nothing: Tensor  # its memory marks the gradient that a fused loss sends where logits would be
    is_fused: bool = False
    sent: dict[object, list[Tensor | None]] = field(default_factory=dict)  # gradients that go past the logits

    def send(self, sender: object, gradients: Iterable[Tensor | None], shape: torch.Size) -> Tensor:
        """Let the node where logits were deferred add gradients of hidden states, weight and bias; returns
        what stands for that of logits on the way there. A walk that does not lead there is forgotten."""
        self.sent[sender] = list(gradients)
        return self.nothing.expand(shape)

    def states(self) -> Tensor:
        if self.hidden._version != self.version:
            raise UserError(
                "the hidden states that the head was given have been changed in place before the loss; "
                "change a copy of them, or call the head after the change"
            )
        return self.hidden


@final
class DeferredLogits(Tensor):
    """The result of `defer`."""

    product: _Product
    computed: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_GRAD:  # torch would warn that this is no leaf; the compiler asks
            return None if args[0].computed is None else args[0].computed.grad
        if func in _KNOWN or (func in _OF_MEMORY and _is_of_compiler(sys._getframe(1))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*tree_map(compute, args), **tree_map(compute, kwargs))


# What is true of logits that are not there. Hooks, memory and versions are those of what is computed.
_OF_MEMORY = {Tensor.register_hook, Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset}
_OF_MEMORY |= {Tensor.untyped_storage, cast(Any, Tensor._version).__get__}
_GET_GRAD = cast(Any, Tensor.grad).__get__
_KNOWN = FUNCTIONS_WITHOUT_VALUES - _OF_MEMORY


def _is_of_compiler(frame: Any) -> bool:
    """Return whether torch's compiler asks, for what passes between two of its graphs."""
    return str(frame.f_globals.get("__name__", "")).startswith(("torch._dynamo.", "torch._subclasses."))


def defer(
    hidden: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, part: VocabularyPart | None = None
) -> Tensor:
    """Stand for F.linear(hidden, weight, bias); of a `part` of a vocabulary, with padding at −inf."""
    tracks = torch.is_grad_enabled()
    wanted = Wanted(*(tracks and t is not None and t.requires_grad for t in (hidden, weight, bias)))
    nothing = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
    product = _Product(hidden.detach(), weight, bias, part, wanted, hidden._version, tracks, nothing)
    function: Any = _Deferred
    logits = cast(DeferredLogits, function.apply(hidden, weight, bias, product))
    logits.product, logits.computed = product, None
    return logits


def is_deferred(value: Any) -> bool:
    """Return whether a tensor stands for logits that nothing has read yet."""
    return isinstance(value, DeferredLogits) and value.computed is None


def awaited_weight(value: Tensor) -> nn.Parameter | None:
    """The matrix that will be read when logits that wait are computed; None of other tensors."""
    return value.product.weight if isinstance(value, DeferredLogits) and is_deferred(value) else None


def compute(value: Any) -> Any:
    """The logits themselves, where `value` stands for some. Several readers share them."""
    if not isinstance(value, DeferredLogits):
        return value
    if value.computed is None:
        function: Any = _Computed
        # A first reader without gradients must not take them from later ones.
        with torch.set_grad_enabled(value.product.is_differentiated):
            value.computed = function.apply(value, value.product)
    return value.computed


def fused_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    of_part: bool = False,
    ignored: int = IGNORED_TARGET,
    smoothing: float = 0.0,
) -> Tensor | None:
    """The summed cross entropy of deferred logits [..., vocabulary] against targets [...], in float32; None
    of others. Tokens whose target is `ignored` have no loss; `smoothing` is of labels. `of_part`: ranks have
    parts of the logits."""
    if not isinstance(logits, DeferredLogits) or not is_deferred(logits) or logits.product.is_fused:
        return None
    if of_part != (logits.product.part is not None):
        return None
    function: Any = _FusedLoss
    total: Tensor = function.apply(logits, logits.product, targets.reshape(-1), ignored, smoothing)
    return total


def factors(logits: Tensor) -> tuple[Tensor, ...]:
    """What deferred logits are the product of: hidden states, weight and bias, if any; for a region of the
    graph that multiplies them itself. Their gradients go to where logits were deferred."""
    assert isinstance(logits, DeferredLogits)
    function: Any = _Factors
    found: tuple[Tensor, ...] = function.apply(logits, logits.product)
    return found


class _Deferred(torch.autograd.Function):
    """Where the product would be. A backward pass that is split in halves runs it once."""

    runs_once = True

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004
        product: _Product,
    ) -> Tensor:
        # In the form in which F.linear saves them: a checkpoint may save the one and compute the other again.
        ctx.save_for_backward(hidden.reshape(-1, hidden.shape[-1]), weight.t())
        ctx.product, ctx.shape = product, hidden.shape
        ctx.set_materialize_grads(False)
        nan = torch.full((), torch.nan, dtype=hidden.dtype, device=hidden.device)
        return nan.expand((*hidden.shape[:-1], len(weight))).as_subclass(DeferredLogits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        product, totals = ctx.product, cast(list[Tensor | None], [None, None, None])
        if gradient is not None and not _shares_memory(gradient, product.nothing):
            rows, columns = ctx.saved_tensors
            totals = _gradients_of_product(gradient.reshape(len(rows), -1), rows, columns, ctx)
        for gradients in product.sent.values():
            totals = [_sum(*pair) for pair in zip(totals, gradients, strict=True)]
        product.sent.clear()  # a graph that is retained may be walked from elsewhere
        return *totals, None


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    is_strided = tensor.layout == torch.strided
    return is_strided and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _gradients_of_product(gradient: Tensor, rows: Tensor, columns: Tensor, ctx: Any) -> list[Tensor | None]:
    for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
    return [
        (gradient @ columns.t()).view(ctx.shape) if for_hidden else None,
        gradient.t() @ rows if for_weight else None,
        gradient.sum(0) if for_bias else None,
    ]


def _scaled(gradient: Tensor | None, scale: Tensor) -> Tensor | None:
    """In the type of the gradient; the scale is not rounded to it, which would bend all gradients alike."""
    return None if gradient is None else (gradient.float() * scale).to(gradient.dtype)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _Computed(torch.autograd.Function):
    """The logits; their gradient goes to where they were deferred."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, product: _Product) -> Tensor:  # noqa: ARG004
        logits = F.linear(product.states(), product.weight, product.bias)
        ctx.num_padded = 0 if product.part is None else product.part.num_padded(logits.shape[-1])
        if ctx.num_padded:
            logits[..., -ctx.num_padded :] = -torch.inf
        memory: Any = logits.new_empty(0)
        result: Tensor = memory.set_(logits)  # the same memory, and no view, which could not be written to
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.num_padded:
            gradient = gradient.clone()  # others may have the same gradient
            gradient[..., -ctx.num_padded :] = 0
        return gradient, None


class _Factors(torch.autograd.Function):
    runs_once = True

    @staticmethod
    def forward(ctx: Any, source: Tensor, product: _Product) -> tuple[Tensor, ...]:
        given = [product.states(), product.weight, product.bias]
        found = [each.detach() for each in given if each is not None]
        constant = [each for each, wants in zip(found, product.wanted, strict=False) if not wants]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.product, ctx.shape = product, source.shape
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_all = (*gradients, None)[:3]  # there may be no bias
        return ctx.product.send(_Factors, of_all, ctx.shape), None


class _FusedLoss(torch.autograd.Function):
    """The sum of losses of all rows of deferred logits."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, product: _Product, targets: Tensor, ignored: int, smoothing: float
    ) -> Tensor:
        states = product.states()
        rows = states.reshape(-1, states.shape[-1])
        weight, bias = product.weight.detach(), product.bias
        total, made = linear_cross_entropy(
            rows, weight, bias, targets, ignored, product.wanted, product.part, smoothing
        )
        if made.hidden is not None:
            made = made._replace(hidden=made.hidden.view(states.shape))
        product.is_fused = True
        ctx.made, ctx.product, ctx.shape = made, product, source.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        made = (_scaled(each, gradient) for each in ctx.made)
        return ctx.product.send(_FusedLoss, made, ctx.shape), None, None, None, None


# The head of a model: its logits wait for the loss where nothing else reads them.

# Columns from which logits are large beside the hidden states: the head is a vocabulary, not some classes.
_LEAST_COLUMNS = 1024
_OTHERS = ("float64", "expert", "float8")  # entries that compute something else
_LOW = (torch.bfloat16, torch.float16)  # above, losses are those of plain torch to the last bit


@dataclass
class Deferral:
    """Whether logits may wait now: in a forward pass whose output goes to a loss that the engine knows, and
    to nothing else. `differentiates`: and back; a part without gradients is then a checkpoint's."""

    is_allowed: bool = False
    differentiates: bool = False


class SplitHead(Protocol):
    """A head of which this rank has some of the columns."""

    def enter(self, x: Tensor) -> Tensor: ...

    def part(self) -> VocabularyPart | None: ...


@final
class DeferredHead(Wrapper):
    """The last linear layer of a model below float32."""

    entry = "head"

    def __init__(
        self, module: nn.Module, deferral: Deferral, *, compiled: bool, split: SplitHead | None = None
    ) -> None:
        """`compiled`: the layer that it is in is. The logits that wait stay outside of its graph."""
        super().__init__(module)
        self._deferral, self._compiled, self._split = deferral, compiled, split
        self._call = self._make_call()

    def _make_call(self) -> Callable[..., Any]:
        # Made before a graph is recorded: what is assigned in the middle of one is assigned too late.
        return torch.compiler.disable(self._run) if self._compiled else self._run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._deferral.is_allowed and not kwargs and len(args) == 1 and self._suits(args[0]):
            weight, bias = cast(Any, self.module.weight), cast(Any, self.module.bias)
            if self._split is None:
                return defer(args[0], weight, bias)
            return defer(self._split.enter(args[0]), weight, bias, self._split.part())
        return self.inner(*args, **kwargs)

    def _suits(self, hidden: Any) -> bool:
        weight: Any = self.module.weight
        if type(hidden) is not Tensor or hidden.dim() < 2:
            return False
        if torch.is_grad_enabled() != self._deferral.differentiates:
            return False
        if hidden.dtype not in _LOW or hidden.dtype != weight.dtype or is_transformed():
            return False
        return not torch.is_autocast_enabled(hidden.device.type)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._call = self._make_call()


def find_head(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of a module, if it has a vocabulary of outputs and its class's forward."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    head = linears[-1] if linears else None
    if head is None or head.out_features < _LEAST_COLUMNS or type(head).forward is not nn.Linear.forward:
        return None
    is_changed = replaced_forward(head) is not None or any(has_entry(head, name) for name in _OTHERS)
    return None if is_changed else head
