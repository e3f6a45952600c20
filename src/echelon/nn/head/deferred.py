"""Logits that wait: what the head returns in a step, until it is known what reads them.

    head(h)           DeferredLogits, no values: h and the matrix are remembered
    .view .float …    DeferredLogits again: steps that leave rows of logits as they are
    cross_entropy     computed with the matrix, chunk by chunk (linear_cross_entropy.py): never whole
    anything else     gets the logits, computed now, with the same steps: as if they had been there

One node of autograd stands where the matrix product would, so that hooks on the head's output see its
backward pass begin. It adds up what comes by two ways: the gradients that each fused loss has made already,
times that of the loss; and a gradient of logits, from all that has read them.

    hidden, weight, bias ─ _Deferred ─┬─ _FusedLoss ─ loss        gradient of _Deferred: nothing, strides of 0
                                      └─ _Computed ─ logits ─ …                          of logits

In the memory of deferred logits is one number, NaN: what reads them past torch's functions is not silent.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.autograd.attributes import FUNCTIONS_WITHOUT_VALUES
from echelon.nn.head.linear_cross_entropy import HeadGradients, Wanted, linear_cross_entropy
from echelon.nn.losses import IGNORED_TARGET


@dataclass
class _Part:
    """Of one fused loss: the gradients for a gradient of 1, and the true one, when it has come."""

    gradients: HeadGradients
    scale: Tensor | None = None


@final
@dataclass
class _Product:
    """What logits are made of. The weight is the parameter itself, which may be freed and gathered again."""

    hidden: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    wanted: Wanted
    version: int  # of the hidden states
    parts: list[_Part] = field(default_factory=list)

    def states(self) -> Tensor:
        if self.hidden._version != self.version:
            raise UserError(
                "the hidden states that the head was given have been changed in place before the loss; "
                "change a copy of them, or call the head after the change"
            )
        return self.hidden


@final
class DeferredLogits(Tensor):
    """The result of `defer`, or of steps on it."""

    product: _Product
    origin: "DeferredLogits | None"  # the head's own output; None of itself
    step: Callable[[Tensor], Tensor]  # from logits of the parent to these
    parent: "DeferredLogits | None"
    rows: Callable[[Tensor], Tensor]  # from hidden states to those of these rows
    computed: Tensor | None
    copies: "list[weakref.ref[DeferredLogits]]"  # of another type, and so in memory of their own

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_GRAPH:  # autograd knows the head's own output alone
            args = (_origin(args[0]), *args[1:])
        if func in FUNCTIONS_WITHOUT_VALUES and func is not Tensor.register_hook:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        known = _KNOWN.get(func)
        result = NotImplemented if known is None else known(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _writes(func, kwargs):
            _keep_copies(args)
        return func(*tree_map(compute, args), **tree_map(compute, kwargs))


def defer(hidden: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
    """Stand for F.linear(hidden, weight, bias)."""
    wanted = Wanted(*(t is not None and t.requires_grad for t in (hidden, weight, bias)))
    product = _Product(
        hidden.detach(),
        weight,
        bias,
        wanted if torch.is_grad_enabled() else Wanted(False, False, False),
        hidden._version,
    )
    function: Any = _Deferred
    logits = cast(DeferredLogits, function.apply(hidden, weight, bias, product))
    return _describe(logits, product, None, None, _same, _same)


def is_deferred(value: Any) -> bool:
    """Return whether a tensor stands for logits that nothing has read yet."""
    return isinstance(value, DeferredLogits) and _origin(value).computed is None


def awaited_weight(value: Tensor) -> nn.Parameter | None:
    """The matrix that will be read when logits that wait are computed; None of other tensors."""
    return value.product.weight if isinstance(value, DeferredLogits) and is_deferred(value) else None


def compute(value: Any) -> Any:
    """The logits themselves, where `value` stands for some. Several readers share them."""
    if not isinstance(value, DeferredLogits):
        return value
    if value.computed is None:
        if value.parent is None:
            function: Any = _Computed
            value.computed = function.apply(value, value.product)
        else:
            value.computed = value.step(compute(value.parent))
    return value.computed


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _origin(logits: DeferredLogits) -> DeferredLogits:
    return logits if logits.origin is None else logits.origin


def _describe(
    logits: DeferredLogits,
    product: _Product,
    origin: DeferredLogits | None,
    parent: DeferredLogits | None,
    step: Callable[[Tensor], Tensor],
    rows: Callable[[Tensor], Tensor],
) -> DeferredLogits:
    logits.product, logits.origin, logits.parent = product, origin, parent
    logits.step, logits.rows, logits.computed, logits.copies = step, rows, None, []
    return logits


def _without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> DeferredLogits:
    one = torch.full((), torch.nan, dtype=dtype, device=device)
    return one.expand(tuple(shape)).as_subclass(DeferredLogits)


# Steps that leave rows as they are. Each returns NotImplemented where it does not.


def _after(
    parent: DeferredLogits,
    shape: Sequence[int],
    dtype: torch.dtype,
    step: Callable[[Tensor], Tensor],
    rows: Callable[[Tensor], Tensor],
) -> DeferredLogits:
    with torch._C.DisableTorchFunctionSubclass():
        logits = _without_values(shape, dtype, parent.device)
    _describe(logits, parent.product, _origin(parent), parent, step, lambda h: rows(parent.rows(h)))
    if dtype != parent.dtype:
        _origin(parent).copies.append(weakref.ref(logits))
    return logits


def _to_float(logits: DeferredLogits, **options: Any) -> Any:
    return NotImplemented if options else _to(logits, torch.float32)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if not is_deferred(logits) or any(isinstance(arg, Tensor) for arg in args) or kwargs.get("copy"):
        return NotImplemented
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device not in (None, logits.device):
        return NotImplemented
    if dtype in (None, logits.dtype):
        return logits
    if dtype != torch.float32:
        return NotImplemented
    return _after(logits, logits.shape, dtype, lambda t: t.to(dtype), _same)


def _contiguous(logits: DeferredLogits, **options: Any) -> Any:
    return NotImplemented if options or not is_deferred(logits) else logits


def _reshape(func: Callable[..., Tensor]) -> Callable[..., Any]:
    """`func` makes another shape of the same elements in the same order."""

    def reshape(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        if not is_deferred(logits):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            like = func(logits, *args, **kwargs)
        shape, columns = like.shape, logits.shape[-1]
        if like.dtype != logits.dtype or len(shape) < 2 or shape[-1] != columns:
            return NotImplemented
        return _after(
            logits,
            shape,
            like.dtype,
            lambda t: func(t, *args, **kwargs),
            lambda h: h.reshape(*shape[:-1], h.shape[-1]),
        )

    return reshape


def _index(logits: DeferredLogits, index: Any) -> Any:
    """Rows are chosen by slices alone, and the last dim stays whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not is_deferred(logits) or not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    is_last_named = Ellipsis in parts[:-1] or len(parts) == logits.dim()
    if is_last_named and parts[-1] not in (slice(None), Ellipsis):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        shape = logits[index].shape
    return _after(logits, shape, logits.dtype, lambda t: t[index], lambda h: h[index])


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))


