"""One rank as the parent sees it: its process, its pipe, its end.

What a rank does inside is in `worker.py`; what its messages mean for the run is in `ranks.py`.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from echelon.errors import UserError
from echelon.launching import worker
from echelon.launching.channel import STOP, Answer, Message, RankOutput, streams_without_file
from echelon.launching.packing import hidden_main_file, unpack
from echelon.launching.preloading import fork_server_context
from echelon.launching.watch import failure
from echelon.launching.watch.failure import Failure, Kind

Event = Answer | Message | Failure

_TERM_SECONDS = 1.0  # for SIGTERM handlers that a user's function may have installed
_STOP_SECONDS = 10.0  # for a rank that was asked to stop
_STACKS_SECONDS = 1.0
_REAP_SECONDS = 10.0  # a process that was killed inside the driver of a GPU ends when the driver lets it


class RankProcess:
    """One rank: `start` it, `call` it, `poll` it; `stop_all` or `kill_all` end it."""

    def __init__(self, config: worker.RankConfig) -> None:
        context = fork_server_context()
        self.rank = config.rank
        self._config = config
        self._connection, self._rank_connection = context.Pipe()
        self._output = RankOutput(streams_without_file() if self.rank == 0 else [])
        # Not a daemon: a daemon may have no children, and a rank may have data workers.
        self.process = context.Process(
            target=worker.main,
            args=(config, self._rank_connection, self._output.writers),
            name=f"{PROCESS_NAME} {config.rank}",
            daemon=False,
        )
        self._pipe_is_open = True
        self._has_joined = False  # the process group: the rank has sent its first answer

    def start(self) -> None:
        with hidden_main_file():
            self.process.start()
        self._rank_connection.close()
        self._output.close_writers()

    @property
    def is_started(self) -> bool:
        return self.process.pid is not None

    @property
    def is_alive(self) -> bool:
        return self.is_started and self.process.is_alive()

    @property
    def sources(self) -> list[Connection | int]:
        """Return what becomes readable when `poll` has something to return."""
        end = self.process.sentinel
        pipes = [self._connection, *self._output.sources] if self._pipe_is_open else self._output.sources
        return [*pipes, end]

    def call(self, data: bytes) -> None:
        """Ask for an answer; if the rank is dead already, `poll` returns its failure."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def poll(self) -> Event | None:
        """Return the next event of this rank, if there is one. Its death comes after all that it sent."""
        is_dead = not self.is_alive  # checked first: a dead rank sends nothing after this
        self._output.forward()
        if self._pipe_is_open and self._connection.poll():
            return self._receive()
        if not is_dead:
            return None
        code = self.process.exitcode
        assert code is not None
        if code == UNGUARDED_EXIT_CODE and not self._has_joined:
            reason = "imported a main module that launches ranks"
            return Failure(self.rank, Kind.DIED, reason, user_error=missing_guard_error())
        return failure.from_exit_code(self.rank, code, while_starting=not self._has_joined)

    def _receive(self) -> Event | None:
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._pipe_is_open = False
            return None
        self._output.forward()  # a rank sends after it has written
        try:
            event: Event = unpack(data)
        except Exception as error:  # whatever the class of a user's value raises
            reason = f"sent a value that cannot be rebuilt here: {type(error).__name__}: {error}"
            return Failure(self.rank, Kind.RAISED, reason)
        self._has_joined = True
        return event

    def request_stacks(self) -> None:
        """Let the rank write where all its threads are. Before its file exists it has no signal handler."""
        if self._config.stacks.exists():
            self._send(os.kill, worker.STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return what the rank has written since `request_stacks`."""
        return self._config.stacks.read_text() if self._config.stacks.exists() else ""

    def send_signal(self, number: int, *, to_rank_alone: bool = False) -> None:
        """Send a signal to the rank, and to all that it started."""
        if self.is_alive:
            self._send(os.kill, number)  # at its very start a rank has no process group of its own
        if not to_rank_alone:
            self._send(os.killpg, number)  # a dead rank may have left data workers

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
            send(self.process.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process, which has been killed, but not long: its error must be raised."""
        if self.is_started:
            self.process.join(_REAP_SECONDS)
        self._rank_connection.close()
        self._connection.close()
        self._output.close()


def stop_all(processes: Sequence[RankProcess]) -> None:
    """End idle ranks: ask them, wait, and leave nothing behind that they started."""
    for process in processes:
        process.call(STOP)
    _await_end(processes, _STOP_SECONDS)
    kill_all(processes)


def kill_all(processes: Sequence[RankProcess], *, at_once: bool = False) -> None:
    """End ranks, whatever they do, and all that they started. Without `at_once`, they may handle SIGTERM."""
    started = [process for process in processes if process.is_started]  # an error may have ended the start
    if not at_once:
        for process in started:
            if process.is_alive:
                process.send_signal(signal.SIGTERM)
        _await_end(started, _TERM_SECONDS)
    for process in started:
        process.send_signal(signal.SIGKILL)  # dead ranks too: their data workers may still live
    for process in processes:  # all are killed before one is waited for: leaving a GPU takes time
        process.reap()


def collect_stacks(processes: Sequence[RankProcess]) -> list[str]:
    """Return the stacks of every rank's threads, in rank order; '' for a rank that does not write in time.

    A signal handler in C writes them, so the rank may be inside a call that never returns.
    """
    for process in processes:
        process.request_stacks()
    give_up = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < give_up and not all(process.stacks() for process in processes):
        time.sleep(0.02)
    time.sleep(0.1)  # for the ranks to finish what they have begun to write
    return [process.stacks() for process in processes]


def _await_end(processes: Sequence[RankProcess], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while (alive := [process for process in processes if process.is_alive]) and (
        remaining := give_up - time.monotonic()
    ) > 0:
        wait([process.process.sentinel for process in alive], timeout=remaining)


# A main module that launches ranks while a rank imports it. A rank imports the main module to find functions
# in it; without the `if __name__ == "__main__":` line every rank would launch ranks. The rank detects this,
# and the parent explains it.

PROCESS_NAME = "echelon rank"  # a process with this name that imports the main module is a rank
UNGUARDED_EXIT_CODE = 97  # a rank has no pipe to its parent yet: the exit code is all that it can report


def refuse_while_main_is_imported() -> None:
    """Refuse to launch during the import of the main module, when a rank is still starting."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # multiprocessing sets this during that import
        return
    if process.name.startswith(PROCESS_NAME):
        os._exit(UNGUARDED_EXIT_CODE)  # the parent raises the error once, instead of every rank
    raise missing_guard_error()


def missing_guard_error() -> UserError:
    """Return the error, with the wrong and the right code."""
    return UserError(
        "The main module launches ranks while it is imported, and every rank imports it:\n"
        "\n"
        "    echelon.launch(main, ranks=4)          # wrong: runs in every rank again\n"
        "\n"
        '    if __name__ == "__main__":             # right: runs only in the script itself\n'
        "        echelon.launch(main, ranks=4)"
    )
