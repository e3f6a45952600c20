"""One rank as the parent sees it: its process, its pipe, its end.

What a rank does inside is in `worker.py`; what its messages mean for the run is in `ranks.py`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from echelon.launching import failure, guard, worker
from echelon.launching.channel import STOP, Answer, Told
from echelon.launching.failure import Failure, Kind
from echelon.launching.preloading import fork_server_context
from echelon.launching.transport import unpack

Message = Answer | Told | Failure

_TERM_SECONDS = 1.0  # for handlers of SIGTERM that a user's function may have set
_STOP_SECONDS = 10.0  # for a rank that was asked to stop
_STACKS_SECONDS = 1.0


class Member:
    """One rank: `start` it, `call` it, `hear` it; `stop_all` or `kill_all` end it."""

    def __init__(self, seat: worker.Seat) -> None:
        context = fork_server_context()
        self.rank = seat.rank
        self._seat = seat
        self._connection, self._theirs = context.Pipe()
        # Not a daemon: those may have no children, and a rank may have data workers.
        self.process = context.Process(
            target=worker.main,
            args=(seat, self._theirs),
            name=f"{guard.PROCESS_NAME} {seat.rank}",
            daemon=False,
        )
        self._talking = True  # until the pipe ends
        self._joined = False  # it has joined the process group, so its first answer was heard

    def start(self) -> None:
        self.process.start()
        self._theirs.close()

    @property
    def started(self) -> bool:
        return self.process.pid is not None

    @property
    def alive(self) -> bool:
        return self.started and self.process.is_alive()

    @property
    def sources(self) -> list[Connection | int]:
        """What becomes readable when `hear` has something to return."""
        return [self._connection, self.process.sentinel] if self._talking else [self.process.sentinel]

    def call(self, data: bytes) -> None:
        """Ask for an answer; where the rank is dead already, `hear` will say so."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def hear(self) -> Message | None:
        """The next thing this rank said; its death comes after all it had to say."""
        gone = not self.alive  # asked first, so that nothing is said after it
        if self._talking and self._connection.poll():
            return self._receive()
        return self._death() if gone else None

    def _receive(self) -> Message | None:
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._talking = False
            return None
        try:
            message: Message = unpack(data)
        except Exception as error:  # whatever the class of a user's value raises
            reason = f"sent a value that cannot be rebuilt here: {type(error).__name__}: {error}"
            return Failure(self.rank, Kind.RAISED, reason)
        self._joined = True
        return message

    def _death(self) -> Failure:
        code = self.process.exitcode
        assert code is not None
        if code == guard.EXIT_CODE and not self._joined:
            reason = "imported a main module that launches ranks"
            return Failure(self.rank, Kind.DIED, reason, user_error=guard.unguarded())
        return failure.from_exit_code(self.rank, code, while_starting=not self._joined)

    def ask_for_stacks(self) -> None:
        """Let the rank write where all its threads are; without its file it has no handler yet."""
        if self._seat.stacks.exists():
            self._send(os.kill, worker.STACKS_SIGNAL)

    def stacks(self) -> str:
        """What the rank wrote since it was asked."""
        return self._seat.stacks.read_text() if self._seat.stacks.exists() else ""

    def send_signal(self, number: int) -> None:
        """To the rank and to all that it started."""
        if self.alive:
            self._send(os.kill, number)  # in its first moments a rank has no group of its own
        self._send(os.killpg, number)  # a dead one may have left data workers

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
            send(self.process.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process, which has been killed."""
        self.process.join()
        self._theirs.close()
        self._connection.close()


def stop_all(members: Sequence[Member]) -> None:
    """End ranks that are idle: ask, wait, and leave nothing they started behind."""
    for member in members:
        member.call(STOP)
    _await_end(members, _STOP_SECONDS)
    kill_all(members)


def kill_all(members: Sequence[Member]) -> None:
    """End ranks whatever they do, and all that they started."""
    started = [member for member in members if member.started]  # all of them, unless starting was cut short
    for member in started:
        if member.alive:
            member.send_signal(signal.SIGTERM)
    _await_end(started, _TERM_SECONDS)
    for member in started:
        member.send_signal(signal.SIGKILL)  # to dead ranks too: their data workers may live on
        member.reap()


def collect_stacks(members: Sequence[Member]) -> str:
    """Where every thread of every rank is now, under a heading for each rank."""
    for member in members:
        member.ask_for_stacks()
    give_up = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < give_up and not all(member.stacks() for member in members):
        time.sleep(0.02)
    time.sleep(0.1)  # a file that has begun is whole a moment later
    return "\n\n".join(f"stacks of rank {member.rank}:\n{member.stacks()}" for member in members)


def _await_end(members: Sequence[Member], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while (alive := [member for member in members if member.alive]) and (
        left := give_up - time.monotonic()
    ) > 0:
        wait([member.process.sentinel for member in alive], timeout=left)
