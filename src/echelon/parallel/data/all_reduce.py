"""Data parallelism by all-reduce (DDP): ranks hold everything and sum their gradients, group by group.

`AllReduce`: the groups are buckets. A bucket's all-reduce starts as soon as the last microbatch's backward
pass has completed it, while the backward pass goes on. Earlier microbatches only accumulate: one
synchronisation per step.

`UnitAllReduce` (update=backward, zero=0): the groups are units, which are updated in the backward pass.

    backward pass             | unit 3 | unit 2 | unit 1 | unit 0 |
    sum over ranks                     |   3    |   2    |   1    | 0 |      one at a time is in flight
    update, gradients freed                     |   3    |   2    | 1 | 0 |

So memory holds the gradients of one unit, and those of another in flight. A single replica has nothing to
sum: it updates a unit as soon as the backward pass has completed it.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence, Set
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from echelon.collectives import Handle
from echelon.parallel.data.buckets import (
    Bucket,
    UnitBucket,
    convert_gradients,
    fill_buckets,
    gradient_dtype,
)
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.reducer import Reducer, UsedParameters
from echelon.parallel.data.sharing import Sharing, Storages, local_gradients, whole_parameters
from echelon.parallel.data.zero.units import backward_order
from echelon.state.ownership import LocalParameter

# A bucket should be large enough that its latency is small, and there should be several to overlap.
BUCKET_BYTES = 25 * 2**20
_FEWEST_BUCKETS = 4

_IN_FLIGHT = 1  # units whose gradients may be summed while those of another are produced


class WholeGradients(Sharing):
    """Ranks that all hold whole gradients, and reduce groups of them as the backward pass completes them."""

    def __init__(self, parameter_set: ParameterSet, *, ordered: bool = True) -> None:
        super().__init__(parameter_set)
        self._group = parameter_set.group
        self._whole = whole_parameters(parameter_set)
        self._trained = [parameter for _, parameter in parameter_set.trained]
        self.reducer: Reducer = Reducer(self._trained, self._accumulate, self._complete, ordered=ordered)
        self.accumulation = self.reducer.accumulation
        self._is_order_learned = False

    @abstractmethod
    def _accumulate(self, parameter: nn.Parameter) -> None:
        """Move a new gradient to where it is reduced."""

    @abstractmethod
    def _complete(self, index: int) -> None:
        """Begin to sum the group with this index over ranks: all its gradients are there."""

    def local_parameters(self) -> list[LocalParameter]:
        return self._whole

    def start_backward(self, *, last: bool) -> None:
        self.reducer.start_backward(reducing=last)

    def finish_backward(self) -> None:
        self.reducer.flush()

    def close(self) -> None:
        self.reducer.close()
        super().close()

    def _part_for_norm(self, gradient: Tensor) -> Tensor:
        # Every rank has every gradient: each takes one part of each, and reads 1/N of the memory.
        return gradient.flatten().tensor_split(self._group.size)[self._group.rank]


class Bucketed(WholeGradients):
    """Gradients in buckets, which after the first step are filled again in the order in which they come."""

    def __init__(self, parameter_set: ParameterSet, bucket_bytes: int) -> None:
        super().__init__(parameter_set)
        total = sum(p.numel() * gradient_dtype(p).itemsize for p in self._trained)
        self._bucket_bytes = min(bucket_bytes, max(2**20, total // _FEWEST_BUCKETS))
        self._buckets: list[Bucket] = []
        self._fill(list(reversed(self._trained)))

    @abstractmethod
    def _start_sum(self, bucket: Bucket, *, overlaps: bool) -> None:
        """The bucket is complete: begin to sum it over ranks. `overlaps`: a backward pass goes on."""

    @abstractmethod
    def _finish_sums(self) -> None:
        """Return when all sums that were begun are done."""

    def start_step(self) -> None:
        super().start_step()
        self._finish_sums()  # what a step that failed half-way has left
        self.reducer.start_step()
        for bucket in self._buckets:
            bucket.open()

    def reduce(self) -> None:
        self.start_reductions()
        exchange = self.reducer.exchange_used(self._group)  # behind the gradients: ranks wait once for both
        self._finish_sums()
        used = exchange.wait()
        self.reducer.finish_step()
        for local in self.local_parameters():
            if local.parameter not in used:
                local.parameter.grad = None  # as on one device: the optimizer leaves it alone

    def publish(self) -> None:
        if not self._is_order_learned and self._whole:
            self._is_order_learned = True
            self._fill(self.reducer.agreed_order(self._group))

    def learned_order(self) -> list[str]:
        """The parameters, in the order of buckets, once it is that in which gradients come."""
        names = {parameter: name for name, parameter in self.parameter_set.trained}
        return [names[p] for bucket in self._buckets for p in bucket.views] if self._is_order_learned else []

    def restore_order(self, names: Sequence[str]) -> None:
        """Begin with an order that was learned before, if it is one of these parameters."""
        trained = dict(self.parameter_set.trained)
        if trained.keys() == set(names) and names:
            self._is_order_learned = True
            self._fill([trained[name] for name in names])

    def _gradient_buffers(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self._buckets]

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self._bucket_of[parameter].accumulate(parameter)

    def _complete(self, index: int) -> None:
        bucket = self._buckets[index]
        bucket.close()
        self._start_sum(bucket, overlaps=self.reducer.overlaps(index))

    def _fill(self, order: list[nn.Parameter]) -> None:
        for parameter in order:
            parameter.grad = None  # lets go of the earlier buckets
        self._buckets = []  # before the new ones take memory
        self._buckets = fill_buckets(order, self._bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self.reducer.regroup([list(bucket.views) for bucket in self._buckets])


@final
class AllReduce(Bucketed):
    """Ranks that sum their gradients, and each update everything."""

    def __init__(self, parameter_set: ParameterSet, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._sums: list[Handle] = []
        super().__init__(parameter_set, bucket_bytes)

    def norm_share(self) -> list[Tensor]:
        gradients = self._gradient_buffers()
        uncounted = self.parameter_set.uncounted
        # A hook of the user, or a sum with other ranks, may have given a parameter another gradient since.
        moved = any(p.grad is not None and p.grad is not b.views[p] for b in self._buckets for p in b.views)
        if uncounted or moved:
            gradients = local_gradients(self._whole, uncounted)
        return [self._part_for_norm(gradient) for gradient in gradients]

    def storages(self) -> Storages:
        return Storages(list(self.parameter_set.parameters.values()), self._gradient_buffers())

    def _start_sum(self, bucket: Bucket, *, overlaps: bool) -> None:
        with self._group.ledger.about("gradients"):
            self._sums.append(self._group.all_reduce(bucket.buffer, wait=False, overlaps=overlaps))

    def _finish_sums(self) -> None:
        for handle in self._sums:
            handle.wait()
        self._sums = []


class _UnitSum(NamedTuple):
    """The sum of a unit's gradients in flight, and the exchange of which of them any rank has."""

    unit: UnitBucket
    handle: Handle
    used: UsedParameters


