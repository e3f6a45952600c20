"""The watchdog of a rank that another launcher started (torchrun): a thread that ends a job which hangs.

No parent sees these ranks, so each one watches. They share signs of life through the store that they met at,
over connections of their own: the main thread may wait in the store, and nothing else listens anywhere.

    every second      each rank adds 1 to `signs` if it has done something since, and 1 to its own heart beat;
                      it reads `signs`, and the heart beat of the next rank
    alarm             by a rank that waits for others (in an operation, or for its GPU) while `signs` does
                      not change for `deadline` seconds; by the rank before one whose heart does not beat;
                      by a rank that raises an error and ends
    after an alarm    each rank says where it is, reads what the others said, prints one report, and ends,
                      when all have printed, or a few seconds later

A rank that works outside any operation, as long as it likes, raises no alarm: only one that waits for it.
The watchdog starts when its process joins the ranks of torchrun, and retires when it leaves them.
"""

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.launching.watch import pulse
from echelon.launching.watch.failure import is_peer_error
from echelon.launching.watch.hang import Ending, Findings, report_text
from echelon.launching.watch.pulse import Pulse

EXIT_CODE = 1

_ALARM = 1 << 40  # added to `signs`, which no job reaches by itself
_RANKS_PER_SECOND = 1000  # that one store serves
_ANSWER_SECONDS = 5.0  # for the ranks to say where they are, and to print it
_GRACE_SECONDS = 1.0  # after a failure, for the root cause to arrive, and for errors that all ranks raise
_LOST_SECONDS = 300.0  # without a heart beat; a call into C may keep the interpreter from other threads
_SHORTEST_LOST_SECONDS = 30.0
_START_SECONDS = 120.0  # ranks import modules before they join, and give no sign of life meanwhile

WhenEnded = Callable[[str], object]


