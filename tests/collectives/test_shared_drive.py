"""Who moves what goes through shared memory: callers that wait, others beside them, and the helper."""

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Group, Handle, Ledger, group_over
from echelon.collectives.shared.group import SharedGroup
from echelon.collectives.shared.slots import LANE
from echelon.launching import PeerLost, Ranks

from .test_shared_life import new_group, result_of, said_in_a_child, threads

Warm = Callable[[int], Ranks]

SMALL, SLOT, LARGE = 3, LANE.slot_bytes // 4, 1_000_000  # elements; the last is read directly


def helper_calls(group: SharedGroup) -> list[int]:
    """Grows with every call for the helper."""
    call, calls = group._link._progress_loop._background_call, []
    notify = call.notify

    def counted(n: int = 1) -> None:
        calls.append(n)
        notify(n)

    call.notify = counted  # type: ignore[method-assign]
    return calls


def without_the_helper() -> tuple[int, int]:
    group = new_group()
    calls = helper_calls(group)
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
    for _ in range(50):  # more than the lane holds: what was read is heard by the send itself
        handle = group.recv(torch.ones(SLOT), other, wait=False)
        group.send(torch.ones(SLOT), other, wait=False)
        handle.wait()
    return while_waiting, len(calls)


def test_who_waits_needs_no_helper(warm_ranks: Warm) -> None:
    for while_waiting, in_all in warm_ranks(2).run(without_the_helper):
        assert while_waiting == 0
        assert in_all <= 1, "at most to look after receives again, when nothing had been under way for long"


def one_after_the_other(first: int, length: int) -> list[str]:
    """Two threads of rank 0 wait, the second while the first drives; whoever gets its message first."""
    group = new_group()
    if group.rank != 0:
        dist.barrier()
        time.sleep(0.2 if group.rank == first else 0.6)
        group.send(torch.full((length,), float(group.rank)), 0)
        return []
    came: list[str] = []

    def wait_for(peer: int) -> None:
        tensor = torch.zeros(length)
        group.recv(tensor, peer)
        came.append(f"{tensor[-1].item():.0f}")

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_for, 1)]
        time.sleep(0.1)
        waiting.append(pool.submit(wait_for, 2))
        time.sleep(0.1)
        dist.barrier()
        for each in waiting:
            each.result(timeout=10)
    return came


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize(("first", "order"), [(1, ["1", "2"]), (2, ["2", "1"])])
def test_a_follower_is_served_and_takes_over(
    warm_ranks: Warm, first: int, order: list[str], length: int
) -> None:
    assert warm_ranks(3).run(one_after_the_other, first, length)[0] == order


def helper_goes_on_behind() -> bool:
    """A caller's wait is over before an operation that it has begun: the helper takes the seat."""
    group = new_group()
    if group.rank == 0:
        behind = group.all_reduce(torch.ones(LARGE), wait=False)
        tensor = torch.zeros(SMALL)
        group.recv(tensor, 1)
        dist.barrier()
        time.sleep(0.3)
        assert behind._work is not None
        done = behind._work.done_at() is not None  # without anybody's look
        behind.wait()
        return done
    group.send(torch.ones(SMALL), 0)
    dist.barrier()
    group.all_reduce(torch.ones(LARGE))
    return True


def test_the_helper_goes_on_with_what_no_caller_waits_for(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(helper_goes_on_behind) == [True, True]


def full_lane(length: int) -> float:
    """Many sends, more than the lane holds; the sender does something else when the receiver comes."""
    group = new_group()
    count = 3 * LANE.slots
    if group.rank == 0:
        handles = [group.send(torch.full((length,), float(n)), 1, wait=False) for n in range(count)]
        dist.barrier()
        time.sleep(1.0)
        for handle in handles:
            handle.wait()
        return 0.0
    time.sleep(0.2)  # nobody receives
    dist.barrier()
    begun = time.perf_counter()
    for n in range(count):
        tensor = torch.zeros(length)
        group.recv(tensor, 0)
        assert torch.equal(tensor, torch.full_like(tensor, float(n)))
    return time.perf_counter() - begun


@pytest.mark.parametrize("length", [SLOT, LARGE])
def test_sends_that_found_the_lane_full_go_on_by_themselves(warm_ranks: Warm, length: int) -> None:
    assert warm_ranks(2).run(full_lane, length)[1] < 0.8


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
    return all(torch.equal(found, sent) for found, sent in zip(incoming, tensors, strict=True))


@pytest.mark.parametrize("length", [SLOT, LARGE])
def test_receives_posted_early_go_on_without_a_wait(warm_ranks: Warm, length: int) -> None:
    assert warm_ranks(2).run(posted_and_away, length) == [True, True]


def known_to_be_gone() -> list[bool]:
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


def test_a_send_is_known_to_be_gone_without_a_wait(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(known_to_be_gone)[0] == [True, False, True]


def several_waiters(group: Group, count: int) -> list[str]:
    """What becomes of one that drives and of others that wait beside it."""
    tensors = [torch.zeros(SMALL) for _ in range(count)]
    handles: list[Handle] = [group.recv(tensor, 1, wait=False) for tensor in tensors]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda handle: result_of(handle.wait), handles))


