"""Units that are updated in the backward pass, where every rank holds everything (update=backward, zero=0).

    backward pass             | unit 3 | unit 2 | unit 1 | unit 0 |
    sum over ranks                     |   3    |   2    |   1    | 0 |      one at a time is on its way
    update, gradients freed                     |   3    |   2    | 1 | 0 |

So memory holds the gradients of one unit, and those of another on their way. A single replica has nothing to
sum: it updates a unit as soon as the backward pass has completed it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from echelon.collectives import Handle
from echelon.parallel.data.buckets import Bucket
from echelon.parallel.data.grad_dtype import gradient_dtype
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.reducer import Reducer, UsedParameters
from echelon.parallel.data.sharing import Sharing, Storages, local_gradients, own_whole, whole_parameters
from echelon.parallel.data.zero.units import backward_order
from echelon.state.ownership import LocalParameter, OwnedSlice

_IN_FLIGHT = 1  # units whose gradients may be on their way while those of another are produced


class _Sum(NamedTuple):
    """A unit on its way: its gradients, and which of them any rank has."""

    unit: "_UnitGradients"
    handle: Handle
    used: UsedParameters


@final
class UnitAllReduce(Sharing):
    """Ranks that sum and use the gradients of one unit after the other."""

    def __init__(self, parameter_set: ParameterSet, *, waits: bool = True) -> None:
        """`waits`: a backward pass may wait for sums, since all ranks are in the same one."""
        super().__init__(parameter_set)
        self._group, self._waits = parameter_set.group, waits
        self._local = whole_parameters(parameter_set)
        self._local_of = {local.parameter: local for local in self._local}
        trained = list(self._local_of)
        # One replica talks to nobody: it need not keep to an order.
        is_single = self._group.size == 1
        self.reducer: Reducer = Reducer(trained, self._accumulate, self._reduce, ordered=not is_single)
        self.accumulation = self.reducer.accumulation
        self._on_the_way: deque[_Sum] = deque()
        self._order([_UnitGradients(each) for each in _units(parameter_set)])
        self._observed = False

    def local_parameters(self) -> list[LocalParameter]:
        return self._local

    def start_step(self) -> None:
        super().start_step()
        while self._on_the_way:  # what a step that failed half-way has left
            _, handle, used = self._on_the_way.popleft()
            handle.wait()
            used.wait()
        self.reducer.start_step()
        for unit in self._units:
            unit.drop()

    def start_backward(self, *, last: bool) -> None:
        self.reducer.start_backward(reducing=last)

    def finish_backward(self) -> None:
        self.reducer.flush()

    def reduce(self) -> None:
        self.start_reductions()
        self._finish(0)
        self.reducer.finish_step()

    def norm_share(self) -> list[Tensor]:
        return self._norm_share(self._local)

    def publish(self) -> None:
        for local in self._local:
            local.tensor.grad = None
        if not self._observed and self._local:
            self._observed = True
            last_first = [self._unit_of[p] for p in reversed(self.reducer.agreed_order(self._group))]
            self._order(list(reversed(dict.fromkeys(last_first))))

    def owned(self) -> list[OwnedSlice]:
        return own_whole(self.parameter_set)

    def storages(self) -> Storages:
        buffers = [unit.bucket.buffer for unit in self._units if unit.bucket is not None]
        gradients = local_gradients(self._local)
        return Storages(list(self.parameter_set.parameters.values()), [*buffers, *gradients])

    def close(self) -> None:
        self.reducer.close()
        super().close()

    def _norm_share(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        # Every rank has every gradient: each takes one part of each.
        gradients = super()._norm_share(local)
        if self._group.size == 1:
            return gradients
        return [each.flatten().tensor_split(self._group.size)[self._group.rank] for each in gradients]

    def _order(self, units: "list[_UnitGradients]") -> None:
        """From the next backward pass on, units are summed in this order, on every rank."""
        self._units = units
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        self.reducer.regroup([unit.parameters for unit in units])

    def _accumulate(self, parameter: nn.Parameter) -> None:
        if self._group.size > 1:
            self._unit_of[parameter].accumulate(parameter)

    def _reduce(self, index: int) -> None:
        """A unit is complete."""
        unit = self._units[index]
        if self._group.size == 1:
            self._use(unit)
            return
        with self._group.ledger.about("gradients"):
            handle = self._group.all_reduce(unit.close(), wait=False)
        self._on_the_way.append(_Sum(unit, handle, self.reducer.exchange_used(unit.parameters, self._group)))
        if self._waits:
            self._finish(_IN_FLIGHT)

    def _finish(self, at_most: int) -> None:
        """Wait until `at_most` units are on their way, and use the others."""
        while len(self._on_the_way) > at_most:
            unit, handle, exchange = self._on_the_way.popleft()
            handle.wait()
            used = exchange.wait()
            for parameter in unit.parameters:
                if parameter not in used:
                    parameter.grad = None  # as on one device: the optimizer leaves it alone
            self._use(unit)

    def _use(self, unit: "_UnitGradients") -> None:
        self._use_unit([self._local_of[parameter] for parameter in unit.parameters])
        unit.bucket = None
        increment_version(unit.parameters)  # torch refuses to go on with what it has saved of them


@final
class _UnitGradients:
    """The gradients of one unit, all of one type; in one buffer while they are to be summed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.bucket: Bucket | None = None

    def accumulate(self, parameter: nn.Parameter) -> None:
        self._open().accumulate(parameter)

    def close(self) -> Tensor:
        """The buffer, complete."""
        return self._open().close()

    def drop(self) -> None:
        self.bucket = None
        for parameter in self.parameters:
            parameter.grad = None

    def _open(self) -> Bucket:
        if self.bucket is None:
            self.bucket = Bucket(self.parameters, gradient_dtype(self.parameters[0]))
        return self.bucket


def _units(parameter_set: ParameterSet) -> list[list[nn.Parameter]]:
    """The trained parameters of each unit, by type, in the order in which a backward pass is expected to
    complete them."""
    order = backward_order(parameter_set.units)
    kinds: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for index, unit in enumerate(parameter_set.units):
        for _, parameter in unit.parameters:
            if parameter.requires_grad:
                kind = (index, gradient_dtype(parameter), parameter.device)
                kinds.setdefault(kind, []).append(parameter)
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: order.index(kind[0]))]
