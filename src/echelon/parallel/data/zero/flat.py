"""One unit in flat memory: its weights in one buffer, of which each rank owns one part of equal size.

    flat     | query | key | value | output … | padding |      whole weights; parameters are views into it
    parts    |     rank 0    |     rank 1     |  rank 2  …     equal parts; `shard` is this rank's
    gradient                 the same layout; gradients land in it and it is what is reduced

Parameters and parts begin at multiples of 256 bytes, in both buffers. Padding fills the gaps and the last
parts. It is zeros and never part of a parameter, so no norm and no state ever sees it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.collectives.boundary import HostBoundary
from echelon.collectives.buffer_layout import block_size, lay_out, round_up
from echelon.collectives.fingerprint import device_fingerprint
from echelon.errors import UserError
from echelon.parallel.data.buckets import (
    Bucket,
    GradientKind,
    GradientMemory,
    NewMemory,
    PreallocatedMemory,
    gradient_dtype,
)
from echelon.parallel.data.zero.comings import Comings, lost_change
from echelon.parallel.data.zero.host_weights import HostRun, HostWeights
from echelon.parallel.data.zero.weight_access import FreedParameter, register_owner
from echelon.state.ownership import LocalParameter


class UnitMemory(NamedTuple):
    """Where whole gradients of units lie until they are summed, and the parts that are then added."""

    gradients: GradientMemory
    parts: GradientMemory

    @classmethod
    def preallocated(cls, units: Sequence["FlatUnit"]) -> "UnitMemory":
        """Memory that fits any of these units, whichever comes first."""
        wholes = [(unit.flat.numel(), unit.gradient_kind) for unit in units]
        parts = [(unit.shard.numel(), unit.gradient_kind) for unit in units]
        return cls(PreallocatedMemory(wholes), PreallocatedMemory(parts, at_once=0))

    def storages(self) -> list[Tensor]:
        return [*self.gradients.storages(), *self.parts.storages()]


class FlatUnit:
    """The memory of one unit's parameters, all of one type, and all trainable or all frozen.

    `resident`: the whole weights stay in memory and the shard is a part of them; else they come and go.
    `boundary`: what stands lies in host memory, and is fetched from there: the shard, or the whole weights
    (`whole_on_host`), of which the shard then is a part.
    """

    def __init__(
        self,
        name: str,
        parameters: list[tuple[str, nn.Parameter]],
        group: Group,
        *,
        resident: bool,
        boundary: HostBoundary | None = None,
        whole_on_host: bool = False,
    ) -> None:
        self.name, self.parameters, self._group, self.resident = name, parameters, group, resident
        first = parameters[0][1]
        self.trainable = first.requires_grad
        self._gradient_dtype = gradient_dtype(first)
        block = block_size(first.dtype, self._gradient_dtype)
        layout = lay_out((parameter.numel() for _, parameter in parameters), block)
        self._part_size = round_up(-(-layout.size // group.size), block)
        self._layout = layout._replace(size=self._part_size * group.size)
        self.flat = torch.zeros(self._layout.size, dtype=first.dtype, device=first.device)
        self._weights: list[Tensor] = []  # each parameter's place in the buffer
        self._move_in()
        self._versions = self._current_versions()
        self.before_gather: Callable[[list[LocalParameter]], None] = lambda _: None
        self.on_read: Callable[[FlatUnit], None] | None = None  # may gather them, where all ranks do
        if not resident:
            for name, parameter in parameters:
                register_owner(parameter, name, self._read)
        # What has no elements can be read at any time.
        self._kinds = [(parameter, type(parameter)) for _, parameter in parameters if parameter.numel()]
        self._has_own_shard = not resident and not whole_on_host
        part = self._local_part(self.flat)
        self.shard = part.clone() if self._has_own_shard else part
        standing = self.shard if self._has_own_shard else self.flat
        self.host = None if boundary is None else HostWeights(standing, boundary)
        self.is_gathered = True  # or on the way
        self._gathering: Handle | None = None
        self._is_fetching = False  # from host memory, for a gather
        self.on_store: Callable[[FlatUnit], None] | None = None  # drops it some time after a store
        self._gradient: Bucket | None = None  # whole, of this rank's samples
        self.memory = UnitMemory(NewMemory(), NewMemory())
        self.part: Tensor | None = None  # this rank's part of the sum over ranks
        self.has_part = False  # in this step
        self._local = list(self._runs())
        # Runs that a pass has changed, which no version tells of; None where nobody looks any more.
        self._changed_runs: list[Tensor] | None = None if resident else []
        self._shown: list[Tensor] = []  # fingerprints of runs that have no other memory on the device
        self._is_updated = False  # in the backward pass of this step

    @property
    def comings(self) -> Comings:
        """What of the plan lets the whole weights come and go."""
        return Comings(gathers=self._has_own_shard, fetches=self.host is not None)

    def local_parameters(self) -> list[LocalParameter]:
        """This rank's run of each parameter that its part touches, as memory an optimizer can update."""
        return self._local

    def _runs(self) -> Iterator[LocalParameter]:
        start = self._part_size * self._group.rank
        for (name, parameter), (begin, end) in zip(self.parameters, self._layout.places, strict=True):
            low, high = max(begin, start), min(end, start + self._part_size)
            if low < high:
                elements = self.shard[low - start : high - start]
                # Where nobody divides it, a parameter has its shape.
                part = elements.view(parameter.shape) if self._group.size == 1 else elements
                run = nn.Parameter(part, requires_grad=self.trainable)
                if self.trainable:
                    run.grad_dtype = self._gradient_dtype
                yield LocalParameter(name, parameter, run, low - begin)

    # Weights.

    def gather(self) -> None:
        """Begin to make the weights whole, unless they are or are on the way. A shard in host memory is
        fetched by the first call, and gathered by the next one, or by `synchronize`."""
        if not self.is_gathered:
            self.is_gathered = True
            if self.host is None:
                self._gather_shards()
            else:
                self._fetch_standing(self.host)
                self._is_fetching = True
        elif self._is_fetching and self._has_own_shard:
            self._finish_fetch()

    def _fetch_standing(self, host: HostWeights) -> None:
        if not host.is_here:
            self.before_gather(self._local)
        host.fetch()

    def _gather_shards(self) -> None:
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.all_gather()

    def _finish_fetch(self) -> None:
        assert self.host is not None
        self.host.wait()
        self._is_fetching = False
        if self._has_own_shard:
            self._gather_shards()

    def all_gather(self) -> None:
        """Begin to bring every rank's part to every rank."""
        self.before_gather(self._local)
        self._gathering = self._group.all_gather(self.flat, self.shard, wait=False)

    def synchronize(self) -> None:
        """Return when the weights that are on the way are there."""
        was_fetching = self._is_fetching
        if was_fetching:
            self._finish_fetch()
        was_gathering = self._gathering is not None
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self.host is not None and self._has_own_shard:
                self.host.drop()
        if (was_fetching or was_gathering) and not self.resident:
            self._show_weights()

    def free(self) -> None:
        """Give the memory of the whole weights back; the shard stays, here or in host memory."""
        if self.resident or not self.is_gathered:
            return
        if self._is_fetching and self._has_own_shard:  # its messages have not begun
            self._is_fetching = False
        else:
            self.synchronize()
            self._hide_weights()
            if self.host is None or self._has_own_shard:
                self.flat.untyped_storage().resize_(0)
        self.is_gathered = False
        self._let_go()

    # What stands in host memory.

    def fetch(self) -> None:
        """Begin to bring what is updated here, ahead of `bring`."""
        if self.host is not None and not (self._has_own_shard and self.is_gathered):
            self._fetch_standing(self.host)

    def bring(self) -> None:
        """Return when what this rank updates is here."""
        if self.host is not None:
            if self.is_gathered:
                self.synchronize()
            self._fetch_standing(self.host)
            self.host.wait()

    def put_back(self) -> None:
        """What this rank updates is new: bring it to the host, whole if it is whole there."""
        if self.host is None:
            return
        if not self._has_own_shard and self._group.size > 1:
            self._group.all_gather(self.flat, self.shard)
        self.host.store()
        if self._has_own_shard or not self.is_gathered:
            self._let_go()

    def _let_go(self) -> None:
        """What lies in host memory is needed here no more: it goes, now or when its store is done."""
        if self.host is not None:
            if self.host.is_storing and self.on_store is not None:
                self.on_store(self)
            else:
                self.host.drop()

    def drop(self) -> None:
        """Give the device's memory back of what lies in host memory, unless it is in use again."""
        in_use = self._is_fetching if self._has_own_shard else self.is_gathered
        if self.host is not None and not in_use:
            self.host.drop()

    def standing(self, local: LocalParameter) -> Tensor:
        """The values of one run, wherever they stand."""
        if self.host is None:
            return local.tensor.detach()
        begin = local.tensor.storage_offset() - self.host.tensor.storage_offset()
        return self.host.values[begin : begin + local.tensor.numel()].view(local.tensor.shape)

    def host_run(self, local: LocalParameter) -> HostRun | None:
        """Where a run stands in host memory, if it does."""
        return None if self.host is None else HostRun(self.host, local)

    def _show_weights(self) -> None:
        """The weights are there: parameters are views of them."""
        for parameter, kind in self._kinds:
            parameter.__class__ = kind
        for (_, parameter), view in zip(self.parameters, self._weights, strict=True):
            parameter.data = view
        self._set_versions(self._versions)
        if self._changed_runs is not None and self.host is not None:
            self._shown = [device_fingerprint(run) for run in self._gathered_runs()]

    def _hide_weights(self) -> None:
        """Whoever reads a weight asks `on_read`. What autograd reads by itself is of another version than it
        has saved, and torch raises; where it does not look, it finds not-a-number."""
        self._check_unchanged()
        self._note_changed_runs()
        has_nan = self.flat.is_floating_point() or self.flat.is_complex()
        nothing = self.flat.new_full((), float("nan") if has_nan else 0)
        for _, parameter in self.parameters:
            parameter.data = nothing.expand(parameter.shape)
        self._set_versions([version + 1 for version in self._versions])
        for parameter, _ in self._kinds:
            parameter.__class__ = FreedParameter

    def _read(self, name: str) -> None:
        """Somebody reads a weight that is freed, or on its way."""
        if self.on_read is not None:
            self.on_read(self)
        self.synchronize()
        if not self.is_gathered:
            where = "with zero=3 each rank holds a part of it"
            if self.host is not None:
                where = "with offload=parameters it lies in host memory"
            raise UserError(
                f"{name} has no values on this rank: {where}, and it is whole only during a step; "
                "engine.full_state_dict() returns all weights whole, and engine.close() puts the model "
                "together"
            )

    def _check_unchanged(self) -> None:
        """A write to whole weights would be lost when they are freed."""
        current = self._current_versions()
        places = zip(self.parameters, current, self._versions, self._weights, strict=True)
        names = [name for (name, p), now, before, view in places if now != before or not _lies_at(p, view)]
        if names:
            self._versions = current
            for (_, parameter), view in zip(self.parameters, self._weights, strict=True):
                parameter.data = view
            raise lost_change(names, self.comings)

    def _note_changed_runs(self) -> None:
        """Compare this rank's part with its shard, or with what was shown, without a wait for the device."""
        if self._changed_runs is not None and not self._is_updated:
            runs = self._gathered_runs()
            if self.host is None:
                pairs = zip(runs, self._local, strict=True)
                flags = [_differs(run, local.tensor) for run, local in pairs]
            else:
                shown = zip(runs, self._shown, strict=bool(self._shown))
                flags = [(device_fingerprint(run) != before).any() for run, before in shown]
            before = self._changed_runs or flags
            self._changed_runs = [one | other for one, other in zip(before, flags, strict=True)]

    def _gathered_runs(self) -> list[Tensor]:
        """This rank's part of the whole weights, as runs."""
        part = self._local_part(self.flat)
        return [self._run_in(part, local) for local in self._local]

    def start_update(self) -> None:
        """In a backward pass: from now on, whole weights may be those of before."""
        if self.is_gathered and self._changed_runs is not None:
            self.synchronize()
            self._note_changed_runs()
        self._is_updated = True

    def forget_changes(self) -> None:
        """A step begins: what earlier passes have changed is gone with them."""
        self._is_updated = False
        if self._changed_runs is not None:
            self._changed_runs = []

    def end_watch(self) -> list[str]:
        """Weights of which a pass has changed this rank's part. Reads the device; compares no more."""
        if self.is_gathered:
            self.synchronize()
            self._note_changed_runs()
        flags, self._changed_runs = self._changed_runs or [], None
        return [local.name for local, flag in zip(self._local, flags, strict=bool(flags)) if flag]

    def _current_versions(self) -> list[int]:
        return [parameter._version for _, parameter in self.parameters]

    def _set_versions(self, versions: list[int]) -> None:
        parameters = tuple(parameter for _, parameter in self.parameters)
        torch._C._autograd._unsafe_set_version_counter(parameters, tuple(versions))

    def mark_updated(self) -> None:
        """This unit was updated in a backward pass: torch refuses to go on with what it has saved of it."""
        self._versions = [version + 1 for version in self._current_versions()]
        if self.is_gathered:
            self._set_versions(self._versions)

    def reallocate(self) -> None:
        """Move to new memory; whoever has a view of the old keeps that."""
        self.flat = self.flat.clone()
        self._weights = []
        for (_, parameter), (begin, end) in zip(self.parameters, self._layout.places, strict=True):
            parameter.data = self.flat[begin:end].view(parameter.shape)
            self._weights.append(parameter.data)
        start = int(self.shard.storage_offset())
        self.shard = self._local_part(self.flat)
        for local in self._local:
            first = int(local.tensor.storage_offset()) - start
            local.tensor.data = self.shard[first : first + local.tensor.numel()].view(local.tensor.shape)

    @torch.no_grad()
    def move_back(self) -> None:
        """Somebody has given parameters other memory: their values come into the buffer again."""
        for (_, parameter), view in zip(self.parameters, self._weights, strict=True):
            if not _lies_at(parameter, view):
                view.copy_(parameter)
                parameter.data = view

    # Gradients.

    @property
    def gradient_kind(self) -> GradientKind:
        return GradientKind(self._gradient_dtype, self.flat.device)

    @property
    def gradient(self) -> Tensor | None:
        """The memory of the whole gradient, while there is any."""
        return None if self._gradient is None else self._gradient.buffer

    def accumulate(self, parameter: nn.Parameter) -> None:
        """A parameter has got a gradient: it moves to its place in the buffer, which takes memory here."""
        self._bucket().accumulate(parameter)

    def open_gradient(self) -> None:
        """Forget all gradients, but keep their memory."""
        self._bucket().open()

    def close_gradient(self) -> Tensor:
        """The whole gradient, complete."""
        return self._bucket().close()

    def take_gradient(self) -> Tensor:
        """The whole gradient, complete, which is then no longer the parameters'. Give its memory back."""
        gradient = self.close_gradient()
        self._gradient = None
        self._clear_gradients()
        return gradient

    def drop_gradient(self) -> None:
        if self._gradient is not None:
            self.memory.gradients.give_back(self._gradient.buffer)
        self._gradient = None
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter need not be asked
            for _, parameter in self.parameters:
                parameter.grad = None

    def _bucket(self) -> Bucket:
        if self._gradient is None:
            parameters = [parameter for _, parameter in self.parameters]
            self._gradient = Bucket(parameters, self._gradient_dtype, self._layout, self.memory.gradients)
        return self._gradient

    def adopt(self, gradient: Tensor) -> bool:
        """Make a whole gradient this rank's part, which it is where nobody divides the unit."""
        if self._group.size > 1 or self.has_part or not isinstance(self.memory.gradients, NewMemory):
            return False
        self.part, self.has_part = gradient, True
        return True

    def new_part(self, *, in_place: bool) -> Tensor:
        """Where this rank's part of a reduced gradient goes: kept memory for the first of a step."""
        if in_place:
            assert self.gradient is not None
            self.part = self._local_part(self.gradient)
            self.has_part = True
            return self.part
        if self.part is None:
            self.part = torch.empty_like(self.shard, dtype=self._gradient_dtype)
        if self.has_part:
            return self.memory.parts.take(self.part.numel(), self.gradient_kind)
        self.has_part = True
        return self.part

    def add_part(self, part: Tensor) -> None:
        """A reduced part is there: add it to that of the step, unless it went there directly."""
        assert self.part is not None
        if part is not self.part:
            self.part.add_(part)
        self.drop_part(part)

    def drop_part(self, part: Tensor) -> None:
        """A reduced part is of no more use; that of the step keeps its memory."""
        if part is not self.part:
            self.memory.parts.give_back(part)

    def free_part(self) -> None:
        """The part of the gradient was used: give its memory back."""
        self.part = None
        self.has_part = False

    def part_of_gradient(self, local: LocalParameter) -> Tensor:
        """The gradient of one run."""
        assert self.part is not None
        return self._run_in(self.part, local)

    def _run_in(self, part: Tensor, local: LocalParameter) -> Tensor:
        start = local.tensor.storage_offset() - self.shard.storage_offset()
        return part[start : start + local.tensor.numel()].view(local.tensor.shape)

    def _local_part(self, buffer: Tensor) -> Tensor:
        return buffer.view(self._group.size, self._part_size)[self._group.rank]

    def _move_in(self) -> None:
        """Copy every parameter into the buffer and make it a view of its place there."""
        for (_, parameter), (begin, end) in zip(self.parameters, self._layout.places, strict=True):
            place = self.flat[begin:end].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
            self._weights.append(place)


def _lies_at(parameter: Tensor, view: Tensor) -> bool:
    """Whether nobody has given the parameter other memory."""
    return parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride()


@torch.no_grad()
def _differs(run: Tensor, other: Tensor) -> Tensor:
    return ~torch.isclose(run, other, rtol=0, atol=0, equal_nan=True).all()
