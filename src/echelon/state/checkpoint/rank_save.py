"""One save on one rank: it writes its files, and rank 0 the manifest when all are done; then the name.

`save_alone` is that of one process which has all of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.state.checkpoint.assignment import Assignment, join_reports
from echelon.state.checkpoint.atomic import new_token
from echelon.state.checkpoint.manifest import FileRecord, Manifest, Number
from echelon.state.checkpoint.part_writer import (
    FileImage,
    FileLayout,
    FilledChunks,
    Sink,
    StoppedError,
    write_memory,
)
from echelon.state.checkpoint.snapshot import Later, Snapshot, SnapshotMemory, nothing
from echelon.state.checkpoint.storage_errors import (
    RETRIES,
    report_write_errors,
    with_retries,
)
from echelon.state.checkpoint.target import Report, Target, target_at
from echelon.state.ownership import OwnedSlice, Slice

Stop = Callable[[], bool]

_POLL_SECONDS = 0.02  # how often rank 0 asks whether the others are done


def never() -> bool:
    return False


class SaveOptions(NamedTuple):
    """`then` is called on rank 0 when the checkpoint is whole; `retries`: after errors that may pass.

    `later`, of a save that does not wait: what does not change before `Saver.before_changes` is called.
    """

    wait: bool = True
    then: Callable[[], None] | None = None
    retries: int = RETRIES
    later: Later = nothing


@final
class RankSave:
    def __init__(
        self,
        place: str,
        target: Target,
        assignment: Assignment,
        about: Manifest,
        group: Group,
        owned: Sequence[OwnedSlice],
        options: SaveOptions,
    ) -> None:
        self.place, self.target, self._assignment, self._about = place, target, assignment, about
        self._group, self._options = group, options
        self._held = {each.slice: each.tensor for each in owned}
        # Read now: the counters of a running engine go on while a thread writes.
        self._numbers = {box.part: self._held[box].item() for box in assignment.numbers[group.rank]}
        self._layouts = assignment.layouts[group.rank]

    def write(self, device: torch.device) -> Report:
        chunks = FilledChunks(max((layout.size for layout in self._layouts), default=0), device)
        held: dict[Any, Tensor] = self._held

        def write_file(layout: FileLayout, sink: Sink) -> FileRecord:
            return chunks.write(sink, FileImage(layout, held.__getitem__))

        return self._report(write_file, never)

    def snapshot(self, memory: SnapshotMemory) -> Snapshot:
        """Copy this rank's part, or begin to."""
        taken = memory.take(self._layouts, self._held.__getitem__, self._options.later)
        self._held = {}  # the thread that writes must not keep the weights of this step alive
        return taken

    def write_snapshot(self, snapshot: Snapshot, stop: Stop) -> None:
        """Write this rank's files from a snapshot, and tell rank 0."""
        memory = dict(zip((layout.name for layout in self._layouts), snapshot.files, strict=True))

        def write_file(layout: FileLayout, sink: Sink) -> FileRecord:
            return write_memory(sink, memory[layout.name], layout.size, stop)

        report = self._report(write_file, stop)
        with report_write_errors(self.place):
            with_retries(lambda: self.target.report(self._group.rank, report), self._options.retries, stop)

    def _report(self, write_file: Callable[[FileLayout, Sink], FileRecord], stop: Stop) -> Report:
        with report_write_errors(self.place):
            files = write_files(self.target, self._layouts, write_file, self._options.retries, stop)
        return {"numbers": self._numbers, "files": files}

    def commit_when_all_are_done(self, stop: Stop) -> None:
        """Wait for the reports of all ranks, and name the checkpoint; on rank 0, others return at once."""
        if self._group.rank != 0:
            return
        reports: list[Report] = []
        while len(reports) < self._group.size:
            if stop():
                raise StoppedError
            with report_write_errors(self.place):
                report = with_retries(
                    lambda: self.target.find_report(len(reports)), self._options.retries, stop
                )
            if report is None:
                time.sleep(_POLL_SECONDS)
            else:
                reports.append(report)
        self.commit(reports)

    def commit(self, reports: Sequence[Report]) -> None:
        """Name the checkpoint; on rank 0, when all ranks have written their files."""
        manifest = join_reports(self._about, self._assignment, reports, self.target.stored_name)
        commit(self.place, self.target, manifest, self._options)


def write_files(
    target: Target,
    layouts: Sequence[FileLayout],
    write_file: Callable[[FileLayout, Sink], FileRecord],
    retries: int,
    stop: Stop = never,
) -> dict[str, tuple[object, ...]]:
    """Write files; an error that may pass begins a file again. Returns the size and hash of each by name."""

    def write(layout: FileLayout, name: str) -> FileRecord:
        sink = target.create(name)
        try:
            return write_file(layout, sink)
        finally:
            sink.close()

    files = {}
    for layout in layouts:
        name = target.stored_name(layout.name)
        files[name] = astuple(with_retries(lambda f=layout, n=name: write(f, n), retries, stop))  # type: ignore[misc]
    return files


def commit(place: object, target: Target, manifest: Manifest, options: SaveOptions) -> None:
    """Write the manifest, name the checkpoint, and remove what was there for the writing."""
    data = manifest.as_readable_bytes()
    with report_write_errors(place):
        with_retries(lambda: target.commit(data, manifest.files), options.retries)
    with report_write_errors(place, is_whole=True):
        with_retries(target.clean_up, options.retries)
        if options.then is not None:
            options.then()


Read = Callable[[Slice], Tensor]


def save_alone(
    path: str | Path,
    about: Manifest,
    numbers: Mapping[str, Number],
    files: Sequence[tuple[FileLayout, Read]],
    options: SaveOptions,
) -> None:
    """Write each file of what `read` returns when its bytes are due. `about`: all but tensors and numbers."""
    target = target_at(path, new_token())
    records: dict[str, tuple[object, ...]] = {}
    try:
        with report_write_errors(path):
            target.begin()
            for layout, read in files:

                def write(layout: FileLayout, sink: Sink, read: Read = read) -> FileRecord:
                    return FilledChunks(layout.size, torch.device("cpu")).write(sink, FileImage(layout, read))

                records |= write_files(target, [layout], write, options.retries)
        assignment = Assignment("", [[layout for layout, _ in files]], [])
        report = {"numbers": dict(numbers), "files": records}
        commit(path, target, join_reports(about, assignment, [report], target.stored_name), options)
    except BaseException:
        target.abandon()
        raise