class Watchdog:
    """Watches the ranks of one process group from inside one of them.

    `store` is for this watchdog alone. `read_pulse` says what this rank does; `is_device_busy` whether its
    GPU has work that is not done; `is_over` whether the process group is gone. `end` ends the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        deadline: float,
        read_pulse: Callable[[], Pulse],
        *,
        is_device_busy: Callable[[], bool] = lambda: False,
        is_over: Callable[[], bool] = lambda: False,
        end: Callable[[int], object] = os._exit,
        write: Callable[[str], object] | None = None,
        lost_seconds: float | None = None,
        main: threading.Thread | None = None,
    ) -> None:
        self._store = store
        self._rank, self._ranks, self._deadline = rank, ranks, deadline
        self._read_pulse, self._is_device_busy, self._is_over = read_pulse, is_device_busy, is_over
        self._end, self._write = end, write or _write_error
        self._lost_seconds = lost_seconds or max(min(deadline, _LOST_SECONDS), _SHORTEST_LOST_SECONDS)
        self._main = main or threading.main_thread()
        self.when_ended: list[WhenEnded] = []  # called with the reason before the process ends
        self.is_joining = False  # ranks may still be on their way to the process group
        self._neighbour = (rank + 1) % ranks
        self._last_pulse = read_pulse()
        self._last_signs = self._last_heart = 0
        self._last_sign = self._last_beat = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-watchdog", daemon=True)

    @property
    def period(self) -> float:
        return max(min(self._deadline / 10, 1.0), self._ranks / _RANKS_PER_SECOND)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Leave the job: this rank is done; may be called twice."""
        self._retire(Ending("has ended"))

    def fail(self, reason: str, *, lost_peer: bool = False) -> None:
        """This rank ends with an error ('raised KeyError …'): tell the others, and let them say so first."""
        if not self._retire(Ending(reason, has_failed=True, lost_peer=lost_peer)):
            return
        with contextlib.suppress(RuntimeError):
            self._raise_alarm(f"rank {self._rank} {reason}")
            patience = self.period + _GRACE_SECONDS + _ANSWER_SECONDS
            self._await(lambda: self._count("printed") + self._count("ended") >= self._ranks, patience)

    def _retire(self, ending: Ending) -> bool:
        """Stop watching; False if that was done before."""
        if self._stop.is_set():
            return False
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the store may be gone
            text = json.dumps([ending.reason, ending.has_failed, ending.lost_peer])
            self._store.set(f"ended/{self._rank}", text)
            self._store.add("ended", 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_SECONDS)
        return True

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.period):
                if self._is_over():
                    self.leave()
                elif self._is_alarmed():
                    self._report()
                    return
        except RuntimeError as error:  # of the store; the rank that held it has ended, and the others with it
            if not self._stop.is_set() and not self._is_over():
                self._end_with(
                    Findings(f"the store of the job is gone: {error}", self._ranks, *self._own(), {})
                )

    def _is_alarmed(self) -> bool:
        """Give and read signs of life; return whether an alarm is raised, also by this rank."""
        pulse, now = self._read_pulse(), time.monotonic()
        signs = self._store.add("signs", int(pulse != self._last_pulse))
        self._last_pulse = pulse
        if signs >= _ALARM:
            return True
        if signs != self._last_signs:
            self._last_signs, self._last_sign = signs, now
        reason = self._lost_neighbour(now)
        limit = self._start_limit if self.is_joining else self._deadline
        if now - self._last_sign > limit and (pulse.waits or self._is_device_busy()):
            reason = f"no rank gave a sign of life for {limit:g} s"
        if reason:
            self._raise_alarm(reason)
        return bool(reason)

    @property
    def _start_limit(self) -> float:
        return max(self._deadline, _START_SECONDS)

    def _lost_neighbour(self, now: float) -> str:
        """Why the next rank is lost; '' if it lives, or has ended in order."""
        self._store.add(f"heart/{self._rank}", 1)
        heart = self._store.add(f"heart/{self._neighbour}", 0)
        if heart != self._last_heart:
            self._last_heart, self._last_beat = heart, now
        silence, limit = now - self._last_beat, self._lost_seconds if heart else self._start_limit
        if silence <= limit or self._neighbour == self._rank:
            return ""
        if self._store.check([f"ended/{self._neighbour}"]):
            self._neighbour, self._last_beat = (self._neighbour + 1) % self._ranks, now
            return ""
        trouble = "has been silent" if heart else "has not joined"
        return f"rank {self._neighbour} {trouble} for {limit:g} s"

    def _raise_alarm(self, reason: str) -> None:
        self._store.compare_set("alarm", "", reason)  # the first counts
        self._store.add("signs", _ALARM)

    def _report(self) -> None:
        """Say where this rank is, read where the others are, print it, and end."""
        reason = self._store.get("alarm").decode()
        if self._count("ended"):
            self._stop.wait(_GRACE_SECONDS)
        if self._stop.is_set():  # this rank ends by itself, with an error of its own
            return
        pulses, frames = self._own()
        self._store.set(f"stack/{self._rank}", self._stack())
        self._store.set(f"place/{self._rank}", json.dumps([pulses[self._rank], frames[self._rank]]))
        self._store.add("answered", 1)
        self._await(lambda: self._count("answered") + self._count("ended") >= self._ranks, _ANSWER_SECONDS)
        self._end_with(self._gather(reason))

    def _gather(self, reason: str) -> Findings:
        pulses: dict[int, Pulse] = {}
        frames: dict[int, str] = {}
        endings: dict[int, Ending] = {}
        for rank in range(self._ranks):
            if (text := self._try_get(f"ended/{rank}")) is not None:
                endings[rank] = Ending(*json.loads(text))
            elif (text := self._try_get(f"place/{rank}")) is not None:
                pulse, frames[rank] = json.loads(text)
                pulses[rank] = Pulse(*pulse)
        return Findings(reason, self._ranks, pulses, frames, endings)

    def _end_with(self, findings: Findings) -> None:
        to_blame = findings.to_blame()[0]
        stacks = {}
        if to_blame in findings.pulses and to_blame != self._rank:
            stacks[to_blame] = self._try_get(f"stack/{to_blame}") or ""
        stacks[self._rank] = self._stack()
        self._write(report_text(findings, self._rank, stacks, EXIT_CODE))
        for call in self.when_ended:
            with contextlib.suppress(Exception):
                call(findings.reason)
        with contextlib.suppress(RuntimeError):  # the rank that ends first takes the others with it
            self._store.add("printed", 1)
            self._await(lambda: self._count("printed") >= self._count("answered"), _ANSWER_SECONDS)
            if any(ending.has_failed for ending in findings.endings.values()):
                # torchrun names the rank that ends first, so that rank may; then torchrun ends this one.
                self._stop.wait(_ANSWER_SECONDS)
        self._end(EXIT_CODE)

    def _own(self) -> tuple[dict[int, Pulse], dict[int, str]]:
        frame, place = sys._current_frames().get(self._main.ident or 0), ""
        if frame is not None:
            code = frame.f_code
            place = f"in {code.co_name} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
        return {self._rank: self._read_pulse()}, {self._rank: place}

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _count(self, name: str) -> int:
        return self._store.add(name, 0)

    def _try_get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not condition() and time.monotonic() < give_up:
            time.sleep(0.05)


