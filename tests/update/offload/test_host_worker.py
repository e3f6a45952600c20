"""Jobs run in order; an error ends them, and is raised to everyone who waits."""

import threading

import pytest
import torch

from echelon.errors import UserError
from echelon.update.offload.host_worker import HostWorker

CPU = torch.device("cpu")


def test_jobs_run_one_after_the_other() -> None:
    worker, done = HostWorker(CPU), list[int]()
    gate = threading.Event()
    worker.submit(lambda: done.append(int(gate.wait(10)) - 1))
    tickets = [worker.submit(lambda number=number: done.append(number)) for number in (1, 2)]  # type: ignore[misc]
    gate.set()
    tickets[-1].wait()
    assert done == [0, 1, 2]
    worker.close()


def test_an_error_is_raised_to_everyone_and_no_later_job_runs() -> None:
    worker, done = HostWorker(CPU), list[int]()
    told, raised = list[threading.Thread](), list[threading.Thread]()
    worker.on_error = lambda: told.append(threading.current_thread())
    worker.on_raise = lambda: raised.append(threading.current_thread())

    def fail() -> None:
        raise ValueError("a bad rate")

    first, second = worker.submit(fail), worker.submit(lambda: done.append(1))
    for wait in (second.wait, first.wait, worker.wait, worker.check, lambda: worker.submit(fail)):
        with pytest.raises(UserError, match="ValueError: a bad rate; some weights may be") as caught:
            wait()
        assert isinstance(caught.value.__cause__, ValueError)
    assert not done
    assert [each.name for each in told] == ["echelon-host-update"]
    assert set(raised) == {threading.current_thread()}
    worker.close()


def test_close_finishes_the_jobs_and_ends_the_thread() -> None:
    worker, done = HostWorker(CPU), list[int]()
    before = threading.active_count()
    for number in range(5):
        worker.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    worker.close()
    worker.close()
    assert done == [0, 1, 2, 3, 4]
    assert threading.active_count() == before
    with pytest.raises(UserError, match="closed"):
        worker.submit(lambda: None)


def test_a_job_may_run_here_after_those_before_it() -> None:
    worker, done = HostWorker(CPU), list[str]()
    gate = threading.Event()
    worker.submit(lambda: (gate.wait(10), done.append("first"))[1])
    threading.Timer(0.05, gate.set).start()
    ticket = worker.run(lambda: done.append(threading.current_thread().name))
    assert done == ["first", threading.current_thread().name]
    ticket.wait()
    assert not worker.has_failed
    worker.close()


def test_an_error_here_is_raised_as_it_is_and_ends_the_others() -> None:
    worker, told = HostWorker(CPU), list[str]()
    worker.on_error, worker.on_raise = lambda: told.append("error"), lambda: told.append("raise")

    def fail() -> None:
        raise ValueError("a bad rate")

    with pytest.raises(ValueError, match="a bad rate"):
        worker.run(fail)
    assert (told, worker.has_failed) == (["error", "raise"], True)
    with pytest.raises(UserError, match="a bad rate"):
        worker.submit(lambda: None)


def test_jobs_compute_no_gradients_with_as_many_threads_as_they_are_told() -> None:
    seen: list[tuple[bool, int]] = []
    before = torch.get_num_threads()
    for number in (None, 1):
        worker = HostWorker(CPU, number)
        worker.submit(lambda: seen.append((torch.is_grad_enabled(), torch.get_num_threads()))).wait()
        assert worker._thread is not None
        assert worker._thread.daemon
        worker.close()
    assert [enabled for enabled, _ in seen] == [False, False]
    assert seen[1][1] == 1
    torch.set_num_threads(before)
