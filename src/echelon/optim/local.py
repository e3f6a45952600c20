"""The user's optimizer over the parts of parameters that this rank holds.

The user's function gets the model's own parameters, so that rules like "decay matrices, not vectors" work.
Then each parameter in the optimizer's groups is replaced by the parts that this rank holds. Parts are flat,
which is right only for optimizers that treat every element alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from echelon.errors import UserError

# The optimizers of torch whose update of an element depends only on the history of that element.
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
    """The optimizer that `make` makes of `parameters`, each replaced by the parts that are `held` of it.

    `in_parts`: the optimizer must work element by element, because a part may not be the whole parameter.
    """
    # torch refuses an optimizer without parameters, which a stage of frozen layers has: it gets a
    # placeholder.
    optimizer = make(parameters or [nn.Parameter(torch.zeros(1))])
    if in_parts:
        _check_elementwise(optimizer)
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in held.get(p, ())]
    optimizer.state.clear()
    return optimizer


def works_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of torch's own that treat every element alike."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if not works_by_element(optimizer) and not getattr(optimizer, "elementwise", False):
        raise UserError(
            f"optimizer {name} with zero=1 or more: each rank updates flat parts of parameters, which is "
            "right only for optimizers that treat every element alike; use one of torch's "
            f"{', '.join(_ELEMENTWISE)}, set `elementwise = True` on yours if it is one, or use "
            "zero=0 without shard"
        )
