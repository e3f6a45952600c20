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
from echelon.state.checkpoint.file_checks import FileHash, check_hash, check_size, read_regular
from echelon.state.checkpoint.file_image import FileImage, FileLayout, lay_out
from echelon.state.checkpoint.manifest import (
    MOST_BYTES,
    FileRecord,
    Manifest,
    Number,
    OtherVersionError,
    PieceRecord,
    TensorRecord,
)
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage import FolderFiles
from echelon.state.ownership import ENGINE, OwnedSlice, Slice

_NO_LIMIT = 1 << 62  # one file, whatever its size


class OtherPlanError(UserError):
    """A file in memory is of another plan, or of other ranks."""


def layout_of(rank: int, owned: Sequence[OwnedSlice]) -> FileLayout:
    """The file of a rank; its counters stand in the manifest."""
    boxes = {each.slice: each.tensor.dtype for each in owned if not is_number(each.slice)}
    (layout,) = lay_out(rank, list(boxes.items()), _NO_LIMIT)
    return layout


def is_number(box: Slice) -> bool:
    return box.name == ENGINE and not box.shape


def own_numbers(owned: Iterable[OwnedSlice]) -> dict[str, Number]:
    return {each.slice.part: each.tensor.item() for each in owned if is_number(each.slice)}


def fill(memory: Tensor, layout: FileLayout, owned: Sequence[OwnedSlice]) -> None:
    """Copy what a rank owns to its places in the file."""
    held = {each.slice: each.tensor for each in owned}
    FileImage(layout, lambda box: held[box]).fill(0, memory)


def describe_file(
    about: Manifest, lists: Sequence[Sequence[RankSlice]], layout: FileLayout, numbers: Mapping[str, Number]
) -> Manifest:
    """The manifest of a rank's file, but for its hash. `lists`: what each rank owns."""
    tensors: dict[str, dict[str, TensorRecord]] = {}
    for each in (each for of_rank in lists for each in of_rank if not is_number(each.slice)):
        record = TensorRecord(each.slice.shape, each.dtype, ())
        tensors.setdefault(each.slice.name, {}).setdefault(each.slice.part, record)
    pieces: dict[tuple[str, str], list[PieceRecord]] = {}
    for box, _, tensor, _ in layout.boxes:
        record_of_box = PieceRecord(layout.name, tensor, box.offsets, box.sizes)
        pieces.setdefault((box.name, box.part), []).append(record_of_box)
    placed = {
        name: {
            part: replace(each, pieces=tuple(pieces.get((name, part), ()))) for part, each in parts.items()
        }
        for name, parts in tensors.items()
    }
    return replace(about, tensors=placed, numbers=dict(numbers))


def with_hash(manifest: Manifest, layout: FileLayout, memory: Tensor) -> Manifest:
    """The manifest with the hash of what was filled."""
    hashed = FileHash()
    hashed.update(memory.numpy().data)
    return replace(manifest, files={layout.name: FileRecord(layout.size, hashed.hexdigest())})


def open_rank_file(manifest_path: Path, plan: str, ranks: int) -> SavedState:
    """The state of a rank, every byte of it compared with its hash. Else a UserError."""
    manifest = _read_manifest(manifest_path)
    if (manifest.plan, manifest.ranks) != (plan, ranks):
        raise OtherPlanError(
            f"the copies of step {manifest.step} in memory are of the plan '{manifest.plan}', and only that "
            f"plan can go on from them; with '{plan}' training goes on from a checkpoint on disk"
        )
    return _open_verified(manifest_path, manifest)


def open_file(manifest_path: Path) -> SavedState:
    """The same, of any plan."""
    return _open_verified(manifest_path, _read_manifest(manifest_path))


def _read_manifest(path: Path) -> Manifest:
    data = read_regular(path, MOST_BYTES)
    try:
        return Manifest.from_bytes(data, is_whole=False)
    except OtherVersionError as error:
        fix = f"or remove {path.parent.parent} to go on without these copies in memory"
        raise OtherVersionError(f"{path}: {error.title}", [*error.errors, fix]) from error
    except UserError as error:
        raise UserError(f"{path}: {error.title}", error.errors) from error


def _open_verified(manifest_path: Path, manifest: Manifest) -> SavedState:
    for name, record in manifest.files.items():
        check_size(manifest_path.parent / name, record)
        check_hash(manifest_path.parent / name, record)
    return SavedState(FolderFiles(manifest_path.parent), manifest)


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