@final
class UnitAllReduce(WholeGradients):
    """Ranks that sum and use the gradients of one unit after the other."""

    def __init__(self, parameter_set: ParameterSet, *, waits: bool = True) -> None:
        """`waits`: a backward pass may wait for sums, since all ranks are in the same one."""
        # A single replica sends no messages: it need not keep to an order.
        self._is_single = parameter_set.group.size == 1
        super().__init__(parameter_set, ordered=not self._is_single)
        self._waits = waits
        self._local_of = {local.parameter: local for local in self._whole}
        self._sums: deque[_UnitSum] = deque()
        self._order([UnitBucket(each, gradient_dtype(each[0])) for each in _units(parameter_set)])

    def start_step(self) -> None:
        super().start_step()
        while self._sums:  # what a step that failed half-way has left
            _, handle, used = self._sums.popleft()
            handle.wait()
            used.wait()
        self.reducer.start_step()
        for unit in self._units:
            unit.drop()

    def keep_products(self, used_once: Set[Tensor]) -> None:
        if not self._is_single:
            super().keep_products(used_once)
        elif self.updates_products:  # as they are; so are sums over other ranks made of some later on
            super().keep_products(used_once - self.parameter_set.summed_later)

    def start_backward(self, *, last: bool) -> None:
        self._convert_gradients()
        super().start_backward(last=last)

    def start_early_backward(self) -> None:
        self._convert_gradients()
        super().start_early_backward()

    def _convert_gradients(self) -> None:
        if self._is_single:  # no buffer of their own: autograd adds to them
            convert_gradients(self._kept)

    def reduce(self) -> None:
        self.start_reductions()
        self._finish(0)
        self.reducer.finish_step()

    def publish(self) -> None:
        for local in self._whole:
            local.tensor.grad = None
        if not self._is_order_learned and self._whole:
            self._is_order_learned = True
            self._order([self._units[place] for place in self.reducer.agreed_group_order(self._group)])

    def storages(self) -> Storages:
        buffers = [unit.buffer for unit in self._units if unit.buffer is not None]
        gradients = local_gradients(self._whole)
        return Storages(list(self.parameter_set.parameters.values()), [*buffers, *gradients])

    def _norm_share(self, local: Sequence[LocalParameter]) -> list[Tensor]:
        gradients = super()._norm_share(local)
        return gradients if self._is_single else [self._part_for_norm(each) for each in gradients]

    def _order(self, units: list[UnitBucket]) -> None:
        """From the next backward pass on, units are summed in this order, on every rank."""
        self._units = units
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        self.reducer.regroup([unit.parameters for unit in units])

    def _accumulate(self, parameter: nn.Parameter) -> None:
        if not self._is_single:
            self._unit_of[parameter].accumulate(parameter)

    def _complete(self, index: int) -> None:
        unit = self._units[index]
        if self._is_single:
            self._use(unit)
            return
        with self._group.ledger.about("gradients"):
            handle = self._group.all_reduce(unit.close(), wait=False)
        self._sums.append(_UnitSum(unit, handle, self.reducer.exchange_used(self._group, unit.parameters)))
        if self._waits:
            self._finish(_IN_FLIGHT)

    def _finish(self, at_most: int) -> None:
        """Wait until `at_most` sums are in flight, and use the others."""
        while len(self._sums) > at_most:
            unit, handle, exchange = self._sums.popleft()
            handle.wait()
            used = exchange.wait()
            for parameter in unit.parameters:
                if parameter not in used:
                    parameter.grad = None  # as on one device: the optimizer leaves it alone
            self._use(unit)

    def _use(self, unit: UnitBucket) -> None:
        self._use_unit([self._local_of[parameter] for parameter in unit.parameters])
        unit.free()
        # Autograd may have saved the old weights for a later part of this pass: torch refuses to go on with
        # a tensor whose version has changed.
        increment_version(unit.parameters)


def _units(parameter_set: ParameterSet) -> list[list[nn.Parameter]]:
    """The trained parameters of each unit, by type, in the order in which a backward pass completes them."""
    order = backward_order(parameter_set.units)
    kinds: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for index, unit in enumerate(parameter_set.units):
        for _, parameter in unit.parameters:
            if parameter.requires_grad:
                kind = (index, gradient_dtype(parameter), parameter.device)
                kinds.setdefault(kind, []).append(parameter)
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: order.index(kind[0]))]