def _write_error(text: str) -> None:
    """Write at once, past buffers whose locks the main thread may hold; then what was printed before."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


_numbers = itertools.count()  # keeps the keys of one watchdog in a store apart from those of the next
_watchdog: Watchdog | None = None
_watched: "weakref.ref[dist.ProcessGroup] | None" = None


@contextmanager
def watching_joining_ranks(store: Store, rank: int, ranks: int, deadline: float | None) -> Iterator[None]:
    """Start this rank's watchdog; the process group of the world is joined inside.

    torch would abort a rank whose NCCL watchdog is stuck for 8 minutes. This one must find the ranks alive
    when the deadline has passed, to name what each one waits for.
    """
    if ranks > 1 and deadline is not None:
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        _start(store, rank, ranks, deadline, is_joining=True)
    pulse.enter_operation("join all")
    try:
        yield
    finally:
        pulse.leave_operation()
    _watch_world_of_now()
    if _watchdog is not None:
        _watchdog.is_joining = False


def watch_world(deadline: float | None) -> None:
    """Start a watchdog over a process group that is initialised already, if it has none."""
    world = dist.group.WORLD
    assert world is not None
    if world.size() == 1 or deadline is None or (_watched is not None and _watched() is world):
        return
    _start(dist.distributed_c10d._get_default_store(), world.rank(), world.size(), deadline)
    _watch_world_of_now()


def when_ended(call: WhenEnded) -> None:
    """Let this rank's watchdog, if there is one, call this with the reason before it ends the process."""
    if _watchdog is not None:
        _watchdog.when_ended.append(call)


def report_failure(reason: str) -> None:
    """This process ends with an error ('raised KeyError …'): the others must not wait for it."""
    if _watchdog is not None:
        _watchdog.fail(reason)


def _start(store: Store, rank: int, ranks: int, deadline: float, *, is_joining: bool = False) -> None:
    global _watchdog, _watched
    if _watchdog is None:
        atexit.register(_retire)
    else:
        _watchdog.leave()
    pulse.take_private_slot()
    # A connection of its own: the main thread may wait in the store for as long as it takes.
    own = PrefixStore(f"echelon/watchdog/{next(_numbers)}", store.clone())  # type: ignore[attr-defined]
    _watched = None
    _watchdog = Watchdog(
        own, rank, ranks, deadline, pulse.read_own, is_device_busy=_is_device_busy, is_over=_is_over
    )
    _watchdog.is_joining = is_joining
    _watchdog.start()


def _watch_world_of_now() -> None:
    global _watched
    world = dist.group.WORLD
    _watched = None if world is None else weakref.ref(world)


def _is_over() -> bool:
    """Return whether the user has left the process group, and may do anything for any time."""
    return _watched is not None and (_watched() is None or _watched() is not dist.group.WORLD)


def _is_device_busy() -> bool:
    """Return whether kernels are not done: over NCCL the device waits for other ranks, not the host."""
    return torch.cuda.is_initialized() and not torch.cuda.default_stream(_device()).query()


def _device() -> torch.device:
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    return bound or torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _retire() -> None:
    """At exit: tell the others whether it is with an error."""
    assert _watchdog is not None
    error = getattr(sys, "last_value", None)
    if error is None:
        _watchdog.leave()
    else:
        headline = "".join(traceback.format_exception_only(error)).strip()
        _watchdog.fail(f"raised {headline}", lost_peer=is_peer_error(error))
