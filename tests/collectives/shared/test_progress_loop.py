"""Who runs the loop: a caller that waits, another one after it, and the background thread."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Group, Handle, Ledger, group_over
from echelon.collectives.shared import progress_loop
from echelon.collectives.shared.group import SharedGroup
from echelon.collectives.shared.slots import LANE
from echelon.launching import PeerLost, Ranks
from tests.collectives.shared.real_ranks import (
    Warm,
    loop_of,
    message_in_child,
    new_group,
    result_of,
    wait_until,
)
from tests.collectives.shared.test_link import threads

SMALL, SLOT, LARGE = 3, LANE.slot_bytes // 4, 1_000_000  # elements; the last is read directly


def background_calls(group: SharedGroup) -> list[int]:
    """Grows with every call for the background thread."""
    call, calls = loop_of(group)._background_call, []
    notify = call.notify

    def counted(n: int = 1) -> None:
        calls.append(n)
        notify(n)

    call.notify = counted  # type: ignore[method-assign]
    return calls


@contextmanager
def no_polling() -> Iterator[None]:
    """Background threads of links made inside wake up only when they are called."""
    seconds, progress_loop._POLL_SECONDS = progress_loop._POLL_SECONDS, 1e6
    try:
        yield
    finally:
        progress_loop._POLL_SECONDS = seconds


def num_waiting(group: SharedGroup) -> int:
    """The threads that run the loop or wait for it."""
    loop = loop_of(group)
    return (loop._owner is not None) + len(loop._waiters)


def without_the_background_thread() -> tuple[int, int]:
    group = new_group()
    calls = background_calls(group)
    other = 1 - group.rank
    for length in (SMALL, SLOT, LARGE):
        group.all_reduce(torch.ones(length))
        if group.rank == 0:
            group.send(torch.ones(length), other)
            group.recv(torch.ones(length), other)
        else:
            group.recv(torch.ones(length), other)
            group.send(torch.ones(length), other)
    while_waiting = len(calls)
    for _ in range(50):  # more than the lane holds: the send itself receives the notices of the reader
        handle = group.recv(torch.ones(SLOT), other, wait=False)
        group.send(torch.ones(SLOT), other, wait=False)
        handle.wait()
    return while_waiting, len(calls)


def test_a_caller_that_waits_needs_no_background_thread(warm_ranks: Warm) -> None:
    for while_waiting, in_all in warm_ranks(2).run(without_the_background_thread):
        assert while_waiting == 0
        assert in_all <= 1, "at most to poll again for receives, when nothing had been unfinished for long"


def one_after_the_other(first: int, length: int) -> list[str]:
    """Two threads of rank 0 wait, the second while the first runs the loop; rank `first` sends first."""
    group = new_group()
    if group.rank != 0:
        dist.barrier()
        if group.rank != first:
            dist.barrier()
        group.send(torch.full((length,), float(group.rank)), 0)
        if group.rank == first:
            dist.barrier()
        return []
    received: list[str] = []

    def wait_for(peer: int) -> None:
        tensor = torch.zeros(length)
        group.recv(tensor, peer)
        received.append(f"{tensor[-1].item():.0f}")

    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for peer in (1, 2):
            waiting.append(pool.submit(wait_for, peer))
            wait_until(lambda: num_waiting(group) == len(waiting))
        dist.barrier()
        wait_until(lambda: len(received) == 1)
        dist.barrier()
        for future in waiting:
            future.result(timeout=30)
    return received


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize(("first", "order"), [(1, ["1", "2"]), (2, ["2", "1"])])
def test_a_waiter_is_served_and_takes_over(
    warm_ranks: Warm, first: int, order: list[str], length: int
) -> None:
    assert warm_ranks(3).run(one_after_the_other, first, length)[0] == order


@no_polling()
def advances_in_the_background() -> None:
    """A caller's wait is over before an operation that it has begun: the background thread takes the loop."""
    group = new_group()
    if group.rank == 0:
        handle = group.all_reduce(torch.ones(LARGE), wait=False)
        group.recv(torch.zeros(SMALL), 1)
        dist.barrier()
        work = handle._work
        assert work is not None
        wait_until(lambda: work.done_at() is not None)  # without a call that could advance it
        handle.wait()
    else:
        group.send(torch.ones(SMALL), 0)
        dist.barrier()
        group.all_reduce(torch.ones(LARGE))


def test_the_background_thread_advances_what_no_caller_waits_for(warm_ranks: Warm) -> None:
    warm_ranks(2).run(advances_in_the_background)


@no_polling()
def full_lane(length: int) -> None:
    """Many sends, more than the lane holds; the sender does something else until all are received."""
    group = new_group()
    count = 3 * LANE.slots
    if group.rank == 0:
        handles = [group.send(torch.full((length,), float(n)), 1, wait=False) for n in range(count)]
        dist.barrier()  # no one has received yet
        dist.barrier()  # everything was received
        for handle in handles:
            handle.wait()
        return
    dist.barrier()
    for n in range(count):
        tensor = torch.zeros(length)
        group.recv(tensor, 0)
        assert torch.equal(tensor, torch.full_like(tensor, float(n)))
    dist.barrier()


