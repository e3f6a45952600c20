"""A layer whose saved tensors go to host memory when it has returned."""

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.memory.activation_offload.carrier import Carrier
from echelon.nn.wrapping import Wrapper


@final
class OffloadedLayer(Wrapper):
    """Says where a layer begins and ends. A copy of a model is called as if it were not there.

    `weights`: the storages of its parameters and buffers now.
    """

    entry: ClassVar[str] = "offload"

    def __init__(self, module: nn.Module, carrier: Carrier, weights: Callable[[], set[int]]) -> None:
        super().__init__(module)
        self._carrier: Carrier | None = carrier
        self._weights: Callable[[], set[int]] | None = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trip = None if self._carrier is None else self._carrier.trip
        if trip is None or self._weights is None or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        trip.enter_layer(self._weights() | _without_gradients((args, kwargs)))
        output = self.inner(*args, **kwargs)
        trip.leave_layer()
        return output

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_carrier": None, "_weights": None}


def _without_gradients(arguments: Any) -> set[int]:
    """Where the arguments lie that have no gradient: other layers have the same."""
    return {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.requires_grad
    }
