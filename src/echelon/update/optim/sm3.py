"""SM3-II: one accumulator for each row, each column, each index of each dim (Anil and others, 2019).

    ν          min over dims of the accumulators of an element, + G²
    U          G / √(ν + ε)
    M          β M + (1 − β) U, if there is momentum
    W          −= lr · M, or lr · U
    the accumulator of an index    the largest ν of all elements that have it

The largest is over the whole tensor, over all ranks that hold parts: one message per update. A vector has an
accumulator for each element, so that ν is the sum of G², as in Adagrad.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import raise_errors
from echelon.update.optim.sum_optimizer import (
    Entry,
    ParamGroup,
    Shape,
    StatisticsBuffer,
    SumOptimizer,
    Work,
    in_turns,
    inside,
    portions,
    rate_of,
)

_MOST_DIMS = 64  # of any tensor


@final
class SM3(SumOptimizer):
    """SM3-II with momentum.

        optimizer = lambda parameters: echelon.optim.SM3(parameters, lr=0.1, momentum=0.9)

    State of an m × n matrix: m + n numbers. Momentum (none by default) takes m · n more, of
    `momentum_dtype` if that is given. Warm the rate up: the first updates are as large as `lr`.
    """

    whole_state = frozenset(f"accumulator_{dim}" for dim in range(_MOST_DIMS))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        *,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        """`weight_decay` shrinks the weights by lr · weight_decay in each update, as AdamW does. √eps is as
        small as AdamW's eps: gradients that are nothing but rounding stay small."""
        rules = (
            (float(lr) >= 0, f"lr={lr}: must be at least 0"),
            (0 <= momentum < 1, f"momentum={momentum}: must be at least 0 and below 1"),
            (eps > 0, f"eps={eps}: must be above 0"),
            (weight_decay >= 0, f"weight_decay={weight_decay}: must be at least 0"),
        )
        raise_errors("optimizer SM3", [text for holds, text in rules if not holds])
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_dtype": momentum_dtype,
        }
        super().__init__(params, defaults)

    def _new_state(
        self, group: ParamGroup, entry: Entry, tensor: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        state = {
            f"accumulator_{dim}": torch.zeros(shape, dtype=dtype, device=tensor.device)
            for dim, shape in enumerate(_accumulators(entry.shape))
        }
        if group["momentum"]:
            state["momentum"] = torch.zeros_like(tensor, dtype=group["momentum_dtype"] or dtype)
        return state

    def _update(self, work: Work) -> None:
        largest = work.buffer("largest", _accumulators)
        for group, entries in work.groups:
            for portion in portions(entries):
                # Of a skipped update too, whose gradients are 0: then the largest are those of before.
                moments = [_second_moments(entry) for entry in portion]
                _collect_largest(portion, moments, largest)
                _apply(group, portion, _normalize(group, portion, moments, work), work)
        largest.reduce("max")
        everyone = [entry for _, entries in work.groups for entry in entries]
        if everyone:
            torch._foreach_copy_(
                [each for entry in everyone for each in _state(entry)],
                [each for entry in everyone for each in largest[entry.part.number]],
            )


def _accumulators(shape: Shape) -> list[Shape]:
    """(m, 1) and (1, n) of an m × n matrix; () of a number."""
    dims = range(len(shape))
    return [tuple(shape[dim] if dim == own else 1 for dim in dims) for own in dims] or [()]


def _state(entry: Entry) -> list[Tensor]:
    return [entry.state[f"accumulator_{dim}"] for dim in range(_num_accumulators(entry))]


def _num_accumulators(entry: Entry) -> int:
    return len(entry.shape) or 1


def _second_moments(entry: Entry) -> list[Tensor]:
    """ν of each box."""
    moments = []
    for box, gradient in zip(entry.part.boxes, entry.gradients, strict=True):
        least = reduce(torch.minimum, [inside(each, box) for each in _state(entry)])
        gradient = gradient.to(least.dtype)
        moments.append(torch.addcmul(least.expand(gradient.shape), gradient, gradient))
    return moments


def _collect_largest(
    entries: Sequence[Entry], moments: Sequence[Sequence[Tensor]], largest: StatisticsBuffer
) -> None:
    pairs = list(zip(entries, moments, strict=True))
    for dim in range(max(_num_accumulators(entry) for entry in entries)):
        having = [(entry, of_one) for entry, of_one in pairs if dim < _num_accumulators(entry)]
        targets = [
            [inside(largest[entry.part.number][dim], box) for box in entry.part.boxes] for entry, _ in having
        ]
        values = [[_largest(moment, dim) for moment in of_one] for _, of_one in having]
        in_turns(torch._foreach_maximum_, targets, values)


def _largest(moment: Tensor, dim: int) -> Tensor:
    """Return the largest element of each index of `dim`."""
    others = [other for other in range(moment.dim()) if other != dim]
    return moment.amax(others, keepdim=True) if others else moment


def _normalize(
    group: ParamGroup, entries: Sequence[Entry], moments: Sequence[Sequence[Tensor]], work: Work
) -> list[Tensor]:
    """U of each box, in the memory of ν; or M, which stays in the state."""
    updates = [moment for of_one in moments for moment in of_one]
    torch._foreach_add_(updates, group["eps"])
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, [gradient for entry in entries for gradient in entry.gradients])
    if group["eps"] < torch.finfo(updates[0].dtype).tiny:  # as good as 0
        work.drop_refused(updates)
    if not group["momentum"]:
        return updates
    smoothed = [view for entry in entries for view in entry.part.views(entry.state["momentum"])]
    part = work.kept(1 - group["momentum"], updates[0].dtype)
    torch._foreach_mul_(updates, part)
    torch._foreach_mul_(smoothed, 1 - part)
    torch._foreach_add_(smoothed, updates)
    return smoothed


def _apply(group: ParamGroup, entries: Sequence[Entry], updates: list[Tensor], work: Work) -> None:
    weights = [weight for entry in entries for weight in entry.weights]
    lr = rate_of(group, weights[0].device)
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - work.kept(lr * group["weight_decay"], dtype))
    torch._foreach_add_(weights, torch._foreach_mul(updates, work.kept(-lr, updates[0].dtype)))
