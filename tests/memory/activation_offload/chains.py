"""Layers in a row whose activations are offloaded, without an engine."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.collectives.boundary import FETCH, STORE, PretendedBoundary
from echelon.memory.activation_offload.offload import ActivationOffload, OffloadedLayer
from echelon.memory.activation_offload.offloaded_storage import HostPool
from echelon.memory.storages import weight_storages
from echelon.nn.wrapping import Wrapping


class Function(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Chain:
    """`free`: how many bytes the host has left."""

    def __init__(self, *layers: nn.Module, free: int | Callable[[], int] | None = None) -> None:
        self.layers, self.ledger, self.wrapping = layers, Ledger(), Wrapping()
        boundary = PretendedBoundary(self.ledger)
        pool = HostPool(boundary, free if callable(free) else lambda: free)
        self.offload = ActivationOffload(boundary, self.ledger, torch.device("cpu"), pool)
        for layer in layers:
            weights = partial(weight_storages, list(layer.modules()))
            self.wrapping.wrap(OffloadedLayer(layer, self.offload, weights))

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        """A forward pass of a microbatch, and its S."""
        with self.offload.passing((0, number), [x]):
            for layer in self.layers:
                x = layer(x)
        self.offload.store((0, number))
        return x

    def fetch(self, number: int = 0) -> None:
        self.offload.fetch((0, number))

    def bytes_out(self) -> int:
        return self.ledger.total("host", STORE, "activations").sent

    def bytes_in(self) -> int:
        return self.ledger.total("host", FETCH, "activations").received

    @property
    def is_idle(self) -> bool:
        """Whether all host memory was given back."""
        pool = self.offload.pool
        return sum(map(len, pool._idle.values())) == len(pool.pieces)


def gradients(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Those of all weights and the input, in plain torch."""
    x = x.detach().requires_grad_()
    y = x
    for layer in layers:
        y = layer(y)
    return list(
        torch.autograd.grad(y.square().sum(), [x, *(p for each in layers for p in each.parameters())])
    )
