"""What the process of replica 0 has beside its worker: the server, its memory and its connections."""

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.data_parallel.asynchronous.connection import Connection
from echelon.data_parallel.asynchronous.rates import Rates
from echelon.data_parallel.asynchronous.server import Server
from echelon.data_parallel.buckets import Bucket, fill_buckets
from echelon.data_parallel.sync import Storages
from echelon.optim.local import Make
from echelon.ownership import Held, Owned, own_state, whole_slice
from echelon.precision import Direct, Masters

_PATIENCE_SECONDS = 10.0  # with workers that are silent while this process ends

flat_buckets = partial(fill_buckets, limit=sys.maxsize)  # one for each type of numbers


@final
class Host:
    """Weights of their own, since the worker's must stay as it pulled them while others push."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        make: Make,
        stepper: type[Direct] | type[Masters],
        *,
        workers: int,
        staleness: float,
        clip: float | None,
        schedule: Callable[[int], float] | None,
    ) -> None:
        self._parameters = [p for _, p in named]
        self._weights = flat_buckets(self._parameters)
        held = _copy_into(self._weights, named)
        self._stepper = stepper(make, self._parameters, held, in_parts=False)
        self.optimizer = self._stepper.optimizer
        self.server = Server(
            self._weights,
            held,
            self._stepper,
            Rates(self.optimizer, schedule),
            workers=workers,
            staleness=staleness,
            clip=clip,
        )
        self._connections: list[Connection] = []

    def connect(self, group: dist.ProcessGroup) -> None:
        """Begin to serve the workers of other processes."""
        for worker in range(1, group.size()):
            inbox = flat_buckets(self._parameters)
            self._connections.append(Connection(self.server, group, worker, self._weights, inbox))
        for connection in self._connections:
            connection.start()
        atexit.register(_serve_on, weakref.ref(self.server))

    def owned(self) -> list[Owned]:
        """Weights and optimizer state, of which there is no second copy that counts."""
        owned = []
        for held, state in self.server.state():
            its = whole_slice(held.name, held.parameter, replicated=())
            owned.append(Owned(its, held.tensor.detach()))
            for key, value in state.items():
                owned += own_state(key, value, [its])
        return owned

    def storages(self) -> Storages:
        """The memory of weights and gradients beside the worker's."""
        boxes = [connection.storages() for connection in self._connections]
        weights = [bucket.buffer for bucket in self._weights]
        return Storages(
            weights + [tensor for outbox, _ in boxes for tensor in outbox],
            [tensor for _, inbox in boxes for tensor in inbox],
        )

    def optimizer_storages(self) -> list[Tensor]:
        state = [tensor for _, its in self.server.state() for tensor in its.values()]
        return state + self._stepper.masters()


def _copy_into(weights: list[Bucket], named: Sequence[tuple[str, nn.Parameter]]) -> list[Held]:
    """Copies of the parameters in the memory of `weights`, as something an optimizer can update."""
    views: dict[nn.Parameter, Tensor] = {}
    for bucket in weights:
        views |= bucket.views
    with torch.no_grad():
        for _, parameter in named:
            views[parameter].copy_(parameter)
    return [Held(name, p, nn.Parameter(views[p])) for name, p in named]


def _serve_on(reference: weakref.ref[Server]) -> None:
    """A server outlives its workers; its threads keep it alive as long as there are any.

    A thread that waits in Gloo also aborts the process if its peer goes away while the interpreter ends.
    """
    server = reference()
    if server is not None and getattr(sys, "last_value", None) is None:  # nobody comes after an exception
        server.linger(_PATIENCE_SECONDS)
