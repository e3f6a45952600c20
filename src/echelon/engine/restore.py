"""A model that was split over ranks, put together again when its engine closes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.ownership import StateNames


@torch.no_grad()
def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], names: StateNames) -> None:
    """Give every parameter and buffer of `weights` its place in the model, tied ones together.

    A parameter that is still there keeps its identity, whatever memory it had.
    """
    whole: dict[str, nn.Parameter] = {}
    for name, tensor in weights.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if name not in names.parameters:
            if isinstance(tensor, Tensor) and attribute in module._buffers:
                module._buffers[attribute] = tensor
            continue
        first = names.parameters[name]
        if first not in whole:
            whole[first] = _parameter(module._parameters.get(attribute), tensor, first in names.trained)
        module._parameters[attribute] = whole[first]


def _parameter(current: nn.Parameter | None, tensor: Tensor, is_trained: bool) -> nn.Parameter:
    if current is None or current.shape != tensor.shape:
        return nn.Parameter(tensor, requires_grad=is_trained)
    current.data = tensor
    return current
