"""A copy of a model without the memory of its weights: its modules, forwards and attributes as they were
before it was split over ranks. What runs it gives it whole weights first.
"""

import copy
from typing import Any

from torch import nn


def make_skeleton(model: nn.Module) -> nn.Module | str:
    """A copy of `model` whose parameters are on the meta device, tied as there; or why there is none.

    Buffers are copied, with their values. Wrapping of forwards is copied too.
    """
    memo: dict[int, Any] = {}
    try:
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        return copy.deepcopy(model, memo)
    except Exception as error:  # of tensors of other kinds, and of whatever the model keeps as an attribute
        return f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}"
