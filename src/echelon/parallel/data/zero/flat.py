"""One unit in flat memory: its weights in one buffer, of which each rank owns one part of equal size.

    flat     | query | key | value | output … | padding |      whole weights; parameters are views into it
    parts    |     rank 0    |     rank 1     |  rank 2  …     equal parts; `shard` is this rank's
    gradient                 the same layout; gradients land in it and it is what is reduced

Parameters and parts begin at multiples of 256 bytes, in both buffers. Padding fills the gaps and the last
parts. It is zeros and never part of a parameter, so no norm and no state ever sees it.

Units whose weights lie in host memory are `HostUnit`s (host_weights.py).
"""

from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.collectives.buffer_layout import block_size, lay_out, round_up
from echelon.errors import UserError
from echelon.parallel.data.buckets import gradient_dtype
from echelon.parallel.data.zero.gradient_sums import UnitGradient
from echelon.parallel.data.zero.weight_access import register_owner
from echelon.parallel.data.zero.weight_views import ChangedRuns, Placement, WeightViews
from echelon.state.ownership import LocalParameter


class UnitOwner:
    """The questions of a unit to the sharing that it belongs to. By itself, it has none."""

    def wait_for_weights(self, local: Sequence[LocalParameter]) -> None:
        """Return when new weights of these, which come from elsewhere (offload), are there."""

    def read_unit(self, unit: "FlatUnit") -> None:
        """A weight of a unit is read outside of its module: gather the unit, where all ranks do."""

    def store_unit(self, unit: "FlatUnit") -> None:
        """A unit's new weights are being copied to the host, and it is not in use: drop it, now or later."""
        unit.drop()


