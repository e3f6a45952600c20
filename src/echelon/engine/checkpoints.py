"""engine.save and engine.load: what an engine tells a checkpoint, and takes from one.

Load goes by names and boxes of whole tensors, so that any plan can load what any plan saved:

    weights       `Sharing.first_weights`, as a deferred start fills them; from the master where that is finer
    buffers       whole
    optimizer     each local parameter asks for its boxes of every part (`Stepper.load`)
    numbers       counters of steps, loss scale, normaliser, seed
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import Manifest, SavedState
from echelon.data_parallel import Sharing
from echelon.mesh import Mesh
from echelon.ownership import MASTER, VALUE, OwnedSlice

InWhole = Callable[[OwnedSlice], list[OwnedSlice]]


def describe(mesh: Mesh, step: int, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> Manifest:
    """What a manifest says beside tensors and files."""
    from echelon import __version__

    return Manifest(
        step=step,
        plan=str(mesh.plan),
        ranks=mesh.plan.ranks,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"echelon": __version__, "torch": torch.__version__},
        groups=[_options(group) for group in optimizer.param_groups],
        extra=dict(extra),
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, as plain values."""
    plain = {name: value for name, value in group.items() if name != "params"}
    return {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in plain.items()
        if isinstance(value, bool | int | float | str | None | tuple | list | Tensor)
    }


@torch.no_grad()
def load_weights(saved: SavedState, sharings: Iterable[Sharing], in_whole: InWhole) -> None:
    """Fill the weights that this rank holds, frozen ones too; all ranks must call this."""
    for sharing in dict.fromkeys(sharings):
        held = sharing.first_weights()
        for each in held:
            each.tensor.zero_()  # padding
        for box in (box for each in held for box in in_whole(each)):
            saved.read(box.slice._replace(part=_part_for(saved, box)), box.tensor)
        sharing.share_first_weights()


def _part_for(saved: SavedState, box: OwnedSlice) -> str:
    """The value, or its master, if that has bits that the weight here can hold and the value lacks."""
    parts = saved.parts(box.slice.name)
    is_finer = MASTER in parts and box.tensor.dtype.itemsize > parts[VALUE].dtype.itemsize
    return MASTER if is_finer else VALUE


@torch.no_grad()
def load_buffers(saved: SavedState, buffers: Iterable[OwnedSlice]) -> None:
    for each in buffers:
        saved.read(each.slice, each.tensor)
