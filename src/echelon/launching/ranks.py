"""`Ranks`: started processes that run functions together, and the judgement when one of them fails.

One rank as a process is `member.py`; what goes on inside it is `worker.py`.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from echelon.errors import UserError
from echelon.launching import guard, hang
from echelon.launching.calls import pack_call
from echelon.launching.channel import Answer, Told, is_launched_rank
from echelon.launching.errors import RankFailed, RankHung
from echelon.launching.failure import Failure, root_cause
from echelon.launching.member import Member, collect_stacks, kill_all, stop_all
from echelon.launching.pulse import Board
from echelon.launching.worker import Seat

T = TypeVar("T")
OnMessage = Callable[[int, Any], None]

_START_SECONDS = 120.0  # every rank imports the main module, and can give no sign of life meanwhile
_GRACE_SECONDS = 0.5  # after the first failure, for the root cause to show itself


@dataclass
class _Heard:
    """What the ranks have said since they were asked, by rank."""

    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class Ranks:
    """`ranks` processes on this machine that have joined one torch process group.

        with Ranks(4) as ranks:
            losses = ranks.run(train, config)       # what each rank returned, in rank order
            scores = ranks.run(evaluate, config)    # the same processes, still warm

    `deadline` is how many seconds may pass without a sign of life from any rank (None: any number).
    A failure in a run ends all ranks, and then these `Ranks` cannot be used again.
    """

    def __init__(self, ranks: int, *, backend: str | None = None, deadline: float | None = 1800.0) -> None:
        guard.refuse_while_main_is_imported()
        _check(ranks, deadline)
        self._deadline = deadline
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-"))
        self._members: list[Member] = []
        self._open = True
        # Runs before multiprocessing's own handler, which would wait for the ranks and never end.
        atexit.register(self.close)
        with self._killed_on_error():
            self._start(ranks, backend)

    def run(self, fn: Callable[..., T], *args: object, on_message: OnMessage | None = None) -> list[T]:
        """Call `fn(*args)` in every rank; return the results in rank order.

        `on_message(rank, message)` is called here, while this waits, for each `tell(message)` of a rank.
        """
        return self.run_packed(pack_call(fn, args), on_message)

    def run_packed(self, call: bytes, on_message: OnMessage | None = None) -> list[Any]:
        """`run` for a call that `pack_call` has packed already."""
        if not self._open:
            raise UserError("These ranks have ended (closed, or a run failed): make new Ranks to run more.")
        with self._killed_on_error():
            for member in self._members:
                member.call(call)
            return self._await_answers(self._deadline, on_message)

    def close(self) -> None:
        """End the ranks, which are idle; may be called twice."""
        with self._killed_on_error():
            self._end(stop_all)

    def kill(self) -> None:
        """End the ranks, whatever they do; may be called twice."""
        self._end(kill_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _start(self, ranks: int, backend: str | None) -> None:
        """Start the processes and wait until they have joined their group."""
        seats = [self._seat(rank, ranks, backend) for rank in range(ranks)]
        self._board = Board(seats[0].board, ranks)
        self._members = [Member(seat) for seat in seats]
        for member in self._members:
            member.start()
        self._await_answers(None if self._deadline is None else max(self._deadline, _START_SECONDS))

    def _seat(self, rank: int, ranks: int, backend: str | None) -> Seat:
        # torch's own timeout stands far behind ours, which has more to tell.
        timeout = None if self._deadline is None else 2 * self._deadline + 60
        return Seat(
            rank=rank,
            ranks=ranks,
            folder=self._folder,
            server_folder=Path(get_temp_dir()),
            backend=backend,
            timeout_seconds=timeout,
            working_directory=os.getcwd(),
            environment=dict(os.environ),
        )

    @contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Whatever is raised inside, Ctrl-C too, no rank outlives it."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def _end(self, end: Callable[[Sequence[Member]], None]) -> None:
        if not self._open:
            return
        end(self._members)
        self._open = False
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _await_answers(self, deadline: float | None, on_message: OnMessage | None = None) -> list[Any]:
        """One answer from every rank; raises when a rank fails or all are silent for too long."""
        heard = _Heard()
        watch = hang.Watch(self._board, deadline)
        while len(heard.answers) < len(self._members) and not heard.failures:
            if self._listen(watch.period, heard, on_message):
                watch.sign_of_life()
            elif watch.too_silent():
                raise self._hung(heard, watch.silence)
        if heard.failures:
            self._listen_for_root_cause(heard)
            raise self._failed(heard)
        return [heard.answers[member.rank] for member in self._members]

    def _listen(self, seconds: float | None, heard: _Heard, on_message: OnMessage | None) -> bool:
        """Wait for ranks to speak and note down what they say; False when none did."""
        members = [member for member in self._members if member.rank not in heard.failures]
        if not wait([source for member in members for source in member.sources], seconds):
            return False
        for member in members:
            match member.hear():
                case Answer(value):
                    heard.answers[member.rank] = value
                case Failure() as failure:
                    heard.failures[member.rank] = failure
                case Told(message) if on_message is not None:
                    on_message(member.rank, message)
        return True

    def _listen_for_root_cause(self, heard: _Heard) -> None:
        """The first failure to arrive is often only a consequence of another."""
        give_up = time.monotonic() + _GRACE_SECONDS
        while (
            len(heard.failures.keys() | heard.answers.keys()) < len(self._members)
            and (left := give_up - time.monotonic()) > 0
        ):
            self._listen(left, heard, on_message=None)

    def _failed(self, heard: _Heard) -> Exception:
        root = root_cause(heard.failures.values())
        error = RankFailed(root.rank, root.reason, root.traceback, self._fates(heard, root.rank))
        if root.user_error is None:
            return error
        root.user_error.__cause__ = error  # keeps the rank's traceback for those who want it
        return root.user_error

    def _fates(self, heard: _Heard, root: int) -> list[str]:
        """A line for every rank but `root`: it failed too, or is about to be ended."""
        fates = [f"rank {rank} was ended; it {doing}" for rank, doing in enumerate(self._doings(heard))]
        for rank, failure in heard.failures.items():
            fates[rank] = f"rank {rank} {failure.reason.splitlines()[0]}"
        return fates[:root] + fates[root + 1 :]

    def _hung(self, heard: _Heard, silence: str) -> RankHung:
        rank, why = hang.rank_to_blame(self._board.read(), heard.answers)
        states = [f"rank {each} {doing}" for each, doing in enumerate(self._doings(heard))]
        return RankHung(rank, f"{why}; {silence}", collect_stacks(self._members), states)

    def _doings(self, heard: _Heard) -> list[str]:
        return [hang.doing(pulse, rank in heard.answers) for rank, pulse in enumerate(self._board.read())]


def _check(ranks: int, deadline: float | None) -> None:
    if is_launched_rank():
        raise UserError("A launched rank cannot launch ranks itself: launch from the script instead.")
    if not isinstance(ranks, int) or ranks < 1:
        raise UserError(f"ranks={ranks!r}: must be a whole number, at least 1.")
    if deadline is not None and deadline <= 0:
        raise UserError(f"deadline={deadline!r}: must be seconds above 0, or None for no deadline.")
