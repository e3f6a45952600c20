"""Jobs run in order; an error ends them, and is raised to everyone who waits."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.collectives import Ledger, make_boundary
from echelon.errors import UserError
from echelon.update.offload.host_worker import DirectCall, HostCall, HostRing, HostWorker, runs_beside, talks
from echelon.update.optim import SM3, CombinedOptimizer

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


def test_jobs_run_in_the_modes_of_the_step() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    worker = HostWorker(CPU)
    with Counting():
        worker.submit(lambda: torch.ones(1).add_(1)).wait()
    assert Counting.calls == 2
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


def ring(size: int) -> HostRing:
    return HostRing(make_boundary(torch.device("cpu"), Ledger()), size)


def place(ring: HostRing, piece: torch.Tensor) -> tuple[int, int]:
    begin = int(piece.storage_offset())
    return begin, begin + len(piece)


def test_pieces_go_around() -> None:
    memory = ring(10)
    assert place(memory, memory.take(4)) == (0, 4)
    assert place(memory, memory.take(4)) == (4, 8)
    memory.give_back()
    assert place(memory, memory.take(3)) == (0, 3)
    memory.give_back()
    assert place(memory, memory.take(5)) == (3, 8)


def test_who_finds_no_room_waits() -> None:
    memory = ring(10)
    memory.take(6)
    memory.take(3)
    taken: list[tuple[int, int]] = []
    other = threading.Thread(target=lambda: taken.append(place(memory, memory.take(5))))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    memory.give_back()
    other.join(10)
    assert taken == [(0, 5)]


def test_nobody_waits_after_the_end() -> None:
    memory = ring(10)
    memory.take(10)
    memory.abandon()
    assert len(memory.take(4)) == 4


def test_what_does_not_fit_behind_goes_to_the_begin_if_that_is_free() -> None:
    memory = ring(10)
    assert place(memory, memory.take(6)) == (0, 6)
    assert place(memory, memory.take(4)) == (6, 10), "to the last byte"
    memory.give_back()
    assert memory._find(6) is None, "a full ring would look like an empty one"
    assert memory._find(5) == 0
    assert place(memory, memory.take(2)) == (0, 2)
    assert (memory._find(4), memory._find(3)) == (None, 2)
    memory.give_back()
    assert place(memory, memory.take(8)) == (2, 10), "one piece is left, at the begin"
    memory.give_back()
    memory.give_back()
    assert place(memory, memory.take(10)) == (0, 10)


def test_more_than_all_of_it_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        ring(10).take(11)
    assert [len(each) for each in ring(10).storages()] == [10]


def test_hooks_and_options_that_are_set_meanwhile_are_for_the_next_update() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    call = HostCall(optimizer, [weight])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.param_groups[0]["lr"] = 100.0
    weight.grad = torch.full((3,), 2.0)
    call(0.25)
    assert weight.tolist() == [0.75, 0.75, 0.75]
    assert called == []
    optimizer.step()
    assert called == ["before", "after"]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Two of ones, with gradients 2 and 4."""
    made = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    for number, each in enumerate(made):
        each.grad = torch.full_like(each, 2.0 * (number + 1))
    return made


@pytest.mark.parametrize("kind", [HostCall, DirectCall])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"momentum": 0.5}])
def test_the_chosen_are_updated_by_scaled_gradients(
    kind: Any, factor: float, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    chosen, other = parameters(dtype)
    optimizer = torch.optim.SGD([chosen, other], lr=0.25, **options)
    kind(optimizer, [chosen])(factor)
    assert chosen.tolist() == [1 - 0.25 * 2.0 * factor] * 3
    assert other.tolist() == [1.0] * 3
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    kind(optimizer, [other])(factor)
    assert other.tolist() == [1 - 0.25 * 4.0 * factor] * 3
    if "momentum" in options:
        momenta = [optimizer.state[each]["momentum_buffer"].tolist() for each in (chosen, other)]
        assert momenta == [[2.0 * factor] * 3, [4.0 * factor] * 3]


def test_options_are_those_of_when_it_was_prepared() -> None:
    rate = torch.tensor(0.25)
    chosen, other = parameters()
    optimizer = torch.optim.SGD([{"params": [chosen]}, {"params": [other], "lr": 0.5}], lr=rate)
    call = HostCall(optimizer, [chosen, other])
    rate.fill_(9.0)
    optimizer.param_groups[1]["lr"] = 9.0
    call(1.0)
    assert (chosen.tolist(), other.tolist()) == ([0.5] * 3, [-1.0] * 3)
    assert optimizer.param_groups[1].get("fused") is None, "those of the user are left as they are"


def test_a_scheduler_s_step_is_not_called() -> None:
    chosen, _ = parameters()
    optimizer = torch.optim.Adam([chosen])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[int] = []
    vars(optimizer)["step"] = lambda: called.append(1)
    HostCall(optimizer, [chosen])(1.0)
    assert called == []
    assert optimizer.state[chosen]["step"] == 1, "the state is that of the optimizer"


def test_each_of_several_optimizers_is_called() -> None:
    first, second = parameters()
    combined = CombinedOptimizer([torch.optim.SGD([first], lr=0.25), torch.optim.SGD([second], lr=0.5)])
    HostCall(combined, [first, second])(0.5)
    assert (first.tolist(), second.tolist()) == ([0.75] * 3, [0.0] * 3)


def test_a_call_without_gradients_changes_nothing() -> None:
    chosen, _ = parameters()
    chosen.grad = None
    HostCall(torch.optim.SGD([chosen], lr=0.25), [chosen])(0.5)
    HostCall(torch.optim.SGD([chosen], lr=0.25), [])(0.5)
    assert chosen.tolist() == [1.0] * 3


def test_which_optimizers_may_be_called_by_another_thread() -> None:
    chosen, _ = parameters()
    matrix = nn.Parameter(torch.ones(2, 2))
    assert runs_beside(torch.optim.SGD([chosen]))
    assert not runs_beside(torch.optim.LBFGS([chosen]))
    hooked = torch.optim.SGD([chosen])
    hooked.register_step_post_hook(lambda *_: None)
    assert not runs_beside(hooked)
    sums = SM3([matrix])
    assert not talks(sums)
    for rounds, is_talking in ((["a group"], True), ([], False)):
        sums._work = [SimpleNamespace(exchange=SimpleNamespace(rounds=rounds))]  # type: ignore[list-item]
        assert (talks(sums), runs_beside(sums)) == (is_talking, not is_talking)
        assert talks(CombinedOptimizer([torch.optim.SGD([chosen]), sums])) is is_talking