@pytest.mark.parametrize("length", [SLOT, LARGE])
def test_sends_that_found_the_lane_full_advance_in_the_background(warm_ranks: Warm, length: int) -> None:
    warm_ranks(2).run(full_lane, length)


def posted_and_away(length: int) -> bool:
    """The receiver has posted and waits elsewhere, for the sender, which waits until all is received."""
    group = new_group()
    count = 3 * LANE.slots
    tensors = [torch.full((length,), float(n + 1)) for n in range(count)]
    if group.rank == 0:
        for tensor in tensors:
            group.send(tensor, 1)
        dist.barrier()
        return True
    incoming = [torch.zeros(length) for _ in range(count)]
    handles = [group.recv(tensor, 0, wait=False) for tensor in incoming]
    dist.barrier()
    for handle in handles:
        handle.wait()
    return all(torch.equal(received, sent) for received, sent in zip(incoming, tensors, strict=True))


@pytest.mark.parametrize("length", [SLOT, LARGE])
def test_receives_posted_early_advance_without_a_wait(warm_ranks: Warm, length: int) -> None:
    assert warm_ranks(2).run(posted_and_away, length) == [True, True]


def known_to_be_sent() -> list[bool]:
    group = new_group()
    if group.rank == 1:
        group.recv(torch.zeros(SMALL), 0)
        dist.barrier()
        group.recv(torch.zeros(LARGE), 0)
        dist.barrier()
        return []
    small = group.send(torch.ones(SMALL), 1, wait=False)
    large = group.send(torch.ones(LARGE), 1, wait=False)
    before = [small.done(), large.done()]
    dist.barrier()
    dist.barrier()
    return [*before, large.done()]


