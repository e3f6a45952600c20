"""Adam and AdamW on the host, in portions that stay in the processors' caches.

torch's kernel for CPUs updates masters in one pass over memory. Gradients of 16 bits are converted before it,
and weights rounded after it. Of a whole unit at once, each of these is a pass over memory of its own:

    unit        | convert …………… | update ……………… | round ……… |
    portions    | c | update | r | c | update | r | c | …        c and r find their numbers in a cache
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import portions
from echelon.update.optim.needs import inner_optimizers
from echelon.update.precision.flat_memory import have_same_layout
from echelon.update.precision.optimizer_call import may_fuse

_PORTION = 2**16  # elements, for each thread: 1 MiB of masters, gradients and moments

Scratch = Callable[[int], Tensor]  # float32 memory for so many elements, for the time of a portion


class _Run(NamedTuple):
    """Elements of one master, and of all that belongs to it."""

    master: Tensor
    gradient: Tensor
    average: Tensor
    average_of_squares: Tensor
    weight: Tensor
    step: Tensor


def update_in_portions(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    factor: float,
    scratch: Scratch,
) -> bool:
    """Update masters with gradients times `factor`, and round weights from them. All lie alike in memory.

    Return False where nothing has changed: another optimizer, one that works otherwise, or one that has no
    state of some masters yet.
    """
    given = dict(zip(masters, zip(gradients, weights, strict=True), strict=True))
    optimizers = inner_optimizers(optimizer)
    if not all(map(_suits, optimizers)):
        return False
    for each in optimizers:
        for group in each.param_groups:
            _update(each, group, given, factor, scratch)
    return True


def _suits(optimizer: torch.optim.Optimizer) -> bool:
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and may_fuse(optimizer)
    return is_adam and all(
        not group["amsgrad"]
        and all(isinstance(beta, float) for beta in group["betas"])
        and all(_has_state(optimizer.state.get(master), master) for master in group["params"])
        for group in optimizer.param_groups
    )


def _has_state(state: Mapping[str, Any] | None, master: Tensor) -> bool:
    """Return whether there is a state, which lies in memory as its master."""
    averages = [] if not state else [state["exp_avg"], state["exp_avg_sq"]]
    return bool(averages) and all(
        each.dtype == master.dtype and have_same_layout(each, master) for each in averages
    )


def _update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    given: Mapping[nn.Parameter, tuple[Tensor, Tensor]],
    factor: float,
    scratch: Scratch,
) -> None:
    if not group["params"]:
        return
    size = _PORTION * torch.get_num_threads()
    torch._foreach_add_([optimizer.state[master]["step"] for master in group["params"]], 1)
    is_decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    options = {key: group[key] for key in ("lr", "weight_decay", "eps", "maximize")}
    beta1, beta2 = group["betas"]
    if factor != 1.0:
        scale = torch.tensor(1.0 / factor, dtype=torch.float32)
        options |= {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
    runs = (run for master in group["params"] for run in _runs(optimizer, master, *given[master], size))
    for portion in portions(runs, lambda run: len(run.master), size):
        parts, _, averages, squares, of_weights, steps = (list(each) for each in zip(*portion, strict=True))
        gradients = _in_float32(portion, scratch)
        kernel(
            parts, gradients, averages, squares, [], steps,
            amsgrad=False, beta1=beta1, beta2=beta2, **options,
        )  # fmt: skip
        torch._foreach_copy_(of_weights, parts)


def _runs(
    optimizer: torch.optim.Optimizer, master: nn.Parameter, gradient: Tensor, weight: Tensor, size: int
) -> Iterator[_Run]:
    """Yield all elements of a master, at most `size` at a time, in the order in which they lie in memory."""
    state = optimizer.state[master]
    tensors = (master.detach(), gradient, state["exp_avg"], state["exp_avg_sq"], weight)
    flat = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors)
    for parts in zip(*(tensor.split(size) for tensor in flat), strict=True):
        yield _Run._make((*parts, state["step"]))


def _in_float32(portion: Sequence[_Run], scratch: Scratch) -> list[Tensor]:
    gradients = [run.gradient for run in portion]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return gradients
    sizes = [len(gradient) for gradient in gradients]
    copies = list(scratch(sum(sizes))[: sum(sizes)].split(sizes))
    torch._foreach_copy_(copies, gradients)
    return copies
