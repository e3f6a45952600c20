"""A rank copies a slot before it releases it: a writer that runs ahead must not overwrite it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives.shared import group as shared_group
from echelon.collectives.shared import staged_copy
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.operation_queue import Steps
from echelon.collectives.shared.slots import COLLECTIVE, LANE, TensorMemory
from tests.collectives.shared.simulated_links import SimulatedLink, advance_others, run, simulate

SIZE = 3
NUM_OPERATIONS = 3
# Elements, divisible by 3: one slot, and more than a whole ring.
LENGTHS = [30, (COLLECTIVE.slots * COLLECTIVE.slot_bytes // 4 // SIZE + 1) * SIZE]

Begin = Callable[[Link, Tensor, Tensor], Steps]  # on an input and an output


def broadcast(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.broadcast(link, tensor if link.rank == 0 else output, 0)


def all_gather(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.all_gather(link, output, tensor[: tensor.numel() // SIZE])


def all_reduce(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    output.copy_(tensor)
    return shared_group.all_reduce(link, output, "max")


def reduce_scatter(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.reduce_scatter(link, output[: output.numel() // SIZE], tensor, "max")


def watch_reads(monkeypatch: pytest.MonkeyPatch, links: list[SimulatedLink], slow: int) -> None:
    """A rank must not have released the slot that it reads; before rank `slow` reads, the others go on."""
    copy_from, reduce = TensorMemory.copy_from, staged_copy._reduce

    def before_read(address: int) -> None:
        running = [link for link in links if link.is_running]
        reader = next((link for link in running if link.rank != slow), running[0])
        assert reader.is_slot_in_use(address), "the slot was released before it was read"
        if reader.rank == slow:
            advance_others(links, slow)

    def watched_copy(self: TensorMemory, address: int) -> None:
        before_read(address)
        copy_from(self, address)

    def watched_reduce(link: Link, others: Mapping[int, Tensor], *args: Any) -> None:
        for part in others.values():
            before_read(part.data_ptr())
        reduce(link, others, *args)

    monkeypatch.setattr(TensorMemory, "copy_from", watched_copy)
    monkeypatch.setattr(staged_copy, "_reduce", watched_reduce)


@pytest.mark.quick_cases(7)
@pytest.mark.slow_cases(
    "all_gather-0-1048578",
    "all_gather-1-1048578",
    "all_reduce-1-1048578",
    "all_reduce-2-1048578",
    "broadcast-0-1048578",
    "broadcast-1-1048578",
    "broadcast-2-1048578",
    "reduce_scatter-0-1048578",
    "reduce_scatter-1-1048578",
    "reduce_scatter-2-1048578",
)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("slow", range(SIZE))
@pytest.mark.parametrize("begin", [broadcast, all_gather, all_reduce, reduce_scatter])
def test_a_slow_reader_reads_what_was_written_for_it(
    monkeypatch: pytest.MonkeyPatch, begin: Begin, slow: int, length: int
) -> None:
    """Operation n of rank r is on values 100 n + r, and inputs are overwritten on return."""
    links = simulate(SIZE, can_read=False)
    outputs = [[torch.zeros(length) for _ in range(NUM_OPERATIONS)] for _ in links]
    for link, results in zip(links, outputs, strict=True):
        for number, output in enumerate(results):
            tensor = torch.full((length,), 100.0 * number + link.rank)
            link.add(
                lambda link, t=tensor, o=output: begin(link, t, o),  # type: ignore[misc]
                lambda t=tensor: t.fill_(-1.0),  # type: ignore[misc]
            )
    watch_reads(monkeypatch, links, slow)
    run(links)
    for rank, results in enumerate(outputs):
        for number, output in enumerate(results):
            values = [value for part in output.view(SIZE, -1) for value in part.unique().tolist()]
            first = 100.0 * number
            if begin is all_gather:
                assert values == [first, first + 1, first + 2]
            elif begin is all_reduce:
                assert values == [first + 2] * SIZE
            elif begin is reduce_scatter:
                assert values == [first + 2, 0.0, 0.0]
            else:
                assert values == [first if rank else 0.0] * SIZE


@pytest.mark.parametrize("length", [10, 2 * LANE.slots * LANE.slot_bytes // 4])
def test_a_slow_receiver_gets_messages_in_order(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    links = simulate(2, can_read=False)
    outputs = [torch.zeros(length) for _ in range(2 * LANE.slots)]
    for number, output in enumerate(outputs):
        tensor = torch.full((length,), float(number))
        links[0].add(
            lambda link, t=tensor: shared_group.send(link, t, 1),  # type: ignore[misc]
            lambda t=tensor: t.fill_(-1.0),  # type: ignore[misc]
        )
        links[1].add(lambda link, o=output: shared_group.recv(link, o, 0))  # type: ignore[misc]
    watch_reads(monkeypatch, links, slow=1)
    run(links)
    assert [output.unique().tolist() for output in outputs] == [[float(n)] for n in range(len(outputs))]
