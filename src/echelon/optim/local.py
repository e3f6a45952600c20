"""The user's optimizer over the parts of parameters that this rank holds.

The user's function gets the model's own parameters, so that rules like "decay matrices, not vectors" work.
Then each parameter in the optimizer's groups is replaced by what this rank updates of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_local(
    make: Make,
    parameters: Sequence[nn.Parameter],
    held: Mapping[nn.Parameter, Sequence[nn.Parameter]],
) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of `parameters`, each replaced by the parts that are `held` of it."""
    optimizer = make_whole(make, parameters)
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in held.get(p, ())]
    optimizer.state.clear()
    return optimizer


def make_whole(make: Make, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of whole parameters.

    torch refuses an optimizer without parameters, which a stage of frozen layers has. It gets placeholders: a
    function may take matrices and vectors apart.
    """
    return make(parameters or [nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))])
