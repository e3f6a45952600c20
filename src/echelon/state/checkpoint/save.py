"""Saves of an engine: every rank writes its part, then rank 0 the manifest, and the checkpoint gets its name.

    all ranks    agree on a temporary place, and on which rank writes what (exchanged again only if changed)
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
from multiprocessing.util import Finalize
from pathlib import Path
from typing import final

import torch

from echelon.collectives import Group
from echelon.collectives.agreement import agree_on_every_rank, check_on_every_rank
from echelon.errors import UserError
from echelon.launching import beat
from echelon.state.checkpoint.assignment import Assignment, assign, signature
from echelon.state.checkpoint.atomic import new_token
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.part_writer import StoppedError
from echelon.state.checkpoint.rank_save import RankSave, SaveOptions
from echelon.state.checkpoint.snapshot import Snapshot, SnapshotMemory
from echelon.state.checkpoint.storage_errors import report_write_errors
from echelon.state.checkpoint.target import Target, target_at
from echelon.state.ownership import OwnedSlice

_END_SECONDS = 5.0  # a failed engine waits so long for its writer
_EXIT_SECONDS = 600.0  # a program that ends without `finish`


@final
class _BackgroundSave:
    def __init__(self, save: RankSave, snapshot: Snapshot) -> None:
        self.place, self.snapshot = save.place, snapshot
        self.error: Exception | None = None
        self._save = save
        self.is_part_done, self._stop = threading.Event(), threading.Event()  # or its part has failed
        self._thread = threading.Thread(target=self._work, name="echelon-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        try:
            self.snapshot.wait()
            self._check_unchanged()
            self._save.write_snapshot(self.snapshot, self._stop.is_set)
            self.is_part_done.set()
            self._save.commit_when_all_are_done(self._stop.is_set)
        except StoppedError:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.is_part_done.set()

    def _check_unchanged(self) -> None:
        if self.snapshot.changed:
            raise UserError(
                f"{self.place}: the checkpoint is not saved: {', '.join(self.snapshot.changed[:3])} changed "
                "while it was copied; after a save with copy_behind=True nothing but engine.step may change "
                "weights or optimizer state before the next step has ended: save without it, or change them "
                "after that step"
            )

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def give_up(self, rank: int) -> None:
        """Stop the thread, and remove what was written."""
        self._stop.set()
        if self.join(_END_SECONDS) and rank == 0:
            self._save.target.abandon()


@final
class Saver:
    """The saves of an engine: their memory, which rank writes what, and the one that is under way."""

    def __init__(self, group: Group, device: torch.device, *, has_server: bool = False) -> None:
        """`has_server`: steps of other ranks change what this one owns, as those of asynchronous workers."""
        self._group, self._device, self._has_server = group, device, has_server
        self._assignment: Assignment | None = None
        self._memory = SnapshotMemory(device)
        self._running: _BackgroundSave | None = None
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
            if self._assignment is None or not is_same:
                self._assignment = assign(owned, self._group, self._device)
            save = RankSave(str(path), target, self._assignment, about, self._group, owned, options)
            if options.wait:
                agree_on_every_rank(lambda: save.write(self._device), save.commit)
            else:
                running = _BackgroundSave(save, self._take_snapshot(save))
                self._finish_at_exit()
                running.start()
                self._running = running
        except BaseException:
            if self._group.rank == 0:
                target.abandon()
            raise

    def _begin(
        self, path: str | Path, owned: Sequence[OwnedSlice], about: Manifest, begun: list[Target]
    ) -> tuple[str, bool]:
        """Return a token for the temporary place of rank 0; and whether all ranks own what they did."""
        owned_now = signature(owned)

        def decide(is_same: list[bool]) -> tuple[str, bool]:
            about.as_readable_bytes(is_whole=False)
            token = new_token()
            begun.append(target_at(path, token))
            with report_write_errors(path):
                begun[0].begin()
            return token, all(is_same)

        token, is_same = agree_on_every_rank(
            lambda: self._assignment is not None and self._assignment.signature == owned_now, decide
        )
        return token, is_same

    def _take_snapshot(self, save: RankSave) -> Snapshot:
        """Copy this rank's part. With a server, all wait for every copy: the next push changes weights."""
        taken: list[Snapshot] = []

        def take() -> None:
            taken.append(save.snapshot(self._memory))
            taken[0].wait()

        if not self._has_server:
            return save.snapshot(self._memory)
        check_on_every_rank(take)
        return taken[0]

    def before_changes(self) -> None:
        """Return when what this rank does next comes after the copies of the save that is under way."""
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
            # First the parts of all ranks: rank 0's thread would wait forever for a rank whose part failed.
            for wait in (running.is_part_done.wait, running.join):
                _wait(wait)
                check_on_every_rank(running.raise_error)
        except BaseException:
            running.give_up(self._group.rank)
            raise

    def abandon(self) -> None:
        """Give up what is under way: other ranks may be gone."""
        if self._running is not None:
            running, self._running = self._running, None
            running.give_up(self._group.rank)

    def _finish_at_exit(self) -> None:
        """Register the end of a save with that of the program: its thread would end with it, in silence."""
        if not self._is_at_exit:
            self._is_at_exit = True
            # Also at the end of a process of `launch`, where atexit calls nothing.
            Finalize(None, _call, args=(weakref.WeakMethod(self._end),), exitpriority=100)

    def _end(self) -> None:
        """Finish this rank's part of what is under way, and say what went wrong; others may be gone."""
        if self._running is None:
            return
        running, self._running = self._running, None
        is_failing = getattr(sys, "last_value", None) is not None  # other ranks may never be done
        end = time.monotonic() + (_END_SECONDS if is_failing else _EXIT_SECONDS)
        while not (is_over := running.join(1.0)) and time.monotonic() < end:
            beat()
        error = running.error if is_over else "the program ended before it was written"
        if error is not None:
            print(
                f"echelon: the save to {running.place} failed: {error}; call engine.finish_saving() or "
                "engine.close() at the end of a program, which raise this",
                file=sys.stderr,
                flush=True,
            )


def _wait(wait: Callable[[float], bool]) -> None:
    """Wait as long as it takes; this rank is alive meanwhile."""
    while not wait(1.0):
        beat()


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    alive = method()
    if alive is not None:
        alive()
