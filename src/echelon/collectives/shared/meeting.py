"""How the ranks of a group meet: are they all on this host, and then a socket and a region for each pair.

Nothing is left behind, however a rank ends: regions are anonymous memory, passed from rank to rank over the
sockets, and the sockets listen in Linux's abstract namespace, which has no files. That namespace belongs to
the network namespace: ranks in another one cannot be reached, and then the group stays with its backend.
"""

import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.collectives.shared.foreign import let_siblings_read, read_memory
from echelon.collectives.shared.slots import region_bytes
from echelon.launching.group import all_gather_bytes

SWITCH = "ECHELON_TRANSPORT"  # "gloo" in any rank's environment switches this transport off

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another one on every host, and after every start
_NO = b"no"
_SECRET_BYTES = 16
_RANK = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Credentials(NamedTuple):
    process: int
    user: int
    group: int


class Met(NamedTuple):
    """What two ranks share: the way to talk, and the other's region."""

    rank: int
    process: int
    socket: socket.socket
    region: mmap


class Meeting(NamedTuple):
    """This rank's region, the peers it met, and whether they all can read each other's memory."""

    region: mmap
    peers: list[Met]
    can_read: bool


def meet(group: dist.ProcessGroup) -> Meeting | None:
    """Connect all ranks of `group`, or none of them: every rank gets the same kind of answer."""
    rank, size = group.rank(), group.size()
    with _new_region(size) as descriptor, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        cards = all_gather_bytes(_NO if descriptor is None else _card(listener, size), group)
        if descriptor is None or not _one_host(cards):
            return None
        names = [card.split()[1].decode() for card in cards]
        below = _call(names[:rank], rank, descriptor)
        if _NO in all_gather_bytes(b"met" if len(below) == rank else _NO, group):
            for each in below:
                each.close()
            return None
        # From here on all have called: the callers wait in the listener's queue already.
        above = [_answer(listener, descriptor) for _ in range(rank + 1, size)]
        peers = sorted([*above, *(_greet(each, index) for index, each in enumerate(below))], key=_rank_of)
        return Meeting(mmap(descriptor, region_bytes(size)), peers, _can_read(peers, group))


def _card(listener: socket.socket, size: int) -> bytes:
    """Which host this is and where its rank listens, or that it cannot."""
    name = f"echelon-{secrets.token_hex(16)}"
    try:
        listener.bind(f"\0{name}")
        listener.listen(size)
        return f"{_BOOT_ID.read_text().strip()} {name}".encode()
    except OSError:
        return _NO


def _one_host(cards: list[bytes]) -> bool:
    return _NO not in cards and len({card.split()[0] for card in cards}) == 1


@contextlib.contextmanager
def _new_region(size: int) -> Iterator[int | None]:
    """The descriptor of memory without a name; None where there is none, or should be none."""
    if sys.platform != "linux" or os.environ.get(SWITCH) == "gloo":
        yield None
        return
    descriptor = os.memfd_create("echelon")
    try:
        os.ftruncate(descriptor, region_bytes(size))
        yield descriptor
    finally:
        os.close(descriptor)  # the mapping stays


def _call(names: list[str], rank: int, descriptor: int) -> list[socket.socket]:
    """Call the listeners and hand each this rank's region; fewer than asked for where one is out of reach."""
    reached: list[socket.socket] = []
    for name in names:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            caller.connect(f"\0{name}")
            if not _is_ours(caller):
                raise PermissionError("the listener belongs to another user")
            socket.send_fds(caller, [_RANK.pack(rank)], [descriptor])
        except OSError:
            caller.close()
            break
        reached.append(caller)
    return reached


def _answer(listener: socket.socket, descriptor: int) -> Met:
    """The next caller; whoever is not of this user is turned away."""
    while True:
        caller, _ = listener.accept()
        if _is_ours(caller):
            break
        caller.close()
    hello, descriptors, _, _ = socket.recv_fds(caller, _RANK.size, 1)
    socket.send_fds(caller, [b"\0"], [descriptor])
    return Met(_RANK.unpack(hello)[0], _credentials(caller).process, caller, _map(descriptors))


def _greet(called: socket.socket, rank: int) -> Met:
    """What rank `rank`, which was called, hands over."""
    _, descriptors, _, _ = socket.recv_fds(called, 1, 1)
    return Met(rank, _credentials(called).process, called, _map(descriptors))


def _rank_of(met: Met) -> int:
    return met.rank


def _can_read(peers: list[Met], group: dist.ProcessGroup) -> bool:
    """Whether every rank can read every other's memory: each tries to read a secret of each."""
    let_siblings_read()
    secret = torch.frombuffer(bytearray(secrets.token_bytes(_SECRET_BYTES)), dtype=torch.uint8)
    told = all_gather_bytes(secret.numpy().tobytes() + secret.data_ptr().to_bytes(8, "little"), group)
    readable = all(_reads(met.process, told[met.rank]) for met in peers)
    return _NO not in all_gather_bytes(b"yes" if readable else _NO, group)


def _reads(process: int, told: bytes) -> bool:
    found = torch.zeros(_SECRET_BYTES, dtype=torch.uint8)
    with contextlib.suppress(OSError):
        read_memory(process, int.from_bytes(told[_SECRET_BYTES:], "little"), found)
    return found.numpy().tobytes() == told[:_SECRET_BYTES]


def _map(descriptors: list[int]) -> mmap:
    (descriptor,) = descriptors
    try:
        return mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _is_ours(caller: socket.socket) -> bool:
    return _credentials(caller).user == os.getuid()


def _credentials(caller: socket.socket) -> _Credentials:
    """Of the other end, as the kernel knows them."""
    packed = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _Credentials(*_CREDENTIALS.unpack(packed))
