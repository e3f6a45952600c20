import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import RankFailed, RankHung, Ranks, launch
from echelon.launching import ranks as ranks_module
from echelon.launching.watch import hang
from tests.launching import tasks
from tests.launching.processes import needs_proc, still_alive, wait_until


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where launches make their private folders during this test."""
    monkeypatch.setattr("echelon.launching.ranks.get_temp_dir", lambda: str(tmp_path))
    return tmp_path


def test_results_are_in_rank_order() -> None:
    with Ranks(4) as ranks:
        assert ranks.run(tasks.rank) == [0, 1, 2, 3]


def test_warm_ranks_run_again_in_the_same_processes(temporary: Path) -> None:
    with Ranks(2) as ranks:
        assert len(list(temporary.iterdir())) == 1
        first = ranks.run(tasks.pid_and_group)
        assert ranks.run(tasks.sum_of_ranks, torch.zeros(2))[0].tolist() == [1.0, 1.0]
        assert ranks.run(tasks.pid_and_group) == first
    assert still_alive([pid for pid, _, _ in first]) == []
    assert list(temporary.iterdir()) == []


def test_arguments_and_results_hold_whatever_can_be_copied() -> None:
    sent = ({"weights": [torch.arange(3.0), None]}, b"bytes", torch.nn.Linear(2, 2))
    with Ranks(2) as ranks:
        for weights, some_bytes, linear in ranks.run(tasks.echo, *sent):
            assert weights["weights"][0].tolist() == [0.0, 1.0, 2.0]
            assert some_bytes == b"bytes"
            assert torch.equal(linear.weight, sent[2].weight)


def test_more_tensors_than_file_descriptors_come_back() -> None:
    tensors = [torch.full((2,), float(index)) for index in range(2000)]
    with Ranks(2) as ranks:
        for (received,) in ranks.run(tasks.echo, tensors):
            assert [tensor[0].item() for tensor in received] == list(range(2000))


@pytest.mark.quick_cases(2)
@pytest.mark.slow_cases("raise-raised ValueError: the learning rate went for a walk")
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raise", "raised ValueError: the learning rate went for a walk"),
        ("sys.exit", "called sys.exit(3) before it finished"),
        ("_exit 0", "exited with code 0 before it finished"),
        ("_exit 7", "exited with code 7 before it finished"),
        ("SIGKILL", "was killed by SIGKILL before it finished (the system sends SIGKILL when memory"),
        ("SIGSEGV", "was killed by SIGSEGV before it finished"),
    ],
)
def test_the_rank_that_failed_is_named_while_others_sit_in_a_barrier(
    way: str, reason: str, temporary: Path
) -> None:
    ranks = Ranks(3)
    pids = [pid for pid, _, _ in ranks.run(tasks.pid_and_group)]
    with pytest.raises(RankFailed) as caught:
        ranks.run(tasks.fail, way, 1)
    error = caught.value
    assert error.rank == 1
    assert error.reason.startswith(reason)
    assert [line[:6] for line in error.others] == ["rank 0", "rank 2"]
    assert ("tasks.py" in error.traceback) == (way in ("raise", "sys.exit"))
    assert str(error).startswith(f"rank 1 {reason}")
    assert still_alive(pids) == []
    assert list(temporary.iterdir()) == []


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waits for the failures of all ranks, however slow the machine."""
    monkeypatch.setattr(ranks_module, "_GRACE_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_the_cause_is_named_when_its_consequences_arrive_first(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught, Ranks(3) as ranks:
        ranks.run(tasks.lose_a_peer_before_the_cause, 2, str(tmp_path))
    assert caught.value.rank == 2
    assert caught.value.reason == "raised ValueError: the cause"
    assert caught.value.others == (
        "rank 0 raised RuntimeError: step 7 failed",
        "rank 1 raised RuntimeError: step 7 failed",
    )


@pytest.mark.usefixtures("patient")
def test_the_rank_that_failed_first_is_named_and_not_the_lowest(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught, Ranks(3) as ranks:
        ranks.run(tasks.fail_in_order, [2, 0, 1], str(tmp_path))
    assert caught.value.rank == 2
    assert caught.value.reason == "raised ValueError: failure 0"
    assert caught.value.others == (
        "rank 0 raised ValueError: failure 1",
        "rank 1 raised ValueError: failure 2",
    )


def test_a_user_error_is_raised_unchanged() -> None:
    with pytest.raises(UserError) as caught, Ranks(2) as ranks:
        ranks.run(tasks.fail, "user error", 1)
    assert caught.value.errors == ("lr=-1: must be positive", "steps=0: must be at least 1")
    assert isinstance(caught.value.__cause__, RankFailed)
    assert caught.value.__cause__.rank == 1


@pytest.mark.parametrize(
    ("rebuild", "words"),
    [
        (False, "its result of type NotForSending cannot be sent back: I cannot be sent"),
        (True, "sent a value that cannot be rebuilt here: ValueError: I cannot be rebuilt"),
    ],
)
def test_a_result_that_cannot_be_sent_names_the_rank(rebuild: bool, words: str) -> None:
    with pytest.raises(RankFailed) as caught, Ranks(2) as ranks:
        ranks.run(tasks.return_something_stubborn, 1, rebuild)
    assert caught.value.rank == 1
    assert words in caught.value.reason


def test_after_a_failure_the_ranks_are_ended() -> None:
    with Ranks(2) as ranks:
        with pytest.raises(RankFailed):
            ranks.run(tasks.fail, "raise", 0)
        with pytest.raises(UserError, match="make new Ranks"):
            ranks.run(tasks.rank)


def test_a_hang_names_the_rank_that_is_late_and_shows_all_stacks() -> None:
    ranks = Ranks(3, deadline=1.0)
    with pytest.raises(RankHung) as caught:
        ranks.run(tasks.hang, 1)
    error = caught.value
    assert error.rank == 1
    (sleeping,) = re.findall(r", in sleep_through_the_step \(tasks\.py:\d+\)", error.reason)
    assert error.reason == (
        f"seems to block the others: it works outside any operation, after 1 operation{sleeping}; "
        "no rank gave a sign of life for 1 s"
    )
    assert error.others == (
        "rank 0 waits in barrier (operation 2)",
        f"rank 1 works outside any operation, after 1 operation{sleeping}",
        "rank 2 waits in barrier (operation 2)",
    )
    zero, one, two = error.traceback.split("stacks of rank ")[1:]
    assert "sleep_through_the_step" in one
    assert "in barrier" in zero
    assert "in barrier" in two
    assert "sleep_through_the_step" not in zero + two


def test_a_hang_names_the_instruction_of_every_rank() -> None:
    """On GPUs hosts run ahead: the rank that entered fewer operations is the one to look at."""
    with pytest.raises(RankHung) as caught:
        Ranks(2, deadline=0.5).run(tasks.hang_at_an_instruction, 1)
    assert caught.value.rank == 1
    zero, one = caught.value.others
    words = "is at RG5 of stage {}, works outside any operation, after {}, in sleep_through_the_step"
    assert zero.startswith("rank 0 " + words.format(0, "2 operations"))
    assert one.startswith("rank 1 " + words.format(1, "1 operation"))


def test_a_hang_of_equal_ranks_says_so() -> None:
    with pytest.raises(RankHung, match="rank 0 is only the first: all ranks are at the same point") as caught:
        Ranks(2, deadline=0.5).run(tasks.wait_together)
    assert caught.value.others == ("rank 0 waits in recv (operation 1)", "rank 1 waits in recv (operation 1)")


def test_one_sign_of_life_keeps_all_ranks_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two signs of life 6 s of the 10 pass, by a clock of the test's own."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    end = tmp_path / "end"

    class WatchAfterASign(hang.Watch):
        def deadline_passed(self) -> bool:
            assert wait_until(lambda: self._board.read() != self._last_pulses, 60)
            clock.now += 6.0
            if clock.now > 60.0:
                end.touch()
            return super().deadline_passed()

    with Ranks(2, deadline=10.0) as ranks:
        monkeypatch.setattr(hang, "time", clock)
        monkeypatch.setattr(hang, "Watch", WatchAfterASign)
        monkeypatch.setattr(WatchAfterASign, "period", 0.01)
        assert ranks.run(tasks.beat_until, str(end)) == ["done", "done"]
    assert clock.now > 60.0


def test_an_error_in_the_listener_ends_the_ranks(temporary: Path) -> None:
    def listen(rank: int, message: object) -> None:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        Ranks(2).run(tasks.send_counts, 3, on_message=listen)
    assert list(temporary.iterdir()) == []


def test_a_rank_that_cannot_join_is_named() -> None:
    with pytest.raises(RankFailed, match="no-such-backend"):
        Ranks(2, backend="no-such-backend")


@needs_proc
def test_what_a_rank_started_ends_with_it() -> None:
    with Ranks(2) as ranks:
        children = ranks.run(tasks.leave_a_child_behind)
    assert still_alive(children) == []


@pytest.mark.parametrize("ranks", [0, -1, 2.5])
def test_a_number_of_ranks_that_means_nothing_is_refused(ranks: int) -> None:
    with pytest.raises(UserError, match="must be an integer of at least 1"):
        Ranks(ranks)


def test_a_folder_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    """multiprocessing raised OSError: AF_UNIX path too long."""
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    script = "from echelon.launching import Ranks; Ranks(1)"
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "set TMPDIR to a shorter one" in done.stderr
    assert "AF_UNIX" not in done.stderr


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_that_means_nothing_is_refused(deadline: float) -> None:
    with pytest.raises(UserError, match="must be more than 0 seconds"):
        Ranks(1, deadline=deadline)


@pytest.mark.parametrize("deadline", [None, 1e8, float("inf")])
def test_a_deadline_of_years_is_one(deadline: float | None) -> None:
    with Ranks(2, deadline=deadline) as ranks:
        assert ranks.run(tasks.rank) == [0, 1]


def test_each_rank_has_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "NCCL_HOSTID",
        "LOCAL_RANK",
        "RANK",
        "TORCH_NCCL_ENABLE_MONITORING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    ]
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def environment(rank: int) -> dict[str, str]:  # is called here, so it need not be sent
        return {"NCCL_HOSTID": f"host {rank}", "LOCAL_RANK": "0"}

    with Ranks(2, environment=environment) as ranks:
        for rank, variables in enumerate(ranks.run(tasks.environment_of, names)):
            assert list(variables.values()) == [f"host {rank}", "0", str(rank), "0", None]


def test_an_environment_that_breaks_the_launch_is_refused() -> None:
    with pytest.raises(UserError, match="RANK='7': the launcher sets this variable"):
        Ranks(2, environment=lambda _: {"RANK": "7"})


def test_all_errors_of_the_arguments_are_listed() -> None:
    with pytest.raises(UserError) as caught:
        Ranks(0, deadline=-1.0)
    assert [error.split(":")[0] for error in caught.value.errors] == ["ranks=0", "deadline=-1.0"]


def test_a_rank_cannot_launch_ranks() -> None:
    with pytest.raises(UserError, match="cannot launch ranks itself"), Ranks(1) as ranks:
        ranks.run(tasks.launch_again)


def test_closing_twice_does_nothing() -> None:
    ranks = Ranks(1)
    ranks.close()
    ranks.close()
    ranks.kill()


def test_file_descriptors_are_given_back() -> None:
    with Ranks(2):
        pass
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    before = len(os.listdir(folder))
    for _ in range(3):
        with Ranks(2):
            pass
    assert len(os.listdir(folder)) <= before


@pytest.mark.slow
def test_starting_is_quiet_imports_torch_in_the_server_only_and_needs_no_closing() -> None:
    script = Path(__file__).parent / "scripts" / "unclosed.py"
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "False [True, True, True, True]\n"


def test_every_rank_answers_with_what_it_was_given() -> None:
    results = launch(tasks.sum_of_ranks, 3, torch.tensor([1.0, 2.0]))
    assert [result.tolist() for result in results] == [[6.0, 9.0]] * 3


def test_one_rank_is_enough() -> None:
    assert launch(tasks.rank, 1) == [0]


def test_a_failure_is_raised_with_the_traceback_of_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 raised ValueError.*_raise_value_error"):
        launch(tasks.fail, 2, "raise", 1)


def test_a_function_that_cannot_be_sent_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.launching.ranks.Ranks", None)
    with pytest.raises(UserError, match="<lambda> cannot be sent"):
        launch(lambda: 0, 2)


def test_importing_the_launcher_imports_no_torch() -> None:
    code = "import sys, echelon.launching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_second_interrupt_before_ranks_are_ended_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the first one is handled, and none is deferred yet."""
    deferred, left = ranks_module.deferred_interrupts, iter(range(2))

    def interrupted(most: int) -> AbstractContextManager[None]:
        if next(left, None) is not None:
            raise KeyboardInterrupt
        return deferred(most)

    ranks = Ranks(1)
    (pid,) = ranks.run(os.getpid)
    monkeypatch.setattr(ranks_module, "deferred_interrupts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.kill()
    assert next(left, None) is None
    assert not ranks._is_open
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