class FlatUnit:
    """The memory of one unit's parameters, all of one type, and all trainable or all frozen."""

    offloaded = False

    def __init__(
        self,
        name: str,
        parameters: list[tuple[str, nn.Parameter]],
        group: Group,
        *,
        sharded: bool,
        owner: UnitOwner | None = None,
    ) -> None:
        """`sharded`: between uses each rank of `group` holds its part alone; else all weights."""
        self.name, self.parameters, self.group, self.sharded = name, parameters, group, sharded
        self._owner = owner or UnitOwner()
        first = parameters[0][1]
        self.trainable = first.requires_grad
        dtype = gradient_dtype(first)
        block = block_size(first.dtype, dtype)
        layout = lay_out((parameter.numel() for _, parameter in parameters), block)
        self._part_size = round_up(-(-layout.size // group.size), block)
        self._layout = layout._replace(size=self._part_size * group.size)
        self.flat = torch.zeros(self._layout.size, dtype=first.dtype, device=first.device)
        self.placement = Placement(sharded, self.offloaded)
        self._views = WeightViews(parameters, self.flat, self._layout.places, self.placement)
        if not self.resident:
            for each, parameter in parameters:
                register_owner(parameter, each, self._read)
        part = self._local_part(self.flat)
        self.shard = part.clone() if sharded else part
        self._local = list(self._runs())
        self.gradient = UnitGradient([p for _, p in parameters], dtype, self._layout, group)
        self.is_gathered = True  # or on the way
        self._gathering: Handle | None = None
        is_here = sharded and not self.offloaded
        shards = [local.tensor for local in self._local] if is_here else None
        self._changes = ChangedRuns(shards, watches=not self.resident)

    @property
    def resident(self) -> bool:
        """Return whether the whole weights stay on the device."""
        return not self.sharded and not self.offloaded

    def local_parameters(self) -> list[LocalParameter]:
        """This rank's run of each parameter that its part touches, as memory an optimizer can update."""
        return self._local

    def _runs(self) -> Iterator[LocalParameter]:
        start = self._part_size * self.group.rank
        for (name, parameter), (begin, end) in zip(self.parameters, self._layout.places, strict=True):
            low, high = max(begin, start), min(end, start + self._part_size)
            if low < high:
                elements = self.shard[low - start : high - start]
                # On a single rank, a parameter keeps its shape: some optimizers treat matrices differently.
                part = elements.view(parameter.shape) if self.group.size == 1 else elements
                run = nn.Parameter(part, requires_grad=self.trainable)
                if self.trainable:
                    run.grad_dtype = gradient_dtype(parameter)
                yield LocalParameter(name, parameter, run, low - begin)

    def part_of_gradient(self, local: LocalParameter) -> Tensor:
        assert self.gradient.part is not None
        return self._run_in(self.gradient.part, local)

    def _run_in(self, part: Tensor, local: LocalParameter) -> Tensor:
        start = local.tensor.storage_offset() - self.shard.storage_offset()
        return part[start : start + local.tensor.numel()].view(local.tensor.shape)

    def _local_part(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.group.size, self._part_size)[self.group.rank]

    # Whole weights, gathered and freed.

    def gather(self) -> None:
        """Begin to make the weights whole, unless they are or are on the way."""
        if not self.is_gathered:
            self.is_gathered = True
            self._gather_shards()

    def _gather_shards(self) -> None:
        # The storage is resized in place, so that views and saved tensors of before the free are valid again.
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.all_gather()

    def all_gather(self, *, overlaps: bool = True) -> None:
        """Begin to bring every rank's part to every rank. `overlaps`: other work comes before it is used."""
        self._owner.wait_for_weights(self._local)
        self._gathering = self.group.all_gather(self.flat, self.shard, wait=False, overlaps=overlaps)

    def synchronize(self) -> None:
        """Return when the weights that are on the way are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._show()

    def free(self) -> None:
        """Give the memory of the whole weights back; the shard stays."""
        if self.sharded and self.is_gathered:
            # An all-gather that is under way would write to memory that belongs to something else by then.
            self.synchronize()
            self._hide()
            self.flat.untyped_storage().resize_(0)
            self.is_gathered = False

    def _show(self) -> None:
        if not self.resident:
            self._views.show()
            if self._changes.is_watching:
                self._changes.show(self._gathered_runs())

    def _hide(self) -> None:
        self._views.check_unchanged()
        self._compare_runs()
        self._views.hide()

    def _read(self, name: str) -> None:
        """A weight is read that is freed, or on its way."""
        self._owner.read_unit(self)
        self.synchronize()
        if not self.is_gathered:
            where = "with zero=3 each rank holds a part of it"
            if self.offloaded:
                where = "with offload=parameters it lies in host memory"
            raise UserError(
                f"{name} has no values on this rank: {where}, and it is whole only during a step; "
                "engine.full_state_dict() returns all weights whole, and engine.close() puts the model "
                "together"
            )

    def close(self) -> None:
        """The engine is closed: ask its sharing nothing any more."""
        self._owner = UnitOwner()

    # Changes of whole weights that do not stay.

    def _gathered_runs(self) -> list[Tensor]:
        part = self._local_part(self.flat)
        return [self._run_in(part, local) for local in self._local]

    def _compare_runs(self) -> None:
        if self._changes.is_watching:
            self._changes.compare(self._gathered_runs())

    def start_step(self) -> None:
        self._changes.start_step()

    def start_update(self) -> None:
        """The unit is updated in a backward pass: compare what it was until now."""
        if self.is_gathered and self._changes.is_watching:
            self.synchronize()
            self._compare_runs()
        self._changes.start_update()

    def mark_updated(self, used: Container[nn.Parameter]) -> None:
        """These were updated in a backward pass: torch refuses to go on with what it has saved of them."""
        self._views.mark_updated(used, is_shown=self.is_gathered)

    def finish_watch(self) -> list[str]:
        """Weights of which a pass has changed this rank's part. Reads the device; compares no more."""
        if self.is_gathered:
            self.synchronize()
            self._compare_runs()
        flags = self._changes.finish()
        return [local.name for local, flag in zip(self._local, flags, strict=bool(flags)) if flag]

    def take_over(self) -> None:
        """Parameters that the user has given other memory come back into the buffer, with their values."""
        self._views.take_over()

    def reallocate(self) -> None:
        """Move to new memory; views of the old keep that."""
        self.flat = self.flat.clone()
        self._views.move_to(self.flat)
        start = int(self.shard.storage_offset())
        self.shard = self._local_part(self.flat)
        for local in self._local:
            first = int(local.tensor.storage_offset()) - start
            local.tensor.data = self.shard[first : first + local.tensor.numel()].view(local.tensor.shape)

    # Nothing to do where weights are on the device.

    def fetch(self) -> None:
        """Begin to bring what this rank updates from host memory, ahead of `bring`."""

    def bring(self) -> None:
        """Return when what this rank updates is on the device."""

    def put_back(self) -> None:
        """Bring what this rank has updated to host memory, whole if it is whole there."""

    def drop(self) -> None:
        """Give the device's memory back of what lies in host memory, unless it is in use."""

    def stored_values(self, local: LocalParameter) -> Tensor:
        """The values of one run, wherever they are kept between steps."""
        return local.tensor.detach()
