"""Trainings that end early: after a SIGTERM, or by time.

SIGTERM: all ranks stop after the same step, without a message per step. One rank may get the signal, or all.
A thread of each rank watches the store of the process group:

    rank 1   SIGTERM, sets "asked"
    rank 0   sees it; has begun step 12, begins no other; sets "begun-0" = 12
    rank 1   sees it; has begun step 13, begins no other; sets "begun-1" = 13
    rank 0   reads all of these, sets "last" = 13
    all      train up to step 13, save, and end

Threads answer while training waits for another rank, so no rank waits in vain.

`minutes`: after the first steps of a training rank 0 counts how many fit, for all ranks.

    minutes = 1.5     steps 1 … 10 at full speed, the last ones 0.7 s each     so 118 of 600 steps

Then it is a training of so many steps: the learning rate falls to its floor with the last one; run.json
has the number, so that a restart and --resume go on with it. Minutes are those of steps, not of what comes
before the first one and after the last.
"""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.collectives.agreement import agree_on_every_rank
from echelon.launching import Ranks, is_launched_rank
from echelon.train.jobs.job import MEASURED_STEPS, Job
from echelon.train.runs.run_folder import read_about

_PERIOD_SECONDS = 0.2
_AGREE_SECONDS = 15.0  # for the threads of all ranks to answer; if one does not, it is gone
_TWICE_SECONDS = 1.0  # `timeout` and others send a signal twice, within this time


@final
class StopRequest:
    """`with StopRequest.of_ranks() as stop:`, then ask `may_begin(step)` before each step."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._begun, self._is_held, self._is_signalled = 0, False, False
        self._lock = threading.Lock()
        self._agreed, self._closed = threading.Event(), threading.Event()
        self._last = 0
        self._thread = threading.Thread(target=self._watch, name="echelon-stop-request", daemon=True)

    @classmethod
    def of_ranks(cls) -> "StopRequest":
        # A connection of its own: in the other one, training may wait for a rank that waits for this.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        return cls(PrefixStore("echelon/stop", store), dist.get_rank(), dist.get_world_size())

    def may_begin(self, step: int) -> bool:
        """Return whether to train `step`; if not, the step before it is the last, on every rank."""
        with self._lock:
            if not self._is_held:
                self._begun = step
                return True
        self._agreed.wait()
        return step <= self._last

    def ask(self) -> None:
        """Ask all ranks to stop. Also a signal handler may call this."""
        self._is_signalled = True

    def __enter__(self) -> "StopRequest":
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
                signal.signal(signal.SIGTERM, on_sigterm(self.ask, _end_now))
            self._thread.start()
            self._undo = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed.set()
        self._undo.close()
        if kind is None:
            self._thread.join()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone, with its rank: training finds that out too
            while not self._closed.wait(_PERIOD_SECONDS):
                if self._is_signalled:
                    self._store.set("asked", "")
                if self._store.check(["asked"]):
                    self._agree()
                    return

    def _agree(self) -> None:
        with self._lock:
            self._is_held = True
            begun = self._begun
        try:
            self._store.set(f"begun-{self._rank}", str(begun))
            if self._rank == 0:
                self._store.set("last", str(max(self._read(f"begun-{rank}") for rank in range(self._ranks))))
            self._last = self._read("last")
        except RuntimeError:  # a rank is gone, or all have ended meanwhile
            if not self._closed.is_set():
                os._exit(128 + signal.SIGTERM)
        self._agreed.set()

    def _read(self, key: str) -> int:
        self._store.wait([key], timedelta(seconds=_AGREE_SECONDS))
        return int(self._store.get(key))


def on_sigterm(
    first: Callable[[], None], second: Callable[[], None]
) -> Callable[[int, FrameType | None], None]:
    """A signal handler: it calls `first`, and at another signal, some time later, `second`."""
    since: list[float] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not since:
            since.append(now)
            first()
        elif now - since[0] > _TWICE_SECONDS:
            second()

    return handle


def _end_now() -> None:
    """The launcher of a launched rank ends it; in other processes a second signal ends this one."""
    if not is_launched_rank():
        os.write(2, b"echelon: a second SIGTERM ends this rank at once; the last whole checkpoint is there\n")
        os._exit(128 + signal.SIGTERM)


@final
class Sigterm:
    """SIGTERM goes on to the ranks, when all of them handle it; another one, later, is what it was before."""

    def __init__(self) -> None:
        self.came = False
        self.is_forwarded = False  # to all ranks: they have begun, and save
        self.is_answered = False  # all is saved: another one has nothing to end
        self._ranks: Ranks | None = None
        self._listeners: set[int] = set()

    def __enter__(self) -> "Sigterm":
        self._is_heard = threading.current_thread() is threading.main_thread()
        if self._is_heard:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, on_sigterm(self._forward, self._give_back))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_heard:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def forwarded_to(self, ranks: Ranks) -> Iterator[None]:
        self._ranks, self._listeners = ranks, set()
        try:
            yield
        finally:
            self._ranks = None

    def add_listener(self, rank: int) -> None:
        """From now on this rank handles the signal, which may have come before."""
        self._listeners.add(rank)
        if self.came:
            self._forward()

    def _forward(self) -> None:
        self.came = True
        if self._ranks is not None and len(self._listeners) == self._ranks.size:
            self.is_forwarded = True
            self._ranks.send_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        if not self.is_answered:
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)


_TYPICAL = 5  # of the measured steps, the last ones: the first ones are audited, and measure memory
_SHARE = 0.9  # of the time for steps; the rest is for validations, checkpoints and later audits


def limited_job(job: Job, folder: Path) -> Job:
    """The job with as many steps as were counted for this run before, if they were; the same on all ranks."""
    if job.minutes is None:
        return job
    steps = agree_on_every_rank(lambda: None, lambda _: _known_steps(folder))
    return job if steps is None else with_steps(job, int(steps))


def with_steps(job: Job, steps: int) -> Job:
    """The warm-up stays: the first steps of it are made."""
    optimizer = dataclasses.replace(job.optimizer, warmup=job.warmup)
    return dataclasses.replace(job, steps=steps, minutes=None, optimizer=optimizer)


def _known_steps(folder: Path) -> int | None:
    job: Any = (read_about(folder) or {}).get("job")
    if not isinstance(job, dict) or "minutes" in job or not isinstance(job.get("steps"), int):
        return None
    return int(job["steps"])


@final
class TimeLimit:
    """Counts the steps that fit. Made before the first step; all ranks call `after` behind each one."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self._times = [clock()]

    def after(self, step: int) -> int | None:
        """Return how many steps there are in all, when this is known: once."""
        if self._job.minutes is None or len(self._times) > MEASURED_STEPS:
            return None
        self._times.append(self._clock())
        if len(self._times) <= MEASURED_STEPS:
            return None
        return int(agree_on_every_rank(lambda: None, lambda _: self._count(step)))

    def _count(self, step: int) -> int:
        assert self._job.minutes is not None
        last = self._times[-_TYPICAL - 1 :]
        each = median(end - begin for begin, end in pairwise(last))
        left = 60 * self._job.minutes - (self._times[-1] - self._times[0])
        more = int(max(0.0, _SHARE * left) / max(each, 1e-9))
        least = self._job.warmup + (self._job.optimizer.decay or 0)  # of the schedule
        return min(self._job.steps, max(step + more, least))
