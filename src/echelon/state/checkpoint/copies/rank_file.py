"""All that a rank owns, in one file, and the manifest that says so.

Nothing is shared out with replicas: under the same plan, its own file is all that a rank reads. The manifest
names every tensor of all ranks, as that of a checkpoint does, and pieces of this file alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.assignment import describe_tensors, is_number
from echelon.state.checkpoint.file_checks import FileHash, check_hash, check_size, read_regular
from echelon.state.checkpoint.manifest import (
    MOST_BYTES,
    FileRecord,
    Manifest,
    Number,
    OtherVersionError,
)
from echelon.state.checkpoint.part_writer import FileImage, FileLayout, lay_out
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage import FolderFiles
from echelon.state.ownership import OwnedSlice

_NO_LIMIT = 1 << 62  # one file, whatever its size


class OtherPlanError(UserError):
    """A file in memory is of another plan, or of other ranks."""


def layout_of(rank: int, owned: Sequence[OwnedSlice]) -> FileLayout:
    """Lay out the file of a rank; its counters stand in the manifest."""
    boxes = {each.slice: each.tensor.dtype for each in owned if not is_number(each.slice)}
    (layout,) = lay_out(rank, list(boxes.items()), _NO_LIMIT)
    return layout


def own_numbers(owned: Iterable[OwnedSlice]) -> dict[str, Number]:
    return {each.slice.part: each.tensor.item() for each in owned if is_number(each.slice)}


def fill(memory: Tensor, layout: FileLayout, owned: Sequence[OwnedSlice]) -> None:
    held = {each.slice: each.tensor for each in owned}
    FileImage(layout, lambda box: held[box]).fill(0, memory)


def describe_file(
    about: Manifest, lists: Sequence[Sequence[RankSlice]], layout: FileLayout, numbers: Mapping[str, Number]
) -> Manifest:
    """Make the manifest of a rank's file, but for its hash. `lists`: what each rank owns."""
    owned = ((each.slice, each.dtype) for of_rank in lists for each in of_rank if not is_number(each.slice))
    return replace(about, tensors=describe_tensors(owned, [layout]), numbers=dict(numbers))


def with_hash(manifest: Manifest, layout: FileLayout, memory: Tensor) -> Manifest:
    hashed = FileHash()
    hashed.update(memory.numpy().data)
    return replace(manifest, files={layout.name: FileRecord(layout.size, hashed.hexdigest())})


def open_rank_file(path: Path, plan: tuple[str, int] | None = None) -> SavedState:
    """Open a rank's file by its manifest, check its hash, and refuse one of another `plan`."""
    data = read_regular(path, MOST_BYTES)
    try:
        manifest = Manifest.from_bytes(data, is_whole=False)
    except OtherVersionError as error:
        fix = f"or remove {path.parent.parent} to go on without these copies in memory"
        raise OtherVersionError(f"{path}: {error.title}", [*error.errors, fix]) from error
    except UserError as error:
        raise UserError(f"{path}: {error.title}", error.errors) from error
    if plan is not None and plan != (manifest.plan, manifest.ranks):
        raise OtherPlanError(
            f"the copies of step {manifest.step} in memory are of the plan '{manifest.plan}', and only that "
            f"plan can go on from them; with '{plan[0]}' training goes on from a checkpoint on disk"
        )
    for name, record in manifest.files.items():
        check_size(path.parent / name, record)
        check_hash(path.parent / name, record)
    return SavedState(FolderFiles(path.parent), manifest)


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