def _keep_copies(args: Sequence[Any]) -> None:
    """Logits will be written to: what was copied from them before keeps its values."""
    for each in args:
        if isinstance(each, DeferredLogits):
            for known in _origin(each).copies:
                compute(known())


# The loss that is fused.


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED_TARGET,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """F.cross_entropy of float32 rows and classes, summed or their mean."""
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not is_plain or reduction not in ("sum", "mean") or not is_deferred(input):
        return NotImplemented
    is_of_rows = input.dim() == 2 and target.dim() == 1 and len(target) == len(input)
    if input.dtype != torch.float32 or not is_of_rows or target.dtype != torch.int64:
        return NotImplemented
    return fused_cross_entropy(input, target, ignore_index, mean=reduction == "mean")


def fused_cross_entropy(
    logits: DeferredLogits, targets: Tensor, ignored: int, *, mean: bool = False
) -> Tensor:
    """The summed cross entropy of rows of deferred logits, or their mean."""
    function: Any = _FusedLoss
    total: Tensor = function.apply(_origin(logits), logits.rows, targets, ignored)
    return total / (targets != ignored).sum() if mean else total


# Autograd.


class _Deferred(torch.autograd.Function):
    """Where the product would be. A backward pass that is split in halves runs it once."""

    runs_once = True

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: _Product) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(hidden, weight)
        ctx.product = product
        ctx.set_materialize_grads(False)
        return _without_values((*hidden.shape[:-1], len(weight)), hidden.dtype, hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        totals: list[Tensor | None] = [None, None, None]
        if gradient is not None and any(gradient.stride()):
            hidden, weight = ctx.saved_tensors
            totals = _gradients_of_product(gradient, hidden, weight, ctx.needs_input_grad)
        for part in ctx.product.parts:
            if part.scale is not None:
                made = [_scaled(each, part.scale) for each in part.gradients]
                totals = [_sum(*pair) for pair in zip(totals, made, strict=True)]
                part.scale = None  # a graph that is retained may be walked from another loss
        return *totals, None


def _gradients_of_product(
    gradient: Tensor, hidden: Tensor, weight: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    flat, rows = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return [
        (flat @ weight).view(hidden.shape) if needed[0] else None,
        flat.T @ rows if needed[1] else None,
        flat.sum(0) if needed[2] else None,
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
        memory: Any = logits.new_empty(0)
        result: Tensor = memory.set_(logits)  # the same memory, and no view, which could not be written to
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient.contiguous(), None  # strides of 0 would stand for no gradient of logits


class _FusedLoss(torch.autograd.Function):
    """The sum of losses of rows of deferred logits."""

    @staticmethod
    def forward(
        ctx: Any, source: DeferredLogits, rows: Callable[[Tensor], Tensor], targets: Tensor, ignored: int
    ) -> Tensor:
        product = source.product
        with torch.enable_grad():  # from rows back to all hidden states
            states = product.states().detach().requires_grad_()
            chosen = rows(states)
        total, gradients = linear_cross_entropy(
            chosen.detach(), product.weight.detach(), product.bias, targets, ignored, product.wanted
        )
        if gradients.hidden is not None:
            (for_states,) = torch.autograd.grad(chosen, states, gradients.hidden)
            gradients = gradients._replace(hidden=for_states)
        ctx.part = _Part(gradients)
        product.parts.append(ctx.part)
        ctx.shape, ctx.dtype, ctx.device = source.shape, source.dtype, source.device
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.part.scale = gradient
        nothing = torch.zeros((), dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)
        return nothing, None, None, None


_IN_GRAPH = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "output_nr")}
_KNOWN: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: _to_float,
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    **{
        func: _reshape(func)
        for func in (Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten)
    },
}
