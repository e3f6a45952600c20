"""Kills ranks of the training that runs in this process, one after the other."""

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.train.events import Event, Restarting, Starting, Stepped
from tests.chaos.kill import Kill

FINAL = re.compile(r"step-\d{8}|latest")
_RANK = "echelon rank "


class Killer:
    """A thread that waits for the moment of each kill; `show` is for `train`."""

    def __init__(self, kills: Sequence[Kill]) -> None:
        self.done: list[Kill] = []
        self.pids: set[int] = set()  # of ranks that were seen
        self.problems: list[str] = []
        self._kills = list(kills)
        self._others = {each.pid for each in rank_processes()}  # of other tests
        self._run: Path | None = None
        self._step, self._starts = 0, 0
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="killer", daemon=True)
        self._thread.start()

    def show(self, event: Event) -> None:
        match event:
            case Starting(run):
                self._run, self._starts = Path(run), 1
            case Restarting():
                self._starts += 1
                self._step = 0
            case Stepped():
                self._step = event.step

    def stop(self) -> None:
        """End the thread. A kill that no restart followed came after the end, and does not count."""
        self._is_over = True
        self._thread.join()
        del self.done[max(0, self._starts - 1) :]

    def _work(self) -> None:
        for kill in self._kills:
            starts = self._starts
            while not self._is_over and not self._is_moment(kill):
                time.sleep(0.0005)
            time.sleep(kill.delay)
            if self._is_over or not self._kill(kill):
                continue
            self.done.append(kill)
            while not self._is_over and self._starts == max(starts, 1):  # one fault at a time
                time.sleep(0.002)

    def _is_moment(self, kill: Kill) -> bool:
        ranks = self._ranks()
        self.pids |= set(ranks.values())
        if not ranks or self._run is None:
            return False
        if kill.moment == "start":
            return True
        if self._step < kill.step:
            return False
        return kill.moment == "step" or self._is_saving()

    def _is_saving(self) -> bool:
        assert self._run is not None
        if _is_copied(MemoryFolder(self._run)):
            return True
        try:
            names = os.listdir(self._run / "checkpoints")
        except FileNotFoundError:
            return False
        return not all(FINAL.fullmatch(name) for name in names)

    def _kill(self, kill: Kill) -> bool:
        ranks = self._ranks()
        self.pids |= set(ranks.values())
        if not ranks:
            return False
        try:
            os.kill(ranks[sorted(ranks)[kill.rank % len(ranks)]], signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _ranks(self) -> dict[int, int]:
        """The process of each rank of the training."""
        return {
            int(each.name.removeprefix(_RANK)): each.pid
            for each in rank_processes()
            if each.pid is not None and each.pid not in self._others
        }


def _is_copied(memory: MemoryFolder) -> bool:
    """Whether a rank writes its copy in memory: the file has no manifest yet."""
    whole = {memory.file(entry.slot, entry.rank) for entry in memory.entries()}
    return any(path not in whole for path in memory.path.glob("*/*.safetensors"))


def rank_processes() -> list[BaseProcess]:
    """Those that this process has started."""
    children = multiprocessing.process._children  # type: ignore[attr-defined]  # active_children() would reap them
    return [each for each in list(children) if each.name.startswith(_RANK)]
