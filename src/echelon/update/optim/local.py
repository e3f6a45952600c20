"""The user's optimizer over the parts of parameters that this rank holds.

The user's function gets the model's own parameters, so that rules like "decay matrices, not vectors" work.
Then each parameter in the optimizer's groups is replaced by what this rank updates of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from echelon.update.optim.first_state import FirstStates, first_state
from echelon.update.optim.state_forms import inner_optimizers

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_local(
    make: Make,
    parameters: Sequence[nn.Parameter],
    held: Mapping[nn.Parameter, Sequence[nn.Parameter]],
) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of `parameters`, each replaced by the parts that are `held` of it."""
    optimizer = make_whole(make, parameters)
    states = _first_states(optimizer, held)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in held.get(p, ())]
    optimizer.state.clear()
    states.replaced = frozenset(p for p in own if not any(part is p for part in held.get(p, ())))
    if states.first or states.replaced:
        _keep_states(optimizer, states)
    return optimizer


def _keep_states(optimizer: torch.optim.Optimizer, states: FirstStates) -> None:
    """Let an optimizer have its state there, also after `load_state_dict`."""

    def take(*_: object) -> None:
        if optimizer.state is not states:
            states.take(optimizer.state)
        for each in (optimizer, *inner_optimizers(optimizer)):
            each.state = states

    take()
    if hasattr(optimizer, "register_load_state_dict_post_hook"):
        optimizer.register_load_state_dict_post_hook(take)


def _first_states(
    optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, Sequence[nn.Parameter]]
) -> FirstStates:
    """Of all parts, where the optimizer has made state of whole parameters already."""
    states = FirstStates()
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            for whole, part in ((p, part) for p in group["params"] for part in held.get(p, ())):
                first = first_state(each, group, whole, part)
                if first is not None:
                    states.first[part] = first
    return states


def make_whole(make: Make, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of whole parameters.

    torch refuses an optimizer without parameters, which a stage of frozen layers has. It gets placeholders: a
    function may take matrices and vectors apart.
    """
    return make(parameters or [nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))])
