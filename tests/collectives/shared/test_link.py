"""How links end: peers die, differ, time out or close, and nothing stays behind."""

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Ledger, TorchGroup, group_over
from echelon.collectives.shared import link as link_module
from echelon.collectives.shared import peers as peers_module
from echelon.errors import UserError
from echelon.launching import PeerLost, RankFailed, Ranks, rank_process
from tests.collectives.shared.real_ranks import LARGE, Warm, message_in_child, new_group, result_of, world

THREAD = "echelon-shared-memory"


def threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:echelon")


def comes_and_goes() -> None:
    """A process group of its own: made, used, destroyed, and everything is as before."""
    plain = dist.new_group()  # torch's own share, to compare with
    before = threads(), mapped()
    group = new_group()
    group.all_reduce(torch.ones(LARGE))
    group.all_reduce(torch.ones(3))
    assert threads() == before[0] + 1
    assert mapped() > before[1]
    open_then = descriptors()
    process_group = group.process_group
    del group
    dist.destroy_process_group(process_group)
    assert threads() == before[0] + 1, "the process group is still here"
    del process_group
    gc.collect()
    assert (threads(), mapped()) == before
    # Its eventfd, and a socket to each peer.
    assert descriptors() <= open_then - dist.get_world_size()
    dist.destroy_process_group(plain)


def test_a_link_ends_with_its_process_group(warm_ranks: Warm) -> None:
    for _ in range(3):
        warm_ranks(3).run(comes_and_goes)


def closes_over_the_world() -> tuple[int, int, int, int]:
    """The process group of the world stays, its link ends; a new one can be made."""
    group = world()
    group.all_reduce(torch.ones(LARGE))
    during = threads(), mapped()
    group.close()
    after = threads(), mapped()
    tensor = torch.ones(2)
    world().all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    return *during, *after


def test_a_link_over_the_world_ends_with_its_group() -> None:
    with Ranks(2, deadline=30.0) as ranks:
        assert ranks.run(closes_over_the_world) == [(1, 2, 0, 0)] * 2


def two_over_one() -> tuple[int, bool]:
    """Groups over the same process group share its link: the second connects to no one."""
    first = new_group()
    before = threads()
    second = group_over("tensor", first.process_group, Ledger())
    tensor = torch.ones(2)
    second.all_reduce(tensor)
    first.all_reduce(tensor)
    dist.destroy_process_group(first.process_group)
    return threads() - before, tensor.tolist() == [4.0, 4.0]