def test_a_send_is_known_to_be_done_without_a_wait(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(known_to_be_sent)[0] == [True, False, True]


@contextmanager
def several_waiters(group: SharedGroup, count: int) -> Iterator[list[Future[str]]]:
    """One thread that runs the loop and others that wait beside it, and what becomes of each."""
    tensors = [torch.zeros(SMALL) for _ in range(count)]
    handles: list[Handle] = [group.recv(tensor, 1, wait=False) for tensor in tensors]
    with ThreadPoolExecutor(count) as pool:
        results = [pool.submit(result_of, handle.wait) for handle in handles]
        wait_until(lambda: num_waiting(group) == count)
        yield results


def results_of(futures: list[Future[str]]) -> list[str]:
    return [future.result(timeout=30) for future in futures]


def peer_leaves() -> list[str]:
    group = new_group()
    if group.rank == 1:
        dist.barrier()
        group.close()
        return []
    with several_waiters(group, 3) as futures:
        dist.barrier()
        return results_of(futures)


def test_all_who_wait_learn_of_a_lost_peer(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(peer_leaves)[0] == ["PeerLost"] * 3


def closed_while_a_thread_waits() -> tuple[list[str], int]:
    before = threads()
    group = new_group()
    if group.rank == 1:
        dist.barrier()
        return [], 0
    background_thread = loop_of(group)._background_thread
    with several_waiters(group, 3) as futures:
        group.close()
        results = results_of(futures)
    background_thread.join(30)
    dist.barrier()
    return results, threads() - before


def test_a_group_may_be_closed_while_threads_wait(warm_ranks: Warm) -> None:
    results, more_threads = warm_ranks(2).run(closed_while_a_thread_waits)[0]
    assert results == ["PeerLost"] * 3
    assert more_threads == 0


def too_late() -> tuple[list[str], float]:
    process_group = dist.new_group(timeout=timedelta(seconds=1))
    group = group_over("data", process_group, Ledger())  # type: ignore[arg-type]
    assert isinstance(group, SharedGroup)
    begun = time.perf_counter()
    results = []
    if group.rank == 0:
        with several_waiters(group, 3) as futures:
            results = results_of(futures)
    seconds = time.perf_counter() - begun
    dist.barrier()
    return results, seconds


def test_the_timeout_holds_for_all_who_wait(warm_ranks: Warm) -> None:
    results, seconds = warm_ranks(2).run(too_late)[0]
    assert results == ["PeerLost"] * 3
    assert seconds > 0.9


class Interrupt(BaseException):
    """Like the one of a keyboard."""


def interrupted() -> list[str]:
    """By a signal, in the middle of it: the ranks are out of step then."""
    group = new_group()
    if group.rank == 1:
        dist.barrier()
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            group.all_reduce(torch.ones(SMALL))
        return []

    in_loop, was_interrupted = threading.Event(), threading.Event()
    loop = loop_of(group)
    receive = loop._receive_notices

    def receive_in_main(deadline: float | None) -> bool:
        if threading.current_thread() is threading.main_thread():
            in_loop.set()
        return receive(deadline)

    def handler(*_: object) -> None:
        if not was_interrupted.is_set():
            was_interrupted.set()
            raise Interrupt

    loop._receive_notices = receive_in_main  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert in_loop.wait(30)
        while not was_interrupted.wait(0.01):  # one that comes just before the system call does not end it
            signal.pthread_kill(main, signal.SIGUSR1)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Interrupt):
        group.recv(torch.ones(SMALL), 1)
    with pytest.raises(RuntimeError, match="was interrupted") as caught:
        group.all_reduce(torch.ones(SMALL))
    dist.barrier()
    return [str(caught.value)]


def test_an_interrupted_caller_ends_the_link() -> None:
    with Ranks(2, deadline=20.0) as ranks:
        assert ranks.run(interrupted)[0] == ["an operation between ranks was interrupted"]


def waits_in_a_child() -> str:
    group = new_group()
    handle = group.recv(torch.zeros(SMALL), 1 - group.rank, wait=False)

    def wait_for_it() -> None:
        assert not handle.done()
        handle.wait()

    message = message_in_child(wait_for_it)
    group.send(torch.zeros(SMALL), 1 - group.rank)
    handle.wait()
    return message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_a_forked_child_waits_for_nothing_of_its_parent() -> None:
    with Ranks(2, deadline=20.0) as ranks:
        for message in ranks.run(waits_in_a_child):
            assert "a forked child cannot wait" in message


# Everything at once.

SIZES = [1, 1000, SLOT - 1, 2 * SLOT + 1, 5 * SLOT, 40_000]


def message(source: int, target: int, number: int) -> torch.Tensor:
    length = random.Random(f"{source} {target} {number}").choice(SIZES)
    return torch.full((length,), float(100 * source + 10 * target) + number / 128)


def send_all(group: Group, peer: int, count: int, chance: random.Random) -> None:
    handles = []
    for number in range(count):
        handles.append(group.send(message(group.rank, peer, number), peer, wait=chance.random() < 0.3))
        if chance.random() < 0.2:
            handles[chance.randrange(len(handles))].done()
        time.sleep(chance.random() * 0.002)
    for handle in handles:
        handle.wait()


def receive_all(group: Group, peer: int, count: int, chance: random.Random) -> None:
    number = 0
    while number < count:
        ahead = min(count - number, chance.randint(1, 8))
        expected = [message(peer, group.rank, number + n) for n in range(ahead)]
        received = [torch.zeros_like(tensor) for tensor in expected]
        handles = [group.recv(tensor, peer, wait=False) for tensor in received]
        time.sleep(chance.random() * 0.003)
        for handle in chance.sample(handles, len(handles)):
            handle.wait()
        for tensor, value in zip(received, expected, strict=True):
            assert torch.equal(tensor, value), (peer, number)
        number += ahead


def reduce_all(group: Group, count: int, chance: random.Random) -> None:
    unfinished: list[tuple[Handle, torch.Tensor, float]] = []
    for number in range(count):
        shared = random.Random(number)  # the same on every rank
        tensor = torch.full((shared.choice(SIZES),), float(group.rank + number))
        total = float(sum(rank + number for rank in range(group.size)))
        unfinished.append((group.all_reduce(tensor, wait=chance.random() < 0.3), tensor, total))
        while unfinished and (len(unfinished) > 6 or chance.random() < 0.3):
            handle, reduced, value = unfinished.pop(chance.randrange(len(unfinished)))
            handle.wait()
            assert torch.equal(reduced, torch.full_like(reduced, value)), number
    for handle, reduced, value in unfinished:
        handle.wait()
        assert torch.equal(reduced, torch.full_like(reduced, value))


def everything_at_once(seed: int, direct: bool) -> None:
    group = new_group()
    group._link.can_read &= direct
    count = 60
    others = [peer for peer in range(group.size) if peer != group.rank]
    with ThreadPoolExecutor(2 * len(others) + 1) as pool:
        jobs = [pool.submit(reduce_all, group, count, random.Random(seed + group.rank))]
        for peer in others:
            for work in (send_all, receive_all):
                jobs.append(pool.submit(work, group, peer, count, random.Random(f"{seed} {peer} {work}")))
        for job in jobs:
            job.result(timeout=60)


@pytest.mark.slow_cases("2-slots", "3-direct", "3-slots")
@pytest.mark.parametrize("direct", [False, True], ids=["slots", "direct"])
@pytest.mark.parametrize("size", [2, 3])
def test_threads_that_do_everything_at_once(warm_ranks: Warm, size: int, direct: bool) -> None:
    for seed in range(3):
        warm_ranks(size).run(everything_at_once, seed, direct)
