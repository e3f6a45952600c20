"""All that a rank owns, in one file with its manifest; and the files of all ranks as a checkpoint on disk.

Nothing is shared out with replicas: under the same plan, its own file is all that a rank reads. The manifest
names every tensor of all ranks, as that of a checkpoint does, and pieces of this file alone.

The process that started the ranks writes the checkpoint, when these are gone. It is the one that they would
have saved: each slice is written once, from the file of a rank that has it. All files must be on this host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.assignment import describe_tensors, is_number, share_out
from echelon.state.checkpoint.copies import rank_file
from echelon.state.checkpoint.copies.folder import Entry, MemoryFolder, step_of
from echelon.state.checkpoint.file_checks import FileHash, check_hash, check_size, read_regular
from echelon.state.checkpoint.manifest import (
    MOST_BYTES,
    FileRecord,
    Manifest,
    Number,
    OtherVersionError,
)
from echelon.state.checkpoint.manifest_reader import DTYPE_NAMES
from echelon.state.checkpoint.part_writer import FileImage, FileLayout, lay_out
from echelon.state.checkpoint.rank_save import SaveOptions, save_alone
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage import FolderFiles
from echelon.state.checkpoint.storage_errors import RETRIES
from echelon.state.ownership import OwnedSlice, Slice

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


@final
class HostCopies:
    """The state of all ranks of a run after `step`; `save` writes it as that of an engine does."""

    def __init__(self, step: int, states: Sequence[SavedState]) -> None:
        self.step, self._states = step, states
        self._about = states[0].manifest

    @classmethod
    def newest(cls, folder: MemoryFolder, after: int, say: Callable[[str], None]) -> "HostCopies | None":
        """Open those of the newest step after `after` of which all files are here and whole; None without
        one. What is damaged is named to `say`; copies of another version are an error."""
        for entries in _generations(folder, after):
            try:
                states = [rank_file.open_rank_file(folder.manifest(each)) for each in entries]
            except OtherVersionError:
                raise
            except UserError as error:
                say(str(error))
                continue
            if len(states) == states[0].manifest.ranks:
                return cls(step_of(entries[0].generation), states)
        return None

    @property
    def plan(self) -> str:
        return self._about.plan

    @property
    def extra(self) -> dict[str, Any]:
        return self._about.extra

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        copy_behind: bool = False,
        then: Callable[[], None] | None = None,
        retries: int = RETRIES,
    ) -> None:
        assert (wait, copy_behind) == (True, False), "no step could go on meanwhile"
        about = replace(self._about, extra=dict(extra or {}), tensors={}, numbers={}, files={})
        files = [
            (layout, partial(_read, saved))
            for saved, layouts in zip(self._states, self._layouts(), strict=True)
            for layout in layouts
        ]
        save_alone(path, about, self._about.numbers, files, SaveOptions(then=then, retries=retries))

    def _layouts(self) -> list[list[FileLayout]]:
        written = share_out([_slices(rank, each.manifest) for rank, each in enumerate(self._states)])
        tensors = self._about.tensors
        return [
            lay_out(rank, [(box, DTYPE_NAMES[tensors[box.name][box.part].dtype]) for box in boxes])
            for rank, boxes in enumerate(written)
        ]


def _generations(folder: MemoryFolder, after: int) -> list[list[Entry]]:
    """List the files of each save of a later step, by rank; the newest first."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(folder.entries()):
        if step_of(entry.generation) > after:
            found.setdefault(entry.generation, []).append(entry)
    return [found[name] for name in sorted(found, reverse=True)]


def _slices(rank: int, manifest: Manifest) -> list[RankSlice]:
    return [
        RankSlice(Slice(name, part, record.shape, piece.offsets, piece.sizes), record.dtype, rank)
        for name, parts in manifest.tensors.items()
        for part, record in parts.items()
        for piece in record.pieces
    ]


def _read(saved: SavedState, box: Slice) -> Tensor:
    out = torch.empty(box.sizes, dtype=DTYPE_NAMES[saved.manifest.tensors[box.name][box.part].dtype])
    saved.read(box, out)
    return out