def test_groups_over_one_process_group_share_a_link(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(two_over_one) == [(0, True)] * 2


def waits_for_the_dead(operation: str) -> str:
    group = new_group()
    tensor = torch.ones(LARGE)
    group.all_reduce(tensor)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    try:
        if operation == "recv":
            group.recv(tensor, 1)
        elif operation == "broadcast":
            group.broadcast(tensor, 1)
        else:
            group.all_reduce(tensor)
    except PeerLost as lost:
        raise PeerLost(f"{lost}; noticed in time: {time.perf_counter() - begun < 5}") from lost
    return "went on"


@pytest.mark.parametrize("operation", ["all_reduce", "recv", "broadcast"])
def test_a_killed_peer_is_lost_to_the_others_and_the_root_cause(operation: str) -> None:
    with pytest.raises(RankFailed) as caught, Ranks(3, deadline=30.0) as ranks:
        ranks.run(waits_for_the_dead, operation)
    assert caught.value.rank == 1
    assert "SIGKILL" in caught.value.reason
    lost = [other for other in caught.value.others if "raised" in other]
    assert lost, caught.value.others
    for other in lost:
        assert "PeerLost" in other
        assert "along data lost a peer" in other
        assert "noticed in time: True" in other


def what_the_lost_had_sent() -> list[float]:
    """Rank 1 sends and leaves; what it sent still arrives, and only what it did not send is missed."""
    group = new_group()
    tensor = torch.zeros(1000)
    if group.rank == 1:
        group.send(tensor.fill_(5), 0)
        group.close()
        dist.barrier()
        return []
    dist.barrier()
    group.recv(tensor, 1)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        group.recv(tensor, 1)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        group.all_reduce(tensor)
    return tensor[:2].tolist()


def test_what_a_rank_sent_before_it_left_arrives(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(what_the_lost_had_sent)[0] == [5.0, 5.0]


def abandoned() -> None:
    """A receive without a message, when the group is closed."""
    group = new_group()
    handle = group.recv(torch.zeros(3), 1 - group.rank, wait=False)
    group._link.close()
    with pytest.raises(PeerLost):
        handle.wait()
    with pytest.raises(PeerLost, match="closed"):
        group.all_reduce(torch.zeros(3))


def test_unfinished_operations_fail_when_the_group_closes(warm_ranks: Warm) -> None:
    warm_ranks(2).run(abandoned)


def no_one_sends() -> None:
    """Then the link is over, for the rank that waited and at once for the peer, which has time left."""
    timeout = timedelta(seconds=1 if dist.get_rank() == 0 else 600)
    process_group = dist.new_group(timeout=timeout)
    group = group_over("data", process_group, Ledger())  # type: ignore[arg-type]
    if group.rank == 0:
        with pytest.raises(PeerLost, match="along data timed out waiting for its peers after 1 seconds"):
            group.recv(torch.zeros(3), 1)
    dist.barrier()
    with pytest.raises(PeerLost, match="timed out" if group.rank == 0 else "rank 0 is gone"):
        group.all_reduce(torch.zeros(3))
    group.close()


def test_the_timeout_of_the_process_group_holds(warm_ranks: Warm) -> None:
    """Under torchrun no parent watches the ranks: without it a wait would last forever."""
    warm_ranks(2).run(no_one_sends)


def goes_on_after_an_error(sizes: list[int]) -> list[str]:
    """Sizes differ, which is an error; a rank that goes on after it must not get the data of that turn."""
    group = new_group()
    queued = group.recv(torch.zeros(3), 1 - group.rank, wait=False)
    first = result_of(lambda: group.all_reduce(torch.full((10 + 10 * group.rank,), 100.0)))
    later = [result_of(lambda size=size: group.all_reduce(torch.ones(size))) for size in sizes]  # type: ignore[misc]
    return [
        first,
        *later,
        result_of(queued.wait),
        result_of(lambda: group.send(torch.ones(3), 1 - group.rank)),
    ]


@pytest.mark.parametrize("sizes", [[10, 20], [20, 10], [40_000, 5]])
def test_nothing_goes_on_after_an_error(warm_ranks: Warm, sizes: list[int]) -> None:
    for results in warm_ranks(2).run(goes_on_after_an_error, sizes):
        assert results[0] == "MismatchError"
        assert set(results) <= {"MismatchError", "PeerLost"}


def differs_in(aspect: str) -> list[str]:
    group = new_group()
    length = 40_000 if "large" in aspect else 4
    tensor = torch.ones(length)
    if "type" in aspect:
        tensor = torch.ones(length, dtype=torch.int32 if group.rank else torch.float32)
        return [result_of(lambda: group.all_reduce(tensor))]
    if "message" in aspect:
        ones = torch.ones(length, dtype=torch.int32 if group.rank else torch.float32)
        return [result_of(lambda: group.recv(ones, 0) if group.rank else group.send(ones, 1))]
    if "reduction" in aspect:
        return [result_of(lambda: group.all_reduce(tensor, "max" if group.rank else "sum"))]
    # Each is a source and waits for no one; the next operation would read the data of this one.
    group.broadcast(tensor, group.rank)
    return [result_of(lambda: group.broadcast(tensor, 0)), result_of(lambda: group.all_reduce(tensor))]


@pytest.mark.parametrize(
    "aspect", ["type", "large type", "message type", "reduction", "large reduction", "source"]
)
def test_a_difference_in_more_than_size_is_reported(warm_ranks: Warm, aspect: str) -> None:
    results = warm_ranks(2).run(differs_in, aspect)
    assert results[1][0] == "MismatchError", "at once, before it reads the data of another operation"
    assert "message" in aspect or set(results[0][-1:]) <= {"MismatchError", "PeerLost"}


def one_gone_one_late(length: int) -> str:
    """Rank 2 has left. Rank 1 comes after rank 0 has learned of that: rank 0 must not wait for rank 1."""
    group = new_group()
    group.all_reduce(torch.ones(4))
    if group.rank == 2:
        group.close()
    dist.barrier()
    message = ""
    if group.rank == 0:
        with pytest.raises(PeerLost, match="lost a peer: rank 2 is gone") as caught:
            group.all_reduce(torch.ones(length))
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("length", [4, 1000, LARGE])
def test_a_lost_rank_is_noticed_before_its_turn(warm_ranks: Warm, length: int) -> None:
    assert warm_ranks(3).run(one_gone_one_late, length)[0].endswith("rank 2 is gone")


def lane_of_one_that_left() -> float:
    """A server outlives its workers: a message that one of them does not send fails alone."""
    group = new_group()
    tensor = torch.zeros(3)
    if group.rank == 1:
        group.close()
    dist.barrier()
    if group.rank == 0:
        assert result_of(lambda: group.recv(tensor, 1)) == "PeerLost"
        group.recv(tensor, 2)
    elif group.rank == 2:
        group.send(tensor.fill_(4), 0)
    dist.barrier()
    return tensor[0].item()


def test_messages_between_the_remaining_ranks_go_on(warm_ranks: Warm) -> None:
    assert warm_ranks(3).run(lane_of_one_that_left) == [4.0, 0.0, 4.0]


def freed_while_read() -> str:
    """The sender's memory is unmapped under the message: its rank is not lost, and must not be called so."""
    group = new_group()
    if not group._link.can_read:
        return "freed or unreadable while in use"
    memory = mmap.mmap(-1, 4 * LARGE)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    if group.rank == 0:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(tensor.data_ptr()), 4 * LARGE, 0) == 0
        assert result_of(lambda: group.send(tensor, 1)) == "PeerLost"
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.recv(tensor, 0)
    assert not isinstance(caught.value, PeerLost)
    return str(caught.value)


def test_memory_that_cannot_be_read_is_not_a_lost_peer(warm_ranks: Warm) -> None:
    assert "rank 0 was freed or unreadable while in use" in warm_ranks(2).run(freed_while_read)[1]


def used_by_a_child() -> str:
    """A data worker that uses its parent's group, where no thread runs."""
    group = new_group()
    message = message_in_child(lambda: group.all_reduce(torch.ones(1)))
    group.all_reduce(torch.ones(1))
    return message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_a_forked_child_is_refused_at_once() -> None:
    with Ranks(2, deadline=20.0) as ranks:
        for message in ranks.run(used_by_a_child):
            assert "a forked child cannot use the group of its parent" in message


def out_of_step() -> None:
    group = new_group()
    if group.rank == 0:
        group.all_reduce(torch.ones(10))
    else:
        group.all_gather(torch.ones(8), torch.ones(4))


def test_different_operations_are_reported() -> None:
    reported = pytest.raises(RankFailed, match=r"MismatchError: .*(all_reduce of 40|all_gather of 32) bytes")
    with reported, Ranks(2, deadline=30.0) as ranks:
        ranks.run(out_of_step)


def a_child_and_a_death() -> None:
    """Rank 1 forks a data worker and is killed: the worker, which lives on, must not hold its sockets."""
    group = new_group()
    if group.rank == 1:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    try:
        group.all_reduce(torch.ones(3))
    except PeerLost:
        raise PeerLost(f"noticed in time: {time.perf_counter() - begun < 250}") from None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_a_forked_child_does_not_keep_a_dead_rank_alive() -> None:
    with pytest.raises(RankFailed) as caught, Ranks(2, deadline=300.0) as ranks:
        ranks.run(a_child_and_a_death)
    assert caught.value.rank == 1
    assert "noticed in time: True" in caught.value.others[0]


def leaves_one_running() -> list[str]:
    """The names of its sockets, as the host knows them."""
    group = new_group()
    group.recv(torch.zeros(3), 1 - group.rank, wait=False)
    names = [peer._connection.getsockname() for peer in group._link._sockets.values()]
    return [name[1:].decode() for name in names if name]


def test_exit_waits_for_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(1):  # starts the fork server, whose own folder outlives this test
        pass
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rank_process, "_STOP_SECONDS", 300.0)
    with Ranks(2, deadline=300.0) as ranks:
        (name,), _ = ranks.run(leaves_one_running)
        assert name in Path("/proc/net/unix").read_text()
        begun = time.perf_counter()
    assert time.perf_counter() - begun < 250, "or a rank had to be killed after 300 seconds"
    assert name not in Path("/proc/net/unix").read_text()
    assert os.listdir(tmp_path) == []
    # Copies of checkpoints in memory are those of tests that run beside this one.
    left = [shared for shared in os.listdir("/dev/shm") if "echelon" in shared]
    assert not [shared for shared in left if not shared.startswith("echelon-memory-")]


