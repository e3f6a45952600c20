"""Optimizers whose update of an element needs sums over rows, columns or all of its tensor.

A subclass sees each parameter as boxes of the whole one, and keeps its statistics whole, on every rank that
holds a part. A rank adds up what it has, part by part, in its place:

    whole 3 × 4      rank 0      rank 1            sums of rows, over both
    a a a a          a a a a                       4a
    a a b b          a a         b b        →      2a + 2b
    b b b b                      b b b b           4b

All statistics lie in one buffer, so that one message serves all parameters. Ranks lay it out alike: also for
parameters of which they hold nothing, whose zeros change no sum and no maximum of squares. Scale and skip
flag come on the device, by the protocol of torch's GradScaler: an update reads nothing from there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group, Reduction
from echelon.errors import UserError
from echelon.update.optim.needs import Need

Shape = tuple[int, ...]
Box = tuple[slice, ...]


def whole_box(dims: Sized) -> Box:
    """All of a parameter that has so many dims."""
    return (slice(None),) * len(dims)


def inside(statistic: Tensor, box: Box) -> Tensor:
    """Return the part of a statistic that a box has; it has one value along dims that it is a sum over."""
    if box == whole_box(box):
        return statistic
    sizes = zip(box, statistic.shape, strict=True)
    return statistic[tuple(indices if size > 1 else slice(None) for indices, size in sizes)]


class Part(NamedTuple):
    """The part of a whole parameter that one tensor, which an optimizer updates, is. `views` are those of a
    tensor like it (its gradient, say): one for each of the `boxes`, in its shape."""

    number: int  # of the parameter, in its Exchange
    boxes: Sequence[Box]
    views: Callable[[Tensor], list[Tensor]]


class Round(NamedTuple):
    """The ranks of `group` hold other parts of the first `num_parameters`, but for the first `skipped`."""

    group: Group
    num_parameters: int
    skipped: int = 0


class Exchange(NamedTuple):
    """Whole parameters in an order that all ranks share, and what this rank has of them."""

    shapes: Sequence[Shape]
    parts: Mapping[Tensor, Part]
    rounds: Sequence[Round]
    dtype: torch.dtype  # of statistics
    device: torch.device


def without_ranks(parameters: Iterable[Tensor]) -> list[Exchange]:
    """Exchanges of parameters that are whole here, one for each device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        kinds.setdefault((parameter.device, dtype), []).append(parameter)
    return [
        Exchange(
            [tuple(p.shape) for p in of_kind],
            {p: Part(index, [whole_box(p.shape)], lambda t: [t]) for index, p in enumerate(of_kind)},
            (),
            dtype,
            device,
        )
        for (device, dtype), of_kind in kinds.items()
    ]


@final
class StatisticsBuffer:
    """Statistics of all parameters of an exchange, in one memory; `shapes` says which a parameter has."""

    def __init__(self, exchange: Exchange, shapes: Callable[[Shape], list[Shape]]) -> None:
        self._rounds = exchange.rounds
        wanted = [shapes(whole) for whole in exchange.shapes]
        sizes = [prod(shape) for of_one in wanted for shape in of_one]
        self.memory = torch.zeros(sum(sizes), dtype=exchange.dtype, device=exchange.device)
        views = iter(self.memory.split(sizes))
        self._views = [[next(views).view(shape) for shape in of_one] for of_one in wanted]
        self._ends = [0, *accumulate(sum(map(prod, of_one)) for of_one in wanted)]

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def __getitem__(self, index: int) -> list[Tensor]:
        return self._views[index]

    def reduce(self, op: Reduction) -> None:
        """Sums, or maxima, over the ranks that hold other parts."""
        for group, end, begin in self._rounds:
            with group.ledger.about("optimizer"):
                group.all_reduce(self.memory[self._ends[begin] : self._ends[end]], op)


def in_turns(
    operation: Callable[[list[Tensor], list[Tensor]], None],
    targets: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
) -> None:
    """Combine values with targets in place, a parameter's one after the other: its boxes may share rows."""
    for in_turn, of_turn in zip(zip_longest(*targets), zip_longest(*values), strict=True):
        pairs = [pair for pair in zip(in_turn, of_turn, strict=True) if pair[0] is not None]
        operation([target for target, _ in pairs], [value for _, value in pairs])


ParamGroup = dict[str, Any]  # of parameters, with their options

# Bytes of gradients at a time: what stays in the caches of a CPU; or enough work for the kernels of another
# device, and little beside all gradients.
_CPU_PORTION, _PORTION = 2**20, 64 * 2**20


class Entry(NamedTuple):
    """One parameter in an update: the boxes that are here, of its values and of its gradient."""

    part: Part
    shape: Shape  # of the whole parameter
    state: dict[str, Any]
    weights: list[Tensor]
    gradients: list[Tensor]


@final
@dataclass
class Work:
    """One update on one device: the parameters of each group that have gradients, one type at a time. `keep`
    is 1, or 0 on the device where the update must change nothing; all gradients are 0 then."""

    exchange: Exchange
    buffers: dict[str, StatisticsBuffer] = field(default_factory=dict)
    groups: list[tuple[ParamGroup, list[Entry]]] = field(default_factory=list)
    keep: Tensor | None = None

    def kept(self, number: Any, dtype: torch.dtype = torch.float64) -> Any:
        """The number, or 0 where the update must change nothing: on the device then, in `dtype`."""
        if self.keep is not None:
            # A product would be not a number where the number is infinite.
            is_tensor = isinstance(number, Tensor)
            number = torch.where(self.keep.bool(), number, 0.0) if is_tensor else number * self.keep
        return number.to(dtype) if isinstance(number, Tensor) else number

    def drop_refused(self, updates: Sequence[Tensor]) -> None:
        """Zeros in place of `updates` where the update must change nothing: 0 / 0 may have been in them."""
        if self.keep is not None:
            is_refused = self.keep == 0
            for update in updates:
                update.masked_fill_(is_refused, 0.0)

    def buffer(self, name: str, shapes: Callable[[Shape], list[Shape]]) -> StatisticsBuffer:
        """Zeros for statistics of all parameters, in the same memory in every update."""
        if name in self.buffers:
            self.buffers[name].memory.zero_()
        else:
            self.buffers[name] = StatisticsBuffer(self.exchange, shapes)
        return self.buffers[name]


class SumOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that ranks can share, each with parts of parameters."""

    needs = Need.SUMS
    whole_state: frozenset[str] = frozenset()  # the names of its state that is not of single elements
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_work", [])
        vars(self).setdefault("uses_up_gradients", False)

    def share(self, exchange: Exchange) -> None:
        """From now on ranks update together, each what it has: all of them call `step` alike. An update may
        then leave anything in the memory of gradients."""
        self._work, self.uses_up_gradients = [Work(exchange)], True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._find_parameters()
        for work in self._work:
            work.groups = [
                (group, of_type)
                for group in self.param_groups
                for of_type in _by_type(self._entries(group, work))
            ]
            work.keep = self._apply_flags(work)
            self._update(work)
            work.groups = []
        return loss

    @abstractmethod
    def _update(self, work: Work) -> None:
        """Update the weights of all entries, and their state."""

    @abstractmethod
    def _new_state(
        self, group: ParamGroup, entry: Entry, tensor: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        """The state before the first update of `tensor`, the entry's parameter; statistics are of `dtype`."""

    def _find_parameters(self) -> None:
        """Find the parameters of the groups, which users may change between updates."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        known = {p for work in self._work for p in work.exchange.parts}
        if not self.uses_up_gradients and known != set(parameters):
            self._work = [Work(exchange) for exchange in without_ranks(parameters)]

    def _entries(self, group: ParamGroup, work: Work) -> Iterator[Entry]:
        for tensor in group["params"]:
            part = work.exchange.parts.get(tensor)
            if tensor.grad is None or part is None or not _has_elements(part, tensor):
                continue
            self.check(tensor, tensor.grad)
            state = self.state[tensor]
            weights, gradients = part.views(tensor.detach()), part.views(tensor.grad)
            entry = Entry(part, work.exchange.shapes[part.number], state, weights, gradients)
            if not state:
                state.update(self._new_state(group, entry, tensor, work.exchange.dtype))
            yield entry

    def state_forms(self, group: ParamGroup, tensor: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first update, in tensors of one element: types and devices."""
        self._find_parameters()
        work = next(work for work in self._work if tensor in work.exchange.parts)
        part = work.exchange.parts[tensor]
        shape = (1,) * len(work.exchange.shapes[part.number])
        small = torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        return self._new_state(group, Entry(part, shape, {}, [], []), small, work.exchange.dtype)

    def passes_over(self, tensor: Tensor) -> bool:
        """Return whether updates leave a parameter out, since all that is here of it is padding."""
        self._find_parameters()
        held = (work.exchange.parts.get(tensor) for work in self._work)
        return not any(part is not None and _has_elements(part, tensor) for part in held)

    def check(self, tensor: Tensor, gradient: Tensor) -> None:
        name = type(self).__name__
        if gradient.is_sparse:
            raise UserError(
                f"optimizer {name}: a parameter of shape {tuple(tensor.shape)} has a sparse gradient, and "
                f"{name} needs all of its elements; set sparse=False in the embedding, or use SparseAdam"
            )
        if tensor.is_complex():
            raise UserError(
                f"optimizer {name}: a parameter of shape {tuple(tensor.shape)} is complex; use real ones"
            )

    def _apply_flags(self, work: Work) -> Tensor | None:
        """Divide gradients by `grad_scale`; where `found_inf` is 1 they may be anything, and become 0."""
        gradients = [g for _, entries in work.groups for entry in entries for g in entry.gradients]
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if scale is not None and gradients:
            torch._foreach_div_(gradients, scale)
        if found_inf is None:
            return None
        is_refused = found_inf.bool()
        for gradient in gradients:
            gradient.masked_fill_(is_refused, 0.0)
        return 1 - found_inf.double()


def rate_of(group: ParamGroup, device: torch.device) -> float | Tensor:
    """The learning rate. One that is a tensor on the device stays there: to read it would wait."""
    rate = group["lr"]
    is_there = isinstance(rate, Tensor) and rate.device == device
    return rate.double().reshape(()) if is_there else float(rate)


def _has_elements(part: Part, tensor: Tensor) -> bool:
    return bool(part.boxes) and tensor.numel() > 0


def _by_type(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Divide entries by type: an update of parameters of one type must not depend on those of another."""
    by_type: dict[torch.dtype, list[Entry]] = {}
    for entry in entries:
        by_type.setdefault(entry.weights[0].dtype, []).append(entry)
    return list(by_type.values())


def portions(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries a few at a time, so that what an update computes from their gradients is never large."""
    portion: list[Entry] = []
    taken = 0
    for entry in entries:
        portion.append(entry)
        taken += sum(gradient.nbytes for gradient in entry.gradients)
        if taken >= (_CPU_PORTION if entry.gradients[0].is_cpu else _PORTION):
            yield portion
            portion, taken = [], 0
    if portion:
        yield portion
