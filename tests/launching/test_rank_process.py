import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from echelon.launching.channel import Answer, Message, pack_call
from echelon.launching.rank_process import Event, RankProcess, collect_stacks, kill_all, stop_all
from echelon.launching.watch import hang
from echelon.launching.watch.failure import Failure, Kind
from echelon.launching.watch.pulse import Board
from echelon.launching.worker import RankConfig
from tests.launching import tasks
from tests.launching.processes import still_alive, wait_until


def config(folder: Path, ranks: int) -> RankConfig:
    Board(folder / "pulses", ranks)
    return RankConfig(
        rank=0,
        ranks=ranks,
        folder=folder,
        server_folder=Path(get_temp_dir()),
        backend="gloo",
        timeout_seconds=60.0,
        working_directory=os.getcwd(),
        environment=dict(os.environ),
        overrides={},
        same_environment=True,
    )


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RankProcess]:
    """The only rank of its group, not started yet."""
    process = RankProcess(config(tmp_path, ranks=1))
    yield process
    kill_all([process])


def next_event(process: RankProcess) -> Event:
    while True:
        assert wait(process.sources, timeout=300)
        if (event := process.poll()) is not None:
            return event


def start(process: RankProcess) -> int:
    """Start the rank, wait until it has joined its group, return its process id."""
    process.start()
    assert next_event(process) == Answer(None)
    assert process.process.pid is not None
    return process.process.pid


def test_a_rank_that_has_joined_answers_a_call(process: RankProcess) -> None:
    start(process)
    assert process.poll() is None
    process.call(pack_call(tasks.echo, (1, "two")))
    assert next_event(process) == Answer((1, "two"))


def test_what_a_dead_rank_sent_comes_before_its_death(process: RankProcess) -> None:
    start(process)
    process.call(pack_call(tasks.send_counts_and_die, (3,)))
    process.process.join()  # nothing is received until the rank is dead
    events = [next_event(process) for _ in range(4)]
    assert [event.content[0] for event in events if isinstance(event, Message)] == [0, 1, 2]
    failure = events[-1]
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.reason) == (Kind.DIED, "exited with code 7 before it finished")


def test_a_rank_that_dies_before_it_has_joined_failed_while_it_started(tmp_path: Path) -> None:
    process = RankProcess(config(tmp_path, ranks=2))  # it waits for rank 1, which nobody starts
    process.start()
    process.send_signal(signal.SIGKILL)
    failure = next_event(process)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("was killed by SIGKILL while it started")
    kill_all([process])


def test_a_call_to_a_dead_rank_raises_nothing(process: RankProcess) -> None:
    os.kill(start(process), signal.SIGKILL)
    process.process.join()
    process.call(pack_call(tasks.nothing, ()))
    assert isinstance(next_event(process), Failure)


def test_an_idle_rank_stops_by_itself(process: RankProcess) -> None:
    start(process)
    stop_all([process])
    assert process.process.exitcode == 0


def test_a_busy_rank_is_killed_with_its_children(process: RankProcess) -> None:
    start(process)
    process.call(pack_call(tasks.leave_a_child_behind, ()))
    answer = next_event(process)
    assert isinstance(answer, Answer)
    process.call(pack_call(time.sleep, (600,)))
    kill_all([process])
    assert process.process.exitcode == -signal.SIGTERM
    assert still_alive([answer.value]) == []  # a process that was killed ends a moment later


def test_a_rank_that_was_never_started_needs_no_killing(process: RankProcess) -> None:
    kill_all([process])
    assert not process.is_started


def test_stacks_of_a_rank_that_never_returns_from_c(process: RankProcess) -> None:
    """As in a call of CUDA that waits for a kernel which never ends."""
    assert collect_stacks([]) == []
    start(process)
    process.call(pack_call(tasks.hold_the_interpreter, ()))
    assert next_event(process) == Message("about to sleep")

    def is_seen() -> bool:  # not at once: the rank may still return from sending its message
        (stacks,) = collect_stacks([process])
        return hang.main_frame(stacks).startswith("in hold_the_interpreter (tasks.py:")

    assert wait_until(is_seen, 60)
    kill_all([process])
    assert not process.is_alive


@pytest.mark.slow
def test_an_unguarded_launch_is_explained_once() -> None:
    script = Path(__file__).parent / "scripts" / "unguarded.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.count("UserError: The main module launches ranks while it is imported") == 1
    assert 'if __name__ == "__main__":' in done.stderr
