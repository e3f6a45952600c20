"""A rank reads the others' tensors before it releases them: a caller may overwrite its own on return."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.collectives.shared import group as shared_group
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.operation_queue import Steps
from echelon.collectives.shared.slots import LANE
from tests.collectives.shared.simulated_links import SimulatedLink, advance_others, run, simulate

SIZE = 3
LENGTH = (LANE.free_bytes // 4 + SIZE) // SIZE * SIZE  # divisible, and too long for a lane: read directly

Begin = Callable[[Link, Tensor, Tensor], Steps]  # on an input and an output


def all_reduce(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    del tensor
    return shared_group.all_reduce(link, output, "sum")


def reduce_scatter(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.reduce_scatter(link, output, tensor, "sum")


def all_gather(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.all_gather(link, output, tensor)


def broadcast(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    return shared_group.broadcast(link, tensor if link.rank == 0 else output, 0)


def message(link: Link, tensor: Tensor, output: Tensor) -> Steps:
    """From rank 0 to rank 1."""
    if link.rank == 0:
        return shared_group.send(link, tensor, 1)
    return shared_group.recv(link, output, 0)


CASES: list[tuple[Begin, int, float]] = [
    (all_reduce, LENGTH, 111.0),
    (reduce_scatter, LENGTH // SIZE, 111.0),
    (broadcast, LENGTH, 1.0),
    (message, LENGTH, 1.0),
]


def add_case(links: list[SimulatedLink], begin: Begin, length: int) -> list[Tensor]:
    """Rank r has 10 ** r; every caller overwrites its input as soon as its operation returns."""
    outputs = [torch.full((length,), 10.0**link.rank) for link in links]
    for link, output in zip(links, outputs, strict=True):
        tensor = torch.full((LENGTH,), 10.0**link.rank)
        link.add(lambda link, t=tensor, o=output: begin(link, t, o), lambda t=tensor: t.fill_(-1.0))  # type: ignore[misc]
    return outputs


@pytest.mark.parametrize("slow", range(SIZE))
def test_an_all_gather_has_read_a_tensor_before_its_owner_overwrites_it(slow: int) -> None:
    """Planted once: the slot was released before the read. Rank 0 returned, and others saw its new values."""
    links = simulate(SIZE, can_read=True)
    outputs = add_case(links, all_gather, SIZE * LENGTH)
    links[slow].before_read = lambda: advance_others(links, slow)
    run(links)
    for output in outputs:
        assert [part.unique().tolist() for part in output.view(SIZE, -1)] == [[1.0], [10.0], [100.0]]


@pytest.mark.parametrize("slow", range(SIZE))
@pytest.mark.parametrize(("begin", "length", "value"), CASES, ids=[begin.__name__ for begin, *_ in CASES])
def test_a_slow_reader_gets_the_values_of_the_call(
    begin: Begin, length: int, value: float, slow: int
) -> None:
    if begin is message:
        links, slow = simulate(2, can_read=True), min(slow, 1)
    else:
        links = simulate(SIZE, can_read=True)
    outputs = add_case(links, begin, length)
    links[slow].before_read = lambda: advance_others(links, slow)
    run(links)
    results = outputs if begin in (all_reduce, reduce_scatter) else outputs[1:]
    for output in results:
        assert output.unique().tolist() == [value]


def test_an_all_reduce_may_be_overwritten_on_return() -> None:
    """It is in place, so its own result is what others still read."""
    for slow in range(SIZE):
        links = simulate(SIZE, can_read=True)
        tensors = [torch.full((LENGTH,), 10.0**link.rank) for link in links]
        results: list[list[float]] = []

        def keep_and_overwrite(tensor: Tensor, results: list[list[float]] = results) -> None:
            results.append(tensor.unique().tolist())
            tensor.fill_(-1.0)

        for link, tensor in zip(links, tensors, strict=True):
            link.add(
                lambda link, t=tensor: shared_group.all_reduce(link, t, "sum"),  # type: ignore[misc]
                lambda t=tensor: keep_and_overwrite(t),  # type: ignore[misc]
            )
        links[slow].before_read = lambda links=links, slow=slow: advance_others(links, slow)  # type: ignore[misc]
        run(links)
        assert results == [[111.0]] * SIZE
