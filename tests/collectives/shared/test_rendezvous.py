"""All ranks of a group share memory or none: when one cannot, all stay with Gloo."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Ledger, TorchGroup, group_over
from echelon.collectives.shared import handshake, rendezvous
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.collectives.shared.real_ranks import LARGE, Warm, new_group


def kind_of_group(change: Callable[[], None]) -> str:
    if dist.get_rank() == 1:
        change()
    process_group = dist.new_group()
    try:
        group = group_over("data", process_group, Ledger())  # type: ignore[arg-type]
        tensor = torch.ones(5)
        group.all_reduce(tensor)
        assert tensor.tolist() == [float(group.size)] * 5
        assert isinstance(group, TorchGroup) or not group._link.can_read
        return type(group).__name__
    finally:
        dist.destroy_process_group(process_group)


def switch_off() -> None:
    os.environ[rendezvous.SWITCH] = "gloo"


def another_host() -> None:
    handshake._BOOT_ID = Path("/proc/sys/kernel/ostype")  # any text that is not this host's


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

    rendezvous.read_memory = refuse


def fails(*_: object, **__: object) -> None:
    raise OSError(38, "Function not implemented")


def no_memory() -> None:
    os.memfd_create = fails  # type: ignore[assignment]


def no_event_descriptor() -> None:
    os.eventfd = fails  # type: ignore[assignment]


def no_sockets() -> None:
    socket.socket = fails  # type: ignore[assignment,misc]


def no_mapping() -> None:
    handshake.mmap = fails  # type: ignore[assignment,misc]


def no_descriptor_passing() -> None:
    socket.send_fds = fails


def fill_queue() -> None:
    """Strangers that read the name in /proc/net/unix fill the listener's queue, and send nothing."""
    prepare, strangers = handshake.Host.__init__, []

    def prepare_and_fill(self: handshake.Host, *args: Any) -> None:
        prepare(self, *args)
        while True:
            stranger = socket.socket(socket.AF_UNIX)
            stranger.setblocking(False)
            try:
                stranger.connect(self._listener.getsockname())
            except BlockingIOError:
                return
            strangers.append(stranger)

    handshake.Host.__init__ = prepare_and_fill  # type: ignore[method-assign]


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
        os.environ[rendezvous.SWITCH] = "shard"
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
