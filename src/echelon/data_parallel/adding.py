"""Gradients of matrices that add up where they are: product and sum in one.

    autograd    new memory = product,   gradient += new memory
    here        gradient += product

The matrices of a model ask before each: only while nobody waits for this very gradient (`Adding.open`), and
not for the first of a step, which there is nothing to add to. On a CPU a small microbatch's backward pass is
mostly such sums, and the memory that they take.
"""

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from echelon.products import product

SMALLEST = 2**18  # elements of a matrix for which it pays

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def may_miss_sums(hook: _Hook) -> _Hook:
    """Of a hook on gradients: it need not hear of what is only added to one that it has heard of."""
    hook.may_miss_sums = True  # type: ignore[attr-defined]
    return hook


@final
class Adding:
    """What the matrices of one model ask. `open`: gradients of now are waited for by nobody."""

    def __init__(self) -> None:
        self.open = False

    def may_add(self, weight: Tensor) -> bool:
        """Whether all that would become of a gradient of `weight` is to be added to another."""
        total = weight.grad
        if not self.open or total is None or not weight.requires_grad or torch.is_grad_enabled():
            return False
        plain = total.layout == torch.strided and total.dtype == weight.dtype
        return plain and not _is_heard(weight)


def add_in_place(model: nn.Module, adding: Adding) -> None:
    """Let the large matrices of `model` add to their gradients while `adding` is open."""
    for module in model.modules():
        if _is_linear(module):
            module.forward = AddingLinear(module, adding).__call__  # a method: torch.compile shares its code


def leave_to_autograd(model: nn.Module) -> None:
    """Undo that: an engine of before may have left it."""
    for module in model.modules():
        if isinstance(getattr(vars(module).get("forward"), "__self__", None), AddingLinear):
            del module.forward


@final
class AddingLinear:
    """The forward of one linear layer. No closure, so that the model can be copied."""

    def __init__(self, module: nn.Module, adding: Adding) -> None:
        self.module, self.adding = module, adding

    def __call__(self, input: Tensor) -> Tensor:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        if not _is_plain(input, weight):
            return F.linear(input, weight, bias)
        function: Any = _Linear
        result: Tensor = function.apply(input, weight, bias, self.adding)
        return result


class _Linear(torch.autograd.Function):
    """As F.linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, adding: Adding) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.weight, ctx.adding = weight, adding  # what is saved may come back as a copy
        ctx.set_materialize_grads(False)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        uses = [_use(node) if node is not None else False for node, _ in ctx.next_functions]
        for_x, for_weight, for_bias = (use is not False for use in (*uses, False)[:3])
        came, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if uses[1] and ctx.adding.may_add(ctx.weight):
            ctx.weight.grad.addmm_(came.T, rows)
            for_weight = False
        return (
            (came @ weight).view(x.shape) if for_x else None,
            came.T @ rows if for_weight else None,
            came.sum(0) if for_bias else None,
            None,
        )


def _use(node: Any) -> bool | None:
    """Whether this backward pass goes through `node`; None where it gives what comes there to its caller."""
    try:
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return reached


def _is_linear(module: nn.Module) -> bool:
    """Whether it is large, and called as nn.Linear is: a split one has a forward of its own."""
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.is_cpu and weight.numel() >= SMALLEST


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would do no more than multiply."""
    if not (torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad):
        return False
    alike = type(x) is Tensor and x.is_cpu and x.ndim > 1 and x.dtype == weight.dtype
    if not alike or x.layout != torch.strided or x.is_nested or x.is_complex():
        return False
    return not (torch.is_autocast_enabled("cpu") or _is_transformed())


def _is_transformed() -> bool:
    """Whether somebody records what is computed, or differentiates it in another way."""
    recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return recorded or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_heard(weight: Tensor) -> bool:
    """Whether somebody wants to hear of every gradient of this weight. Hooks on the node of the graph that
    adds it up cannot be seen."""
    hooks = (weight._post_accumulate_grad_hooks or {}).values()
    return bool(weight._backward_hooks) or not all(getattr(its, "may_miss_sums", False) for its in hooks)
