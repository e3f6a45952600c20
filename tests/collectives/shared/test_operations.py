"""An operation uses the memory that its tensors had at the call, and never lets peers read pinned memory."""

import torch
import torch.distributed as dist

from echelon.collectives.shared.header import Header
from echelon.collectives.shared.slots import COLLECTIVE, RingWriter
from echelon.launching import Ranks
from tests.collectives.shared.real_ranks import Warm, world

DIRECT = 40_000  # elements of four bytes: enough to be read directly
HUGE = COLLECTIVE.slots * COLLECTIVE.slot_bytes // 4 + 3  # more than a whole ring holds, and not divisible


def memory_of_the_call(direct: bool) -> list[float]:
    """Both ends swap the memory of their tensors for another one while the message is unfinished.

    Pipelines do that to outputs that were sent. Once the memory was looked up at the operation's turn: it
    sent other values, and a receive wrote into memory that belonged to another tensor by then.
    """
    group = world(direct)
    values = []
    for length in (1000, 10 * DIRECT):
        tensor = torch.full((length,), 7.0 - group.rank)
        busy = group.all_reduce(torch.ones(HUGE), wait=False)  # keeps the link busy
        begin = group.send if group.rank == 0 else group.recv
        handle = begin(tensor, 1 - group.rank, wait=False)
        before = tensor.data
        tensor.data = torch.full((length,), -1.0)
        busy.wait()
        handle.wait()
        values += [before[0].item(), tensor[-1].item()]
        reduced = torch.ones(length)
        before, handle = reduced.data, group.all_reduce(reduced, wait=False)
        reduced.data = torch.zeros(1)
        handle.wait()
        values.append(before[-1].item())
    return values


def test_an_operation_holds_the_memory_that_it_was_called_with(warm_ranks: Warm, direct: bool) -> None:
    assert warm_ranks(2).run(memory_of_the_call, direct) == [[7.0, -1.0, 2.0] * 2] * 2


def freed_while_receiving(direct: bool) -> list[float]:
    """A receive's tensor gives up its memory; tensors that are allocated then must not be overwritten."""
    group = world(direct)
    length = 150_000
    if group.rank == 0:
        tensor = torch.empty(length)
        handle = group.recv(tensor, 1, wait=False)
        tensor.data = torch.empty(1)
        others = [torch.zeros(length) for _ in range(4)]
        dist.barrier()
        handle.wait()
        return [other.sum().item() for other in others]
    dist.barrier()
    group.send(torch.ones(length), 0)
    return []


def test_memory_is_kept_while_an_operation_uses_it(warm_ranks: Warm, direct: bool) -> None:
    assert warm_ranks(2).run(freed_while_receiving, direct)[0] == [0.0] * 4


def pinned() -> None:
    """Without a device, tensors of rank 0 claim to be pinned. Peers must not get their addresses."""
    group = world(True)
    published: set[int] = set()
    publish = RingWriter.publish

    def record(self: RingWriter, header: Header) -> None:
        published.add(header.address)
        publish(self, header)

    if group.rank == 0:
        torch.Tensor.is_pinned = lambda *_: True  # type: ignore[method-assign,assignment]
        RingWriter.publish = record  # type: ignore[method-assign]
    tensor, whole = torch.ones(15 * DIRECT), torch.zeros(30 * DIRECT)
    group.all_reduce(tensor)
    group.all_gather(whole, tensor)
    group.reduce_scatter(tensor, whole)
    group.broadcast(tensor, 0)
    if group.rank == 0:
        group.send(tensor, 1)
    else:
        group.recv(tensor.zero_(), 0)
    assert tensor.unique().tolist() == [4.0]
    assert published.isdisjoint({tensor.data_ptr(), whole.data_ptr()})


def test_peers_read_a_copy_of_pinned_memory(direct: bool) -> None:
    if direct:
        with Ranks(2, deadline=30.0) as ranks:
            ranks.run(pinned)
