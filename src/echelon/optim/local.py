"""The user's optimizer over what this rank holds.

The user's function is given the model's own parameters, so that rules like "decay matrices, not vectors" see
them as they are. Then each parameter in the optimizer's groups is replaced by what this rank holds of it.
Runs of elements are flat, which is right for optimizers that treat every element alike, and only for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from echelon.errors import UserError

# Of torch's optimizers, those whose update of an element depends on that element's history alone.
_ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_local(
    make: Make,
    parameters: Sequence[nn.Parameter],
    held: Mapping[nn.Parameter, Sequence[nn.Parameter]],
    *,
    in_parts: bool,
) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of `parameters`, with each replaced by what is `held` of it.

    `in_parts`: what is held may be a part, so the optimizer must be one that works element by element.
    """
    # Torch makes no optimizer of nothing, which is what a stage of frozen layers has: it gets a stand-in.
    optimizer = make(parameters or [nn.Parameter(torch.zeros(1))])
    if in_parts:
        _check_elementwise(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in held.get(p, ())]
    optimizer.state.clear()
    return optimizer


def works_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own that treat every element alike."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if not works_by_element(optimizer) and not getattr(optimizer, "elementwise", False):
        raise UserError(
            f"optimizer {name} with zero=1 or more: each rank updates flat parts of parameters, which is "
            "right only for optimizers that treat every element alike; use one of torch's "
            f"{', '.join(_ELEMENTWISE)}, set `elementwise = True` on yours if it is one, or zero=0"
        )
