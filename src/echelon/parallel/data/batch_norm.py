"""Batch norm over the whole batch: replicas put their statistics together, so that no plan changes them.

    forward     each replica's (number, mean, sum of squared deviations) of each channel, gathered by all
    backward    each replica's (sum of dy, sum of dy · x̂), summed over all

A replica's own statistics, which other libraries take, depend on how many replicas there are. What a rank has
is one part of the batch; if it also cuts that into microbatches, no microbatch can know the statistics of
the others, and training with batch statistics is refused.
"""

from collections.abc import Iterable
from functools import partial
from inspect import Parameter, signature
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from echelon.collectives import Group
from echelon.collectives.agreement import gather_rows
from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper
from echelon.plan import Plan

_SUBJECT = "batch norm"


def synchronize_batch_norm(
    modules: Iterable[nn.Module], group: Group, wrapping: Wrapping, *, parts: int = 1
) -> None:
    """Let every batch norm inside of `modules` take its statistics over the replicas of `group`. `parts`: in
    how many each replica cuts its samples."""
    if group.size == 1 and parts == 1:
        return
    for norm in dict.fromkeys(inner for module in modules for inner in module.modules()):
        if isinstance(norm, _BatchNorm):
            wrapping.wrap(WholeBatchNorm(norm, group, parts))


def check_worker_norms(modules: Iterable[nn.Module], plan: Plan, *, is_start: bool = False) -> None:
    """Refuse batch norms of asynchronous workers that promise to train as one device: no worker waits for
    the samples of others in its forward. `is_start`: what is all in eval mode is about to be trained."""
    if plan.data == 1 or plan.staleness > 0:
        return
    for module in modules:
        for name, norm in module.named_modules():
            is_trained = norm.training or (is_start and not module.training)
            if isinstance(norm, _BatchNorm) and (is_trained or norm.running_mean is None):
                raise UserError(
                    f"plan '{plan}': {name} ({type(norm).__name__}) takes its statistics over the whole "
                    "batch, and asynchronous workers each over their own samples, so that staleness=0 would "
                    "not train as one device; use sync=all-reduce, call eval() on these modules to keep "
                    "their statistics as they are, use GroupNorm, or staleness=1 or more, which promises less"
                )


def talks_in_forward(module: nn.Module) -> bool:
    """Return whether replicas talk in the forward pass of `module`, so that each must run it."""
    wrappers = (find_wrapper(inner, WholeBatchNorm) for inner in module.modules())
    return any(wrapper is not None and wrapper.group.size > 1 for wrapper in wrappers)


@final
class WholeBatchNorm(Wrapper):
    """Takes the place of a batch norm's forward while it uses the statistics of the batch."""

    entry = "batch norm"

    def __init__(self, module: _BatchNorm, group: Group, parts: int) -> None:
        super().__init__(module)
        self.group, self._parts = group, parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training and self.module.running_mean is not None:
            return self.inner(*args, **kwargs)
        if self._parts > 1:
            raise UserError(
                f"{type(self.module).__name__} takes its statistics over the whole batch, and the plan cuts "
                "a replica's samples into microbatches, each only a part of it; use microbatches=1 "
                "(and the same number of replicas for every stage), call eval() on these modules to keep "
                "their statistics as they are, or use GroupNorm"
            )
        return self._call_synchronized(*args, **kwargs)

    @untraced
    def _call_synchronized(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of its class, but for torch's synchronised norm, which would ask all ranks."""
        is_torchs = isinstance(self.module, nn.SyncBatchNorm)
        forward = MethodType(_BatchNorm.forward, self.module) if is_torchs else self.inner
        with _Synchronized(self.group):
            return forward(*args, **kwargs)


class _Synchronized(TorchFunctionMode):
    """Inside, `F.batch_norm` with the statistics of the batch takes those of all replicas."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            arguments = _ARGUMENTS.bind(*args, **(kwargs or {})).arguments
            if arguments.get("training", False):
                return _normalise(self._group, **{**_DEFAULTS, **arguments})
        return func(*args, **(kwargs or {}))


_ARGUMENTS = signature(F.batch_norm)
_DEFAULTS = {
    name: each.default for name, each in _ARGUMENTS.parameters.items() if each.default is not Parameter.empty
}


def _normalise(
    group: Group,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    **_: Any,
) -> Tensor:
    """As `F.batch_norm` in training: the running variance is that of a sample, divided by number − 1."""
    mean, variance, number = _Statistics.apply(input, group)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        unbiased = variance * (number / (number - 1))
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                running.add_((new.to(running.dtype) - running) * momentum)
    return _scale(input, mean, variance, eps, weight, bias)


class _Statistics(torch.autograd.Function):
    """(mean, variance, number) of each channel over the samples of all replicas. Backward: every replica's
    output depends on these, so their gradients are summed over replicas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        whole = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(whole, [0, *range(2, x.ndim)], correction=0)
        number = torch.full((1,), float(x.numel() // x.shape[1]), dtype=whole.dtype, device=x.device)
        gathered = once(partial(gather_rows, torch.cat([mean, variance, number]), group, _SUBJECT))
        means, variances, numbers = gathered.split([len(mean), len(mean), 1], 1)
        total = numbers.sum()
        mean = (means * numbers).sum(0) / total
        variance = ((variances + (means - mean).square()) * numbers).sum(0) / total
        ctx.group = group
        ctx.save_for_backward(x, mean, total)
        ctx.mark_non_differentiable(total)
        return mean, variance, total

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_variance: Tensor, _: Any) -> tuple[Tensor, None]:
        x, mean, total = ctx.saved_tensors
        summed = _Sum.apply(torch.stack([d_mean, d_variance]), ctx.group)  # type: ignore[no-untyped-call]
        d_mean, d_variance = (_by_channel(each / total, x) for each in summed)
        return (d_mean + 2 * d_variance * (x - _by_channel(mean, x))).to(x.dtype), None


class _Sum(torch.autograd.Function):
    """The sum over replicas, of which each goes on with it: so gradients of gradients are sums too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        summed = x.clone(memory_format=torch.contiguous_format)
        with group.ledger.about(_SUBJECT):
            group.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def _scale(
    x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    factor = (variance + eps).rsqrt()
    if weight is not None:
        factor = factor * weight
    normalised = (x - _by_channel(mean, x)) * _by_channel(factor, x)
    return (normalised if bias is None else normalised + _by_channel(bias, x)).to(x.dtype)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))
