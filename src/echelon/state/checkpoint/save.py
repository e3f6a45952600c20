"""Saves of an engine: every rank writes its part, then rank 0 the manifest, and the checkpoint gets its name.

    all ranks    agree on a temporary place, and on who writes what (exchanged again only if it has changed)
                 write their files
    rank 0       the manifest, when all are done; then the name

A save that waits ends with a second agreement. One that does not copies this rank's part (some of it while
training goes on: snapshot.py), and a thread writes it; ranks say that they are done by files in the temporary
place, so that no step has anything to exchange. The next save, or `finish`, waits for it, and raises on every
rank what went wrong on any.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import agree_on_every_rank, check_on_every_rank
from echelon.errors import UserError
from echelon.launching import beat
from echelon.state.checkpoint.assignment import Assignment, assign, joined, signature
from echelon.state.checkpoint.atomic import new_token
from echelon.state.checkpoint.file_image import FileImage
from echelon.state.checkpoint.manifest import FileRecord, Manifest
from echelon.state.checkpoint.part_writer import FilledChunks, Sink, StoppedError, write_memory
from echelon.state.checkpoint.snapshot import Later, Snapshot, SnapshotMemory, nothing
from echelon.state.checkpoint.storage_errors import (
    RETRIES,
    report_later_errors,
    report_write_errors,
    with_retries,
)
from echelon.state.checkpoint.target import Report, Target, target_at
from echelon.state.ownership import OwnedSlice, Slice

Then = Callable[[], None]

_LOOK_SECONDS = 0.02  # how often rank 0 looks whether the others are done
_END_SECONDS = 5.0  # a failed engine waits so long for its writer
_EXIT_SECONDS = 600.0  # a program that ends without `finish`


class SaveOptions(NamedTuple):
    """`then` is called on rank 0 when the checkpoint is whole; `retries`: after errors that may pass.

    `later`, of a save that does not wait: what nobody changes before `Saver.before_changes` is called.
    """

    wait: bool = True
    then: Then | None = None
    retries: int = RETRIES
    later: Later = nothing


@dataclass
class _Running:
    """A save that a thread writes."""

    place: str
    target: Target
    snapshot: Snapshot
    thread: threading.Thread
    is_part_done: threading.Event
    stop: threading.Event
    error: Exception | None = None


@final
class Saver:
    """What an engine's saves share: memory, who writes what, and the one that is under way."""

    def __init__(self, group: Group, device: torch.device, *, has_server: bool = False) -> None:
        """`has_server`: steps of other ranks change what this one owns, as those of asynchronous workers."""
        self._group, self._device, self._has_server = group, device, has_server
        self._assignment: Assignment | None = None
        self._memory = SnapshotMemory(device)
        self._running: _Running | None = None
        self._is_at_exit = False

    def save(
        self, path: str | Path, owned: Sequence[OwnedSlice], about: Manifest, options: SaveOptions
    ) -> None:
        """Write a checkpoint of what all ranks own; all of them must call this.

        `about` has everything but tensors, engine numbers and files.
        """
        self.finish()
        begun: list[Target] = []  # on rank 0
        token, is_same = self._begin(path, owned, about, begun)
        target = begun[0] if begun else target_at(path, token)
        try:
            assignment = self._assign(owned, is_same=is_same)
            save = _Save(str(path), target, assignment, about, self._group, owned, options)
            if options.wait:
                agree_on_every_rank(lambda: save.write(self._device), save.commit)
            else:
                self._start(save)
        except BaseException:
            if self._group.rank == 0:
                target.abandon()
            raise

    def _begin(
        self, path: str | Path, owned: Sequence[OwnedSlice], about: Manifest, begun: list[Target]
    ) -> tuple[str, bool]:
        """A token for the temporary place, which rank 0 has made; and whether all ranks own what they did."""
        owned_now = signature(owned)

        def decide(is_same: list[bool]) -> tuple[str, bool]:
            about.as_readable_bytes(is_whole=False)
            token = new_token()
            begun.append(target_at(path, token))
            with report_write_errors(path):
                begun[0].begin()
            return token, all(is_same)

        def is_unchanged() -> bool:
            return self._assignment is not None and self._assignment.signature == owned_now

        token, is_same = agree_on_every_rank(is_unchanged, decide)
        return token, is_same

    def _assign(self, owned: Sequence[OwnedSlice], *, is_same: bool) -> Assignment:
        if self._assignment is None or not is_same:
            self._assignment = assign(owned, self._group, self._device)
        return self._assignment

    def _start(self, save: "_Save") -> None:
        snapshot = self._take_snapshot(save)
        is_part_done, stop = threading.Event(), threading.Event()

        def work() -> None:
            try:
                snapshot.wait()
                _check_unchanged(save.place, snapshot.changed)
                save.write_snapshot(snapshot, stop.is_set)
                is_part_done.set()
                save.commit_when_all_are_done(stop.is_set)
            except StoppedError:
                pass
            except Exception as error:
                running.error = error
            finally:
                is_part_done.set()

        thread = threading.Thread(target=work, name="echelon-save", daemon=True)
        running = _Running(save.place, save.target, snapshot, thread, is_part_done, stop)
        self._finish_at_exit()
        thread.start()
        self._running = running

    def _finish_at_exit(self) -> None:
        """The thread would end with the program, in silence."""
        if not self._is_at_exit:
            self._is_at_exit = True
            # Also at the end of a process of `launch`, where atexit calls nothing.
            Finalize(None, _end, args=(weakref.WeakMethod(self._end),), exitpriority=100)

    def _end(self) -> None:
        """Finish this rank's part of what is under way, and say what went wrong; others may be gone."""
        if self._running is None:
            return
        running, self._running = self._running, None
        is_failing = getattr(sys, "last_value", None) is not None  # other ranks may never be done
        end = time.monotonic() + (_END_SECONDS if is_failing else _EXIT_SECONDS)
        while not _join(running.thread, 1.0) and time.monotonic() < end:
            beat()
        if running.thread.is_alive():
            _say_lost(running.place, "the program ended before it was written")
        elif running.error is not None:
            _say_lost(running.place, str(running.error))

    def _take_snapshot(self, save: "_Save") -> Snapshot:
        """With a server no rank goes on before every copy is made: its next push would change the weights."""
        taken: list[Snapshot] = []

        def take() -> None:
            taken.append(save.snapshot(self._memory))
            taken[0].wait()

        if not self._has_server:
            return save.snapshot(self._memory)
        check_on_every_rank(take)
        return taken[0]

    def before_changes(self) -> None:
        """What this rank does from now on comes after the copies of the save that is under way."""
        if self._running is not None:
            self._running.snapshot.before_changes()

    def finish(self) -> None:
        """Return when no save is under way; all ranks must call this.

        What went wrong on any rank is raised on every rank.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            _wait(running.is_part_done.wait)
            check_on_every_rank(lambda: _raise(running.error))
            _wait(lambda seconds: _join(running.thread, seconds))
            check_on_every_rank(lambda: _raise(running.error))
        except BaseException:
            self._give_up(running)
            raise

    def abandon(self) -> None:
        """Give up what is under way: other ranks may be gone."""
        if self._running is not None:
            running, self._running = self._running, None
            self._give_up(running)

    def _give_up(self, running: _Running) -> None:
        running.stop.set()
        running.thread.join(_END_SECONDS)
        if self._group.rank == 0 and not running.thread.is_alive():
            running.target.abandon()


def _end(end: "weakref.WeakMethod[Callable[[], None]]") -> None:
    method = end()
    if method is not None:
        method()


def _say_lost(place: str, reason: str) -> None:
    print(
        f"echelon: the save to {place} failed: {reason}; call engine.finish_saving() or engine.close() at "
        "the end of a program, which raise this",
        file=sys.stderr,
        flush=True,
    )


def _wait(wait: Callable[[float], bool]) -> None:
    """As long as it takes; this rank is alive meanwhile."""
    while not wait(1.0):
        beat()


def _join(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def _check_unchanged(place: str, changed: Sequence[str]) -> None:
    if changed:
        raise UserError(
            f"{place}: the checkpoint is not saved: {', '.join(changed[:3])} changed while it was copied; "
            "after a save with copy_behind=True nothing but engine.step may change weights or optimizer "
            "state before the next step has ended: save without it, or change them after that step"
        )


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


@final
class _Save:
    """One save, on this rank."""

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
        self.target = target
        self.place, self._assignment, self._about, self._group = place, assignment, about, group
        self._options = options
        self._held = {each.slice: each.tensor for each in owned}
        self._numbers = {box.part: self._held[box].item() for box in assignment.numbers[group.rank]}
        self._layouts = assignment.layouts[group.rank]

    def write(self, device: torch.device) -> Report:
        """Write this rank's files from where its tensors are."""
        chunks = FilledChunks(max((layout.size for layout in self._layouts), default=0), device)

        def write_file(number: int, sink: Sink) -> FileRecord:
            return chunks.write(sink, FileImage(self._layouts[number], self._tensor_of))

        return self._write_files(write_file, lambda: False)

    def snapshot(self, memory: SnapshotMemory) -> Snapshot:
        """Copy this rank's part, or begin to."""
        taken = memory.take(self._layouts, self._tensor_of, self._options.later)
        self._held = {}
        return taken

    def write_snapshot(self, snapshot: Snapshot, stop: Callable[[], bool]) -> None:
        def write_file(number: int, sink: Sink) -> FileRecord:
            return write_memory(sink, snapshot.files[number], self._layouts[number].size, stop)

        report = self._write_files(write_file, stop)
        with report_write_errors(self.place):
            with_retries(lambda: self.target.report(self._group.rank, report), self._options.retries, stop)

    def _tensor_of(self, box: Slice) -> Tensor:
        return self._held[box]

    def _write_files(self, write_file: Callable[[int, Sink], FileRecord], stop: Callable[[], bool]) -> Report:
        def write(number: int, name: str) -> FileRecord:
            sink = self.target.create(name)
            try:
                return write_file(number, sink)
            finally:
                sink.close()

        files = {}
        with report_write_errors(self.place):
            for number, layout in enumerate(self._layouts):
                name = self.target.stored_name(layout.name)
                files[name] = with_retries(lambda n=number, f=name: write(n, f), self._options.retries, stop)  # type: ignore[misc]
        return {"numbers": self._numbers, "files": {name: astuple(files[name]) for name in files}}

    def commit_when_all_are_done(self, stop: Callable[[], bool]) -> None:
        """On rank 0."""
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
                time.sleep(_LOOK_SECONDS)
            else:
                reports.append(report)
        self.commit(reports)

    def commit(self, reports: Sequence[Any]) -> None:
        """On rank 0, when all ranks have written their files."""
        manifest = joined(self._about, self._assignment, reports, self.target.stored_name)
        data = manifest.as_readable_bytes()
        with report_write_errors(self.place):
            with_retries(lambda: self.target.commit(data, manifest.files), self._options.retries)
        with report_later_errors(self.place):
            with_retries(self.target.clean_up, self._options.retries)
            if self._options.then is not None:
                self._options.then()
