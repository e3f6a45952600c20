"""Copies in memory as a checkpoint on disk, by the process that started the ranks, when these are gone.

It is the checkpoint that the ranks would have saved: each slice is written once, from the file of a rank that
has it, and any plan can load it. All files must be on this host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.assignment import share_out
from echelon.state.checkpoint.copies import rank_file
from echelon.state.checkpoint.copies.folder import Entry, MemoryFolder, step_of
from echelon.state.checkpoint.manifest import Manifest, OtherVersionError
from echelon.state.checkpoint.manifest_reader import DTYPE_NAMES
from echelon.state.checkpoint.part_writer import FileLayout, lay_out
from echelon.state.checkpoint.rank_save import SaveOptions, save_alone
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage_errors import RETRIES
from echelon.state.ownership import Slice


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