def kind_of_group(change: Callable[[], None]) -> str:
    if dist.get_rank() == 1:
        change()
    process_group = dist.new_group()
    try:
        group = group_over("data", process_group, Ledger())  # type: ignore[arg-type]
        tensor = torch.ones(5)
        group.all_reduce(tensor)
        assert tensor.tolist() == [float(group.size)] * 5
        assert type(group) is TorchGroup or not group._link.can_read
        return type(group).__name__
    finally:
        dist.destroy_process_group(process_group)


def switch_off() -> None:
    os.environ[link_module.SWITCH] = "gloo"


def another_host() -> None:
    peers_module._BOOT_ID = Path("/proc/sys/kernel/ostype")  # any text that is not this host's


def another_network() -> None:
    """Its calls end nowhere, as from another network namespace."""
    real = socket.socket

    class Elsewhere(real):
        def connect(self, _: object) -> None:
            raise ConnectionRefusedError

    socket.socket = Elsewhere  # type: ignore[misc]


def no_reading() -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    link_module.read_memory = refuse


def fails(*_: object, **__: object) -> None:
    raise OSError(38, "Function not implemented")


def no_memory() -> None:
    os.memfd_create = fails  # type: ignore[assignment]


def no_event_descriptor() -> None:
    os.eventfd = fails  # type: ignore[assignment]


