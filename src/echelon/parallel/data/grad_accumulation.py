"""Gradients of matrices that are added where they are: product and sum in one.

    autograd    new memory = product,   gradient += new memory
    here        gradient += product

The matrices of a model ask before each sum: only while no one is waiting for this very gradient
(`Accumulation.is_open`), and not for the first of a step, which there is nothing to add to. On a CPU a small
microbatch's backward pass is mostly such sums, and the memory that they take. On a CUDA device products of
16-bit weights are added to float32 sums without being rounded in between; on a CPU torch has no such product.

Compiled layers have an operator for it (added_products.py). The rest of the code sees `Accumulation`,
`accumulate_in_place` and `hook_gradient`.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from echelon.nn.autograd.leaves import product
from echelon.nn.tracing import is_transformed
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, is_wrapped, replaced_forward, unwrap
from echelon.parallel.data.buckets import gradient_dtype

SMALLEST = 2**18  # elements of a matrix for which it pays

# The hooks on each parameter that were set by `hook_gradient` and `hook_before`.
_tolerant_hooks: MutableMapping[Tensor, set[int]] = WeakIdKeyDictionary()


def hook_before(parameter: nn.Parameter, hook: Callable[[Tensor | None], Tensor | None]) -> RemovableHandle:
    """Call `hook` with each gradient of the parameter, or None where it was added in place."""
    handle: RemovableHandle = parameter.register_hook(hook)
    _tolerant_hooks.setdefault(parameter, set()).add(handle.id)
    return handle


def hook_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` when the parameter has got a gradient. It need not hear of what is only added to one that
    it has heard of, so it does not keep matrices from adding in place."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    _tolerant_hooks.setdefault(parameter, set()).add(handle.id)
    return handle


@final
class Accumulation:
    """Says whether matrices of a parameter set may add. `is_open`: no sum waits for their gradients;
    `is_continued`: other gradients follow, and what is here is the sum."""

    def __init__(self) -> None:
        self.is_open = self.is_continued = False

    def may_add(self, weight: Tensor) -> bool:
        """Return whether all that would become of a gradient of `weight` is to be added to another."""
        total = weight.grad
        if not self.is_open or total is None or not weight.requires_grad or torch.is_grad_enabled():
            return False
        is_wide = total.dtype == weight.dtype or (total.dtype == torch.float32 and weight.is_cuda)
        plain = total.layout == torch.strided and is_wide
        return plain and not _has_other_hooks(weight)

    def begins_sum(self, weight: Tensor) -> bool:
        """Return whether a gradient of `weight` is the first of a sum in float32."""
        begins = self.is_open and self.is_continued and weight.grad is None and weight.is_cuda
        is_wider = gradient_dtype(weight) == torch.float32 != weight.dtype
        return begins and is_wider and not _has_other_hooks(weight)


def accumulate_in_place(
    model: nn.Module, accumulations: Mapping[nn.Parameter, Accumulation], wrapping: Wrapping
) -> None:
    """Let the large matrices of `model` add to their gradients while their accumulation is open."""
    for module in dict.fromkeys(model.modules()):
        previous = find_wrapper(module, AccumulatingLinear)  # of an engine that was not closed
        if previous is not None:
            unwrap(previous)
        weight = module._parameters.get("weight") if _is_large_linear(module) else None
        if weight is not None and weight in accumulations:
            wrapping.wrap(AccumulatingLinear(module, accumulations[weight]))


@final
class AccumulatingLinear(Wrapper):
    """A linear layer whose backward pass adds to the gradient of its weight."""

    entry = "accumulate"

    def __init__(self, module: nn.Module, accumulation: Accumulation) -> None:
        super().__init__(module)
        self.accumulation = accumulation

    def __call__(self, input: Tensor) -> Tensor:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        if not _is_plain(input, weight):
            return F.linear(input, weight, bias)
        function: Any = _Linear
        result: Tensor = function.apply(input, weight, bias, self.accumulation)
        return result


class _Linear(torch.autograd.Function):
    """As F.linear."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, accumulation: Accumulation
    ) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Saved tensors may come back as copies (hooks, offload), and only the weight itself has `.grad`.
        ctx.weight, ctx.accumulation = weight, accumulation
        ctx.set_materialize_grads(False)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        uses = [use_of(node) if node is not None else False for node, _ in ctx.next_functions]
        for_x, for_weight, for_bias = (use is not False for use in (*uses, False)[:3])
        flat, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if uses[1] and ctx.accumulation.may_add(ctx.weight):
            add_product(ctx.weight.grad, flat.T, rows)
            for_weight = False
        return (
            (flat @ weight).view(x.shape) if for_x else None,
            flat.T @ rows if for_weight else None,
            flat.sum(0) if for_bias else None,
            None,
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def use_of(node: Any) -> bool | None:
    """Return whether this backward pass runs `node`; None where it gives the gradient to its caller."""
    try:
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return reached


def _is_large_linear(module: nn.Module) -> bool:
    """Return whether it is large, and called as nn.Linear is: a split one has a forward of its own."""
    if type(module).forward is not nn.Linear.forward:
        return False
    if is_wrapped(module) or replaced_forward(module) is not None:
        return False
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.numel() < SMALLEST:
        return False
    return weight.is_cuda or (weight.is_cpu and gradient_dtype(weight) == weight.dtype)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether autograd would do no more than multiply."""
    if not (torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad):
        return False
    alike = type(x) is Tensor and x.device == weight.device and x.ndim > 1 and x.dtype == weight.dtype
    if not alike or not (x.is_cpu or x.is_cuda) or x.layout != torch.strided or x.is_nested or x.is_complex():
        return False
    return not (torch.is_autocast_enabled(x.device.type) or is_transformed())


def _has_other_hooks(weight: Tensor) -> bool:
    """Return whether a hook of the user wants every gradient of this weight. Hooks on the node of the graph
    that adds it up cannot be seen."""
    hooks = (weight._post_accumulate_grad_hooks or {}).keys()
    before = (weight._backward_hooks or {}).keys()
    return not {*before, *hooks} <= _tolerant_hooks.get(weight, set())
