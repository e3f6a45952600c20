"""Copies in memory as a checkpoint on disk, by the process that started the ranks, when these are gone.

It is the checkpoint that the ranks would have saved: each slice is written once, from the file of a rank that
has it, and any plan can load it. All files must be on this host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.assignment import Assignment, joined, share_out
from echelon.state.checkpoint.atomic import new_token
from echelon.state.checkpoint.copies import rank_file
from echelon.state.checkpoint.copies.folder import Entry, MemoryFolder, step_of
from echelon.state.checkpoint.file_image import FileImage, FileLayout, lay_out
from echelon.state.checkpoint.manifest import FileRecord, Manifest, OtherVersionError
from echelon.state.checkpoint.manifest_reader import dtype_of
from echelon.state.checkpoint.part_writer import FilledChunks
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage_errors import (
    RETRIES,
    report_later_errors,
    report_write_errors,
    with_retries,
)
from echelon.state.checkpoint.target import Target, target_at
from echelon.state.ownership import Slice

_CPU = torch.device("cpu")


@final
class HostCopies:
    """The state of all ranks of a run after `step`; `save` writes it as that of an engine does."""

    def __init__(self, step: int, states: Sequence[SavedState]) -> None:
        self.step, self._states = step, states
        self._about = states[0].manifest

    @classmethod
    def newest(cls, folder: MemoryFolder, after: int, say: Callable[[str], None]) -> "HostCopies | None":
        """Those of the newest step after `after` of which all files are here and whole, hash by hash; None if
        there are none. What is damaged is named to `say`; copies of another version are an error."""
        for entries in _generations(folder, after):
            try:
                states = [rank_file.open_file(folder.manifest(each)) for each in entries]
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
        """That of the ranks whose copies these are."""
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
        """Write a checkpoint."""
        assert (wait, copy_behind) == (True, False), "no step could go on meanwhile"
        assignment = self._assign()
        about = replace(self._about, extra=dict(extra or {}), tensors={}, numbers={}, files={})
        target = target_at(path, new_token())
        try:
            with report_write_errors(path):
                target.begin()
                files = self._write_files(target, assignment, retries)
                report = {"numbers": self._about.numbers, "files": files}
                manifest = joined(about, assignment, [report], target.stored_name)
                _commit(target, manifest, retries)
        except BaseException:
            target.abandon()
            raise
        with report_later_errors(path):
            with_retries(target.clean_up, retries)
            if then is not None:
                then()

    def _assign(self) -> Assignment:
        written = share_out([_slices(rank, each.manifest) for rank, each in enumerate(self._states)])
        tensors = self._about.tensors
        layouts = [
            lay_out(rank, [(box, dtype_of(tensors[box.name][box.part].dtype)) for box in boxes])
            for rank, boxes in enumerate(written)
        ]
        return Assignment("", layouts, [])

    def _write_files(
        self, target: Target, assignment: Assignment, retries: int
    ) -> dict[str, tuple[object, ...]]:
        files = {}
        for saved, layouts in zip(self._states, assignment.layouts, strict=True):
            for layout in layouts:
                name = target.stored_name(layout.name)
                record = with_retries(lambda s=saved, f=layout, n=name: _write(s, f, target, n), retries)  # type: ignore[misc]
                files[name] = astuple(record)
        return files


def _commit(target: Target, manifest: Manifest, retries: int) -> None:
    data = manifest.as_readable_bytes()
    with_retries(lambda: target.commit(data, manifest.files), retries)


def _generations(folder: MemoryFolder, after: int) -> list[list[Entry]]:
    """The files of each save of a later step, by rank; the newest first."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(folder.entries()):
        if step_of(entry.generation) > after:
            found.setdefault(entry.generation, []).append(entry)
    return [found[name] for name in sorted(found, reverse=True)]


def _slices(rank: int, manifest: Manifest) -> list[RankSlice]:
    """What the file of a rank has."""
    return [
        RankSlice(Slice(name, part, record.shape, piece.offsets, piece.sizes), record.dtype, rank)
        for name, parts in manifest.tensors.items()
        for part, record in parts.items()
        for piece in record.pieces
    ]


def _write(saved: SavedState, layout: FileLayout, target: Target, name: str) -> FileRecord:
    def read(box: Slice) -> Tensor:
        out = torch.empty(box.sizes, dtype=dtype_of(saved.manifest.tensors[box.name][box.part].dtype))
        saved.read(box, out)
        return out

    sink = target.create(name)
    try:
        return FilledChunks(layout.size, _CPU).write(sink, FileImage(layout, read))
    finally:
        sink.close()