def no_sockets() -> None:
    socket.socket = fails  # type: ignore[assignment,misc]


def no_mapping() -> None:
    peers_module.mmap = fails  # type: ignore[assignment,misc]


def no_descriptor_passing() -> None:
    socket.send_fds = fails


def fill_queue() -> None:
    """Strangers that read the name in /proc/net/unix fill the listener's queue, and send nothing."""
    prepare, strangers = peers_module.Host.__init__, []

    def prepare_and_fill(self: peers_module.Host, *args: Any) -> None:
        prepare(self, *args)
        while True:
            stranger = socket.socket(socket.AF_UNIX)
            stranger.setblocking(False)
            try:
                stranger.connect(self._listener.getsockname())
            except BlockingIOError:
                return
            strangers.append(stranger)

    peers_module.Host.__init__ = prepare_and_fill  # type: ignore[method-assign]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (no_memory, "TorchGroup"),
        (no_event_descriptor, "TorchGroup"),
        (no_sockets, "TorchGroup"),
        (no_mapping, "TorchGroup"),
        (no_descriptor_passing, "TorchGroup"),
        pytest.param(fill_queue, "TorchGroup", marks=pytest.mark.slow),
        (switch_off, "TorchGroup"),
        (another_host, "TorchGroup"),
        (another_network, "TorchGroup"),
        (no_reading, "SharedGroup"),
    ],
)
def test_all_ranks_go_the_same_way_when_one_cannot(change: Callable[[], None], kind: str) -> None:
    with Ranks(3, deadline=30.0) as ranks:
        assert ranks.run(kind_of_group, change) == [kind] * 3


def unknown_switch() -> str:
    if dist.get_rank() == 1:
        os.environ[link_module.SWITCH] = "shard"
    with pytest.raises(UserError) as caught:
        new_group()
    return str(caught.value)


def test_an_unknown_transport_is_refused_on_all_ranks() -> None:
    with Ranks(2, deadline=30.0) as ranks:
        for message in ranks.run(unknown_switch):
            assert "rank 1: ECHELON_TRANSPORT=shard must be one of auto, shared, gloo" in message


def under_another_default() -> float:
    with torch.device("meta"):
        group = new_group()
    tensor = torch.ones(LARGE)
    group.all_reduce(tensor)
    return tensor[-1].item()


def test_the_default_device_does_not_matter(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(under_another_default) == [2.0, 2.0]
