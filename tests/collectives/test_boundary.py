"""Copies across the boundary of host memory: late where it is pretended, in order, in the ledger."""

import threading

import torch

from echelon.collectives import Ledger
from echelon.collectives.boundary import FETCH, STORE, PretendedBoundary


def boundary() -> tuple[PretendedBoundary, Ledger]:
    ledger = Ledger()
    return PretendedBoundary(ledger), ledger


def test_a_tensor_goes_out_and_comes_back() -> None:
    across, ledger = boundary()
    tensor, host = torch.arange(6.0).view(2, 3), across.empty(6, torch.float32)
    across.store(host, tensor).wait()
    back = torch.empty(2, 3)
    across.fetch(back, host).wait()
    assert torch.equal(back, tensor)
    assert ledger.total("host", STORE).sent == ledger.total("host", FETCH).received == 24


def test_who_overwrites_before_a_wait_is_found_out() -> None:
    across, _ = boundary()
    tensor, host = torch.ones(3), across.empty(3, torch.float32)
    copy = across.store(host, tensor)
    tensor.zero_()
    copy.wait()
    assert torch.equal(host, torch.zeros(3))


def test_who_reads_before_a_wait_finds_not_a_number() -> None:
    across, _ = boundary()
    tensor = torch.ones(3)
    copy = across.fetch(tensor, torch.full((3,), 2.0))
    assert tensor.isnan().all()
    copy.wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_a_wait_makes_all_earlier_copies_of_the_direction_and_no_other() -> None:
    across, _ = boundary()
    hosts = [torch.zeros(1) for _ in range(3)]
    copies = [across.store(host, torch.ones(1)) for host in hosts]
    fetched = torch.zeros(1)
    fetch = across.fetch(fetched, torch.ones(1))
    copies[1].wait()
    assert [host.item() for host in hosts] == [1, 1, 0]
    assert fetched.isnan()
    copies[0].wait()
    fetch.wait()
    assert fetched.item() == 1


def test_another_thread_may_join_before_the_step_waits() -> None:
    across, ledger = boundary()
    host = torch.zeros(2)
    copy = across.store(host, torch.ones(2))
    thread = threading.Thread(target=copy.join)
    thread.start()
    thread.join()
    assert torch.equal(host, torch.ones(2))
    assert copy.tensor is not None  # the device's memory is the copy's until the step waits
    copy.wait()
    copy.wait()
    assert copy.tensor is None
    assert ledger.total("host").count == 1


def test_holders_say_what_is_in_host_memory() -> None:
    across, _ = boundary()
    held = [torch.zeros(2)]
    across.account("optimizer", lambda: held)
    across.account("optimizer", lambda: [torch.zeros(3)])
    assert {category: len(each) for category, each in across.storages().items()} == {"optimizer": 2}
    held.clear()
    assert len(across.storages()["optimizer"]) == 1
