"""`Ranks`: processes that run functions together, and the error when one of them fails; `launch` runs one.

One rank as a process is `rank_process.py`; what happens inside it is `worker.py`.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, Self, TypeVar

from echelon.errors import UserError, raise_errors
from echelon.launching import torchrun
from echelon.launching.channel import Answer, Message, is_launched_rank, pack_call
from echelon.launching.preloading import deferred_interrupts, fork_server_context
from echelon.launching.rank_process import (
    RankProcess,
    collect_stacks,
    kill_all,
    refuse_while_main_is_imported,
    stop_all,
)
from echelon.launching.settings import (
    FROM_ENVIRONMENT,
    Deadline,
    Environment,
    deadline_seconds,
    operation_seconds,
    variables_of,
)
from echelon.launching.watch import hang
from echelon.launching.watch.failure import Failure, RankFailed, RankHung, root_cause
from echelon.launching.watch.pulse import Board
from echelon.launching.worker import RankConfig

T = TypeVar("T")
OnMessage = Callable[[int, Any], None]

_START_SECONDS = 120.0  # every rank imports the main module, and gives no sign of life meanwhile
_LONGEST_FOLDER = 107 - len("/listener-12345678")  # of a socket's path, by the kernel's limit
_KILLS = 3  # tries to end ranks, of which Ctrl-C may interrupt the first
_GRACE_SECONDS = 0.5  # after the first failure, for the root cause to arrive


@dataclass
class _Replies:
    """The replies of the ranks to a call, by rank."""

    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class Ranks:
    """`ranks` processes on this machine that have joined one torch process group.

        with Ranks(4) as ranks:
            losses = ranks.run(train, config)       # what each rank returned, in rank order
            scores = ranks.run(evaluate, config)    # the same processes, still warm

    `deadline` is how many seconds may pass without a sign of life from any rank (None: no limit). Without it,
    ECHELON_DEADLINE of the environment says so, and else it is 1,800.
    `environment(rank)` has more environment variables for a rank, for example settings of NCCL.
    A failure in a run ends all ranks, and then these `Ranks` cannot be used again. They may handle SIGTERM
    before that, but for `kills_at_once`.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = None,
        deadline: Deadline = FROM_ENVIRONMENT,
        environment: Environment | None = None,
        kills_at_once: bool = False,
    ) -> None:
        refuse_while_main_is_imported()
        _check_arguments(ranks, deadline)
        overrides = [variables_of(environment, rank) for rank in range(ranks)]
        self._deadline = deadline_seconds(deadline)
        fork_server_context()  # before there is a folder: it removes those of a process that was killed
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-", dir=get_temp_dir()))
        self._processes: list[RankProcess] = []
        self._is_open, self._kills_at_once = True, kills_at_once
        # Runs before multiprocessing's own handler, which would wait for the ranks forever.
        atexit.register(self.close)
        with self._kill_on_error():
            self._start(backend, overrides)

    @property
    def size(self) -> int:
        return len(self._processes)

    def run(self, fn: Callable[..., T], *args: object, on_message: OnMessage | None = None) -> list[T]:
        """Call `fn(*args)` in every rank; return the results in rank order.

        While this waits, it calls `on_message(rank, content)` for each `send_message(content)` of a rank.
        """
        return self.run_packed(pack_call(fn, args), on_message)

    def run_packed(self, call: bytes, on_message: OnMessage | None = None) -> list[Any]:
        """`run` for a call that `pack_call` has packed already."""
        if not self._is_open:
            raise UserError("These ranks have ended (closed, or a run failed): make new Ranks to run more.")
        with self._kill_on_error():
            for process in self._processes:
                process.call(call)
            return self._await_answers(self._deadline, on_message)

    def close(self) -> None:
        """End the ranks, which are idle; may be called twice."""
        with self._kill_on_error():
            self._end(stop_all)

    def kill(self) -> None:
        """End the ranks, whatever they do; may be called twice."""
        interrupt = None
        for _ in range(_KILLS):
            try:
                with deferred_interrupts(10):  # an impatient user presses a button several times
                    self._end(partial(kill_all, at_once=self._kills_at_once))
                break
            except KeyboardInterrupt as error:  # deferred; or it came before it could be
                interrupt = error
                if not self._is_open:
                    break
        if interrupt is not None:
            raise interrupt

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank, but to nothing that ranks have started."""
        for process in self._processes:
            process.send_signal(number, to_rank_alone=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _start(self, backend: str | None, overrides: Sequence[dict[str, str]]) -> None:
        """Start the processes and wait until they have joined their group."""
        configs = [
            RankConfig(
                rank=rank,
                ranks=len(overrides),
                folder=self._folder,
                server_folder=Path(get_temp_dir()),
                backend=backend,
                timeout_seconds=operation_seconds(self._deadline),
                working_directory=os.getcwd(),
                environment=dict(os.environ),
                overrides=overrides[rank],
                same_environment=not any(overrides),
            )
            for rank in range(len(overrides))
        ]
        self._board = Board(configs[0].board, len(overrides))
        self._processes = [RankProcess(config) for config in configs]
        with deferred_interrupts(1):  # the first waits until all are known, so that they can be ended
            for process in self._processes:
                process.start()
        self._await_answers(None if self._deadline is None else max(self._deadline, _START_SECONDS))

    @contextmanager
    def _kill_on_error(self) -> Iterator[None]:
        """No rank outlives an error raised inside, Ctrl-C included."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def _end(self, end: Callable[[Sequence[RankProcess]], None]) -> None:
        if not self._is_open:
            return
        end(self._processes)
        self._is_open = False
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _await_answers(self, deadline: float | None, on_message: OnMessage | None = None) -> list[Any]:
        """One answer from every rank; raises if a rank fails or if all are silent for too long."""
        replies = _Replies()
        watch = hang.Watch(self._board, deadline)
        while len(replies.answers) < len(self._processes) and not replies.failures:
            if self._receive(watch.period, replies, on_message):
                watch.sign_of_life()
            elif watch.deadline_passed():
                raise self._hang_error(replies, watch.reason)
        if not replies.failures:
            return [replies.answers[process.rank] for process in self._processes]
        # The first failure to arrive is often a consequence of another, which comes a little later.
        give_up = time.monotonic() + _GRACE_SECONDS
        while (
            len(replies.failures.keys() | replies.answers.keys()) < len(self._processes)
            and (remaining := give_up - time.monotonic()) > 0
        ):
            self._receive(remaining, replies, on_message)
        raise self._failure_error(replies)

    def _receive(self, seconds: float | None, replies: _Replies, on_message: OnMessage | None) -> bool:
        """Wait for events of the ranks and note them in `replies`; False if there were none."""
        processes = [process for process in self._processes if process.rank not in replies.failures]
        if not wait([source for process in processes for source in process.sources], seconds):
            return False
        events = [(process.rank, process.poll()) for process in processes]
        for rank, event in events:
            match event:
                case Answer(value):
                    replies.answers[rank] = value
                case Failure() as failure:
                    replies.failures[rank] = failure
                case Message(content) if on_message is not None:
                    on_message(rank, content)
        return any(event is not None for _, event in events)

    def _failure_error(self, replies: _Replies) -> Exception:
        """Return the error of the root cause, with a line for every other rank: it failed too, or ends."""
        root = root_cause(replies.failures.values())
        lines = [f"rank {rank} was ended; it {state}" for rank, state in enumerate(self._states(replies))]
        for rank, failure in replies.failures.items():
            lines[rank] = f"rank {rank} {failure.reason.splitlines()[0]}"
        del lines[root.rank]
        error = RankFailed(root.rank, root.reason, root.traceback, lines)
        if root.user_error is None:
            return error
        root.user_error.__cause__ = error  # keeps the rank's traceback
        return root.user_error

    def _hang_error(self, replies: _Replies, reason: str) -> RankHung:
        stacks = collect_stacks(self._processes)
        states = self._states(replies, [hang.main_frame(text) for text in stacks])
        rank, why = hang.rank_to_blame(self._board.read(), replies.answers, states)
        lines = [f"rank {each} {state}" for each, state in enumerate(states)]
        texts = [f"stacks of rank {each}:\n{text}" for each, text in enumerate(stacks)]
        return RankHung(rank, f"{why}; {reason}", "\n\n".join(texts), lines)

    def _states(self, replies: _Replies, frames: Sequence[str] = ()) -> list[str]:
        """Return what each rank does, in words; `frames` say where their hosts are."""
        pulses = self._board.read()
        return [
            hang.describe(pulse, rank in replies.answers, frame)
            for rank, (pulse, frame) in enumerate(zip(pulses, frames or [""] * len(pulses), strict=True))
        ]