def peer_leaves() -> tuple[list[str], float]:
    group = new_group()
    if group.rank == 1:
        dist.barrier()
        time.sleep(0.2)
        group._link.close()
        return [], 0.0
    dist.barrier()
    begun = time.perf_counter()
    return several_waiters(group, 3), time.perf_counter() - begun


def test_all_who_wait_learn_of_a_lost_peer(warm_ranks: Warm) -> None:
    results, seconds = warm_ranks(2).run(peer_leaves)[0]
    assert results == ["PeerLost"] * 3
    assert seconds < 5


def closed_under_a_driver() -> tuple[list[str], float, int]:
    before = threads()
    group = new_group()
    if group.rank == 0:
        threading.Timer(0.3, group._link.close).start()
        begun = time.perf_counter()
        results = several_waiters(group, 3)
        seconds = time.perf_counter() - begun
        group._link._progress_loop._background_thread.join(5)
        dist.barrier()
        return results, seconds, threads() - before
    dist.barrier()
    return [], 0.0, 0


def test_a_link_may_be_closed_while_somebody_drives(warm_ranks: Warm) -> None:
    results, seconds, more = warm_ranks(2).run(closed_under_a_driver)[0]
    assert results == ["PeerLost"] * 3
    assert seconds < 5
    assert more == 0


def too_late() -> tuple[list[str], float]:
    process_group = dist.new_group(timeout=timedelta(seconds=1))
    group = group_over("data", process_group, Ledger())  # type: ignore[arg-type]
    begun = time.perf_counter()
    results = several_waiters(group, 3) if group.rank == 0 else []
    seconds = time.perf_counter() - begun
    dist.barrier()
    return results, seconds


def test_the_timeout_holds_for_all_who_wait(warm_ranks: Warm) -> None:
    results, seconds = warm_ranks(2).run(too_late)[0]
    assert results == ["PeerLost"] * 3
    assert 0.9 < seconds < 5


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

    def handler(*_: object) -> None:
        raise Interrupt

    signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
    with pytest.raises(Interrupt):
        group.recv(torch.ones(SMALL), 1)
    with pytest.raises(RuntimeError, match="was interrupted") as caught:
        group.all_reduce(torch.ones(SMALL))
    dist.barrier()
    return [str(caught.value)]


def test_an_interrupted_driver_ends_the_link() -> None:
    with Ranks(2, deadline=20.0) as ranks:
        assert ranks.run(interrupted)[0] == ["an operation between ranks was interrupted"]


def waits_in_a_child() -> str:
    group = new_group()
    handle = group.recv(torch.zeros(SMALL), 1 - group.rank, wait=False)

    def wait_for_it() -> None:
        assert not handle.done()
        handle.wait()

    said = said_in_a_child(wait_for_it)
    group.send(torch.zeros(SMALL), 1 - group.rank)
    handle.wait()
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_a_forked_child_waits_for_nothing_of_its_parent() -> None:
    with Ranks(2, deadline=20.0) as ranks:
        for said in ranks.run(waits_in_a_child):
            assert "a forked child cannot wait" in said


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
        wanted = [message(peer, group.rank, number + n) for n in range(ahead)]
        found = [torch.zeros_like(tensor) for tensor in wanted]
        handles = [group.recv(tensor, peer, wait=False) for tensor in found]
        time.sleep(chance.random() * 0.003)
        for handle in chance.sample(handles, len(handles)):
            handle.wait()
        for tensor, value in zip(found, wanted, strict=True):
            assert torch.equal(tensor, value), (peer, number)
        number += ahead


def reduce_all(group: Group, count: int, chance: random.Random) -> None:
    flying: list[tuple[Handle, torch.Tensor, float]] = []
    for number in range(count):
        same = random.Random(number)
        tensor = torch.full((same.choice(SIZES),), float(group.rank + number))
        total = float(sum(rank + number for rank in range(group.size)))
        flying.append((group.all_reduce(tensor, wait=chance.random() < 0.3), tensor, total))
        while flying and (len(flying) > 6 or chance.random() < 0.3):
            handle, reduced, value = flying.pop(chance.randrange(len(flying)))
            handle.wait()
            assert torch.equal(reduced, torch.full_like(reduced, value)), number
    for handle, reduced, value in flying:
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


@pytest.mark.parametrize("direct", [False, True], ids=["slots", "direct"])
@pytest.mark.parametrize("size", [2, 3])
def test_threads_that_do_everything_at_once(warm_ranks: Warm, size: int, direct: bool) -> None:
    for seed in range(3):
        warm_ranks(size).run(everything_at_once, seed, direct)
