"""Adafactor: the second moment of a matrix as means of its rows and columns (Shazeer and Stern, 2018).

The options and what they mean are those of torch.optim.Adafactor, with the same result:

    R, C       moving averages of the squared gradient G², over rows and over columns
    V          R C / mean(R); of a vector the moving average of G² itself
    U          G / √V
    W          −= α U / max(1, RMS(U) / d),   with α = max(ε₂, RMS(W)) · min(lr, 1 / √step)

The sums behind R, C, RMS(W) and RMS(U) are over the whole tensor, over all ranks that hold parts: two
messages per update.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice
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


@final
class Adafactor(SumOptimizer):
    """torch.optim.Adafactor, for ranks that hold parts of parameters; many matrices at a time.

        optimizer = lambda parameters: echelon.optim.Adafactor(parameters, lr=1e-2)

    State of an m × n matrix: m + n numbers. With more than two dims, the last two are its rows and columns.
    """

    whole_state = frozenset({"row_var", "col_var"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """`lr` bounds the relative step 1 / √step and is the rate of decay; `beta2_decay` is the exponent of
        the averages' weight; `eps` are the least √V and the least RMS(W); `d` bounds RMS(U)."""
        rules = (
            (float(lr) >= 0, f"lr={lr}: must be at least 0"),
            (beta2_decay <= 0, f"beta2_decay={beta2_decay}: must be at most 0"),
            (eps[0] is None or eps[0] >= 0, f"eps[0]={eps[0]}: must be at least 0, or None"),
            (eps[1] >= 0, f"eps[1]={eps[1]}: must be at least 0"),
            (d >= 1, f"d={d}: must be at least 1"),
            (weight_decay >= 0, f"weight_decay={weight_decay}: must be at least 0"),
        )
        raise_errors("optimizer Adafactor", [text for holds, text in rules if not holds])
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def _new_state(
        self,
        group: ParamGroup,  # noqa: ARG002
        entry: Entry,
        tensor: Tensor,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        step = torch.zeros((), dtype=torch.float64, device=tensor.device)
        if not _is_factored(entry):
            return {"step": step, "variance": torch.zeros_like(tensor, dtype=dtype)}
        _, rows, columns = _squares(entry.shape)
        return {
            "step": step,
            "row_var": torch.zeros(rows, dtype=dtype, device=tensor.device),
            "col_var": torch.zeros(columns, dtype=dtype, device=tensor.device),
        }

    def _update(self, work: Work) -> None:
        squares = work.buffer("squares", _squares)
        for _, entries in work.groups:
            _add_squares(entries, squares)
        squares.reduce("sum")
        lengths = work.buffer("lengths", lambda _: [()])
        updates = []
        for group, entries in work.groups:
            _average(group, entries, squares, work)
            updates.append(self._normalize(group, entries, lengths, work))
        lengths.reduce("sum")
        for (group, entries), of_group in zip(work.groups, updates, strict=True):
            _apply(group, entries, of_group, squares, lengths, work)

    def _normalize(
        self, group: ParamGroup, entries: Sequence[Entry], lengths: StatisticsBuffer, work: Work
    ) -> list[Tensor]:
        """U of each box, in memory of its gradient if that may be used up; `lengths` get its squares."""
        updates: list[Tensor] = []
        least = _least(group, entries[0]) ** 2
        for portion in portions(entries):
            gradients = [gradient for entry in portion for gradient in entry.gradients]
            normalized = [moment for entry in portion for moment in _second_moments(group, entry)]
            torch._foreach_clamp_min_(normalized, least)
            torch._foreach_rsqrt_(normalized)
            if self.uses_up_gradients and all(g.dtype == normalized[0].dtype for g in gradients):
                torch._foreach_mul_(gradients, normalized)
                normalized = gradients
            else:
                torch._foreach_mul_(normalized, gradients)
            if least < torch.finfo(normalized[0].dtype).tiny:  # else V is above 0
                work.drop_refused(normalized)
            _add_norms(portion, [lengths[entry.part.number][0] for entry in portion], normalized)
            updates += normalized
        return updates


def _squares(shape: Shape) -> list[Shape]:
    """The sums of squares that a parameter needs: of its values; of the gradient's rows and columns."""
    if len(shape) < 2:
        return [()]
    return [(), (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]


def _is_factored(entry: Entry) -> bool:
    return len(entry.shape) > 1


def _add_squares(entries: Sequence[Entry], sums: StatisticsBuffer) -> None:
    weights = [weight for entry in entries for weight in entry.weights]
    _add_norms(entries, [sums[entry.part.number][0] for entry in entries], weights)
    matrices = [entry for entry in entries if _is_factored(entry)]
    for statistic, dim in ((1, -1), (2, -2)):
        # As the root of sums of squares: in one pass over the gradient, without a copy of it.
        norm = partial(torch.linalg.vector_norm, dim=dim, keepdim=True, dtype=sums.dtype)
        norms = [[norm(gradient) for gradient in entry.gradients] for entry in matrices]
        _square([norm for of_one in norms for norm in of_one])
        targets = [
            [inside(sums[entry.part.number][statistic], box) for box in entry.part.boxes]
            for entry in matrices
        ]
        in_turns(torch._foreach_add_, targets, norms)


def _square(values: list[Tensor]) -> None:
    if values:
        torch._foreach_mul_(values, values)


def _add_norms(entries: Sequence[Entry], targets: Sequence[Tensor], boxes: list[Tensor]) -> None:
    """Add to the target of each entry the squares of its boxes."""
    if not entries:
        return
    norms = list(torch._foreach_norm(boxes, 2, targets[0].dtype))
    _square(norms)
    rest, counts = iter(norms), [len(entry.part.boxes) for entry in entries]
    in_turns(
        torch._foreach_add_,
        [[target] * count for target, count in zip(targets, counts, strict=True)],
        [list(islice(rest, count)) for count in counts],
    )


def _average(group: ParamGroup, entries: Sequence[Entry], sums: StatisticsBuffer, work: Work) -> None:
    """Move the averages: by step ** beta2_decay of the way to the squares of this gradient."""
    steps = [entry.state["step"] for entry in entries]
    torch._foreach_add_(steps, [work.kept(1.0)] * len(steps))  # one tensor for all would be read
    weights = work.kept(_counted(entries) ** group["beta2_decay"]).to(sums.dtype).unbind()
    averages: list[Tensor] = []
    squares: list[Tensor] = []
    counts: list[float] = []
    of_each: list[Tensor] = []
    for entry, weight in zip(entries, weights, strict=True):
        if _is_factored(entry):
            averages += [entry.state["row_var"], entry.state["col_var"]]
            squares += sums[entry.part.number][1:]
            counts += [entry.shape[-1], entry.shape[-2]]
        else:
            averages += entry.part.views(entry.state["variance"])
            squares += [gradient.to(weight.dtype).square() for gradient in entry.gradients]
            counts += [1.0] * len(entry.gradients)
        of_each += [weight] * (len(averages) - len(of_each))
    torch._foreach_lerp_(averages, torch._foreach_div(squares, counts), of_each)


def _counted(entries: Sequence[Entry]) -> Tensor:
    """The number of each parameter's update: 0 if all were refused, this one too."""
    return torch.stack([entry.state["step"] for entry in entries])


def _second_moments(group: ParamGroup, entry: Entry) -> list[Tensor]:
    """V of each box, in memory of its own."""
    if not _is_factored(entry):
        return [view.clone() for view in entry.part.views(entry.state["variance"])]
    rows, columns = entry.state["row_var"], entry.state["col_var"]
    rows = rows / rows.mean(dim=-2, keepdim=True).clamp_(min=_least(group, entry))
    return [inside(rows, box) * inside(columns, box) for box in entry.part.boxes]


def _apply(
    group: ParamGroup,
    entries: Sequence[Entry],
    updates: Sequence[Tensor],
    squares: StatisticsBuffer,
    lengths: StatisticsBuffer,
    work: Work,
) -> None:
    """W −= α U / max(1, RMS(U) / d), and decay."""
    weights = [weight for entry in entries for weight in entry.weights]
    dtype, lr = weights[0].dtype, rate_of(group, weights[0].device)
    relative = _rms(entries, squares).clamp(min=group["eps"][1]) * (_counted(entries) ** -0.5).clamp(max=lr)
    scale = work.kept(relative / (_rms(entries, lengths) / group["d"]).clamp(min=1.0))
    if group["weight_decay"]:
        decay = work.kept(lr * group["weight_decay"], torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_(weights, 1 - decay)
    scales = scale.to(dtype).unbind()
    of_each = [scale for entry, scale in zip(entries, scales, strict=True) for _ in entry.weights]
    updates = [update.to(dtype) for update in updates]
    torch._foreach_addcmul_(weights, updates, of_each, value=1.0 if group["maximize"] else -1.0)


def _rms(entries: Sequence[Entry], sums: StatisticsBuffer) -> Tensor:
    """The root of the mean square of each parameter, from the sum of its squares."""
    totals = [sums[entry.part.number][0] for entry in entries]
    numels = [float(torch.Size(entry.shape).numel()) for entry in entries]
    return torch.stack(torch._foreach_div(totals, numels)).double().sqrt()


def _least(group: ParamGroup, entry: Entry) -> float:
    least: float | None = group["eps"][0]
    return torch.finfo(entry.weights[0].dtype).eps if least is None else least