def _check_arguments(ranks: int, deadline: Deadline) -> None:
    if is_launched_rank():
        raise UserError("A launched rank cannot launch ranks itself: launch from the script instead.")
    errors = []
    if not isinstance(ranks, int) or ranks < 1:
        errors.append(f"ranks={ranks!r}: must be an integer of at least 1")
    try:
        deadline_seconds(deadline)
    except UserError as error:
        errors.append(str(error))
    folder = get_temp_dir()  # of this process: made at its first launch
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        errors.append(
            f"the folder of temporary files, {folder}, has {len(os.fsencode(folder))} letters: it is to hold "
            f"sockets, and Linux allows {_LONGEST_FOLDER}; set TMPDIR to a shorter one, like /tmp"
        )
    raise_errors("the arguments of the launch", errors)


def launch(
    fn: Callable[..., T],
    ranks: int,
    *args: object,
    backend: str | None = None,
    deadline: Deadline = FROM_ENVIRONMENT,
    environment: Environment | None = None,
) -> list[T]:
    """Call `fn(*args)` in `ranks` processes of one process group; return the results in rank order.

        results = launch(train, 4, config)

    `deadline` is how many seconds may pass without a sign of life from any rank (None: no limit); without it,
    ECHELON_DEADLINE of the environment, or 1,800. `environment(rank)` has more environment variables for a
    rank, set before CUDA and the process group start there. An error in one rank ends them all and is raised
    as `RankFailed`, with that rank's traceback; a `UserError` is raised unchanged.

    Under torchrun this process is a rank already: `fn` runs here, among its peers. Rank 0 returns all
    results; every other rank returns its own and rank 0's, and a `RemoteResult` in place of the others.
    """
    if torchrun.is_under_torchrun():
        return torchrun.run_among_peers(fn, ranks, args, backend, deadline, environment)
    refuse_while_main_is_imported()
    call = pack_call(fn, args)  # before any process starts
    with Ranks(ranks, backend=backend, deadline=deadline, environment=environment) as started:
        started.run(request_training_modules)  # for the next launch
        return started.run_packed(call)


def request_training_modules() -> None:
    """Runs in every rank: only there may `fork_server` be imported."""
    from echelon.launching import fork_server

    fork_server.request_training_modules()
