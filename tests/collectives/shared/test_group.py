"""Every operation through shared memory, over real processes, in both forms: staged, and read directly."""

import time

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Group, Ledger, RecordingGroup, group_over
from echelon.collectives.shared.group import SharedGroup
from echelon.collectives.shared.slots import COLLECTIVE, LANE, Header, RingWriter
from echelon.launching import Ranks
from tests.collectives.shared.real_ranks import Warm, new_group, wait_until, world
from tests.collectives.test_group import one_of_each
from tests.collectives.test_torch_group import DTYPES, each_rank

ALL_DTYPES = [*DTYPES, torch.int16, torch.int8]
CARRIED = [*ALL_DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn]
DIRECT = 40_000  # elements of four bytes: enough to be read directly
HUGE = COLLECTIVE.slots * COLLECTIVE.slot_bytes // 4 + 3  # more than a whole ring holds, and not divisible


def lengths(size: int) -> list[int]:
    return [0, 1, size - 1, size, 7, 1000, DIRECT, DIRECT + 1, HUGE]


def check_reductions(group: Group, length: int, dtype: torch.dtype) -> None:
    inputs = torch.stack(each_rank(group.size, length * group.size, dtype))
    exact = inputs.double()
    expected = {"sum": exact.sum(0), "min": exact.amin(0), "max": exact.amax(0)}
    if dtype.is_floating_point:
        expected["mean"] = (exact.sum(0).to(dtype) / group.size).double()
    for op, value in expected.items():
        reduced = inputs[group.rank].clone()
        group.all_reduce(reduced, op)
        assert torch.equal(reduced.double(), value), (op, length, dtype)
        uneven = inputs[group.rank][: length + 1].clone()
        group.all_reduce(uneven, op)
        assert torch.equal(uneven.double(), value[: length + 1]), (op, length, dtype)

        tensor = inputs[group.rank].clone()
        own_part = value.view(group.size, -1)[group.rank]
        part = torch.empty(length, dtype=dtype)
        group.reduce_scatter(part, tensor, op)
        assert torch.equal(part.double(), own_part), (op, length, dtype)
        assert torch.equal(tensor, inputs[group.rank]), "the input stays"
        part = tensor.view(group.size, -1)[group.rank]
        group.reduce_scatter(part, tensor, op)
        assert torch.equal(part.double(), own_part), "in place"


def reductions(direct: bool) -> None:
    group = world(direct)
    for length in lengths(group.size):
        check_reductions(group, length, torch.float32)
    for dtype in ALL_DTYPES:
        for length in (5, DIRECT * 4 // dtype.itemsize):
            check_reductions(group, length, dtype)


def check_movements(group: Group, length: int, dtype: torch.dtype) -> None:
    size, rank = group.size, group.rank
    inputs = [tensor.to(dtype) for tensor in each_rank(size, length)]
    expected = torch.cat([tensor.view(torch.uint8) for tensor in inputs])

    gathered = torch.zeros(size * length, dtype=dtype)
    group.all_gather(gathered, inputs[rank])
    assert torch.equal(gathered.view(torch.uint8), expected), (length, dtype)
    gathered = torch.zeros(size * length, dtype=dtype)
    own_part = gathered.view(size, length)[rank]
    own_part.copy_(inputs[rank])
    group.all_gather(gathered, own_part)
    assert torch.equal(gathered.view(torch.uint8), expected), "in place"

    for source in range(size):
        tensor = inputs[rank].clone()
        group.broadcast(tensor, source)
        assert torch.equal(tensor.view(torch.uint8), inputs[source].view(torch.uint8)), (length, dtype)

    left, right = (rank - 1) % size, (rank + 1) % size
    incoming = torch.zeros(length, dtype=dtype)
    receiving = group.recv(incoming, left, wait=False)
    group.send(inputs[rank], right)
    receiving.wait()
    receiving.wait()  # waiting again is harmless
    assert torch.equal(incoming.view(torch.uint8), inputs[left].view(torch.uint8)), (length, dtype)


def movements(direct: bool) -> None:
    group = world(direct)
    for length in lengths(group.size):
        check_movements(group, length, torch.float32)
    for dtype in CARRIED:
        for length in (5, DIRECT * 4 // dtype.itemsize):
            check_movements(group, length, dtype)


@pytest.mark.slow_cases("direct-2")
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_reductions(warm_ranks: Warm, size: int, direct: bool) -> None:
    warm_ranks(size).run(reductions, direct)


@pytest.mark.slow_cases("direct-3", "direct-4", "staged-3", "staged-4")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(warm_ranks: Warm, size: int, direct: bool) -> None:
    warm_ranks(size).run(movements, direct)


def eight_ranks(direct: bool) -> None:
    group = world(direct)
    for length in (3, DIRECT):
        check_reductions(group, length, torch.float32)
        check_movements(group, length, torch.float32)


@pytest.mark.slow_cases("staged")
def test_eight_ranks(warm_ranks: Warm, direct: bool) -> None:
    warm_ranks(8).run(eight_ranks, direct)


def many_in_flight(direct: bool) -> None:
    """More than any ring holds, of all kinds, begun before the first is waited for."""
    group = world(direct)
    size, rank = group.size, group.rank
    handles, checks = [], []
    for turn, length in enumerate([1, DIRECT, 17, 3 * DIRECT, 1000] * 6):
        tensor = torch.full((length,), float(rank + turn))
        handles.append(group.all_reduce(tensor, wait=False))
        checks.append((tensor, sum(float(other + turn) for other in range(size))))
        whole = torch.full((length * size,), float(rank * turn))
        part = torch.zeros(length)
        handles.append(group.reduce_scatter(part, whole, wait=False))
        checks.append((part, sum(float(other * turn) for other in range(size))))
        sent = torch.full((length,), float(turn))
        if rank != turn % size:
            sent.zero_()
        handles.append(group.broadcast(sent, turn % size, wait=False))
        checks.append((sent, float(turn)))
    for handle in reversed(handles):
        handle.wait()
    for tensor, value in checks:
        assert torch.equal(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize("size", [2, 3])
def test_many_operations_in_flight(warm_ranks: Warm, size: int, direct: bool) -> None:
    warm_ranks(size).run(many_in_flight, direct)


def posted_early(direct: bool) -> None:
    """Receives of all pairs are posted first, in an order in which they cannot arrive; collectives go on."""
    group = world(direct)
    others = [peer for peer in range(group.size) if peer != group.rank]
    sizes = [1, 2 * LANE.slots * LANE.slot_bytes // 4, 5, 100_000]
    incoming = {peer: [torch.zeros(length) for length in sizes] for peer in others}
    receiving = [
        group.recv(tensor, peer, wait=False) for peer in reversed(others) for tensor in incoming[peer]
    ]
    total = torch.ones(DIRECT)
    group.all_reduce(total)  # no message has been sent yet
    assert torch.equal(total, torch.full_like(total, group.size))
    sending = []
    for turn, length in enumerate(sizes):
        for peer in others:
            sending.append(group.send(torch.full((length,), 10.0 * group.rank + turn), peer, wait=False))
        group.all_reduce(total, "max")
    for handle in sending + receiving:
        handle.wait()
    for peer, tensors in incoming.items():
        for turn, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, 10.0 * peer + turn)), (peer, turn)


@pytest.mark.parametrize("size", [2, 4])
def test_receives_posted_early_block_no_one(warm_ranks: Warm, size: int, direct: bool) -> None:
    warm_ranks(size).run(posted_early, direct)


def sends_need_no_receiver() -> None:
    """Both send, and wait for it, before either receives: a message that fits the lane does not wait."""
    group = world()
    other = 1 - group.rank
    for slots in (1, LANE.free_bytes // LANE.slot_bytes):
        for times in (1, 2, 3):  # whatever is left over of the times before
            tensor = torch.full((slots * LANE.slot_bytes // 4,), float(group.rank + times))
            incoming = torch.zeros_like(tensor)
            group.send(tensor, other)
            tensor.fill_(-1)  # sent is sent
            group.recv(incoming, other)
            assert torch.equal(incoming, torch.full_like(incoming, float(other + times)))


def test_a_send_that_fits_needs_no_receiver(warm_ranks: Warm) -> None:
    warm_ranks(2).run(sends_need_no_receiver)


def two_groups(direct: bool) -> None:
    """Rows and columns of a 2 × 2 grid, at the same time in every process."""
    world(direct)
    rank = dist.get_rank()
    groups = {}
    for name, pairs in {"tensor": [(0, 1), (2, 3)], "data": [(0, 2), (1, 3)]}.items():
        for pair in pairs:
            made = dist.new_group(list(pair))
            if rank in pair:
                groups[name] = group_over(name, made, Ledger()), pair
    (tensor_group, row), (data_group, column) = groups["tensor"], groups["data"]
    for group in (tensor_group, data_group):
        assert isinstance(group, SharedGroup)
        group._link.can_read = direct
    across, down = torch.full((HUGE,), float(rank)), torch.full((HUGE,), float(rank))
    first = tensor_group.all_reduce(across, wait=False)
    second = data_group.all_reduce(down, wait=False)
    second.wait()
    first.wait()
    assert torch.equal(across, torch.full_like(across, float(sum(row))))
    assert torch.equal(down, torch.full_like(down, float(sum(column))))
    for group, _ in groups.values():
        dist.destroy_process_group(group.process_group)


def test_two_groups_at_once(warm_ranks: Warm, direct: bool) -> None:
    warm_ranks(4).run(two_groups, direct)


def sums(direct: bool | None) -> list[torch.Tensor]:
    group = world(direct)
    generator = torch.Generator().manual_seed(group.rank)
    inputs = torch.rand(group.size * DIRECT, generator=generator) * 10 ** torch.randint(
        -3, 4, (group.size * DIRECT,), generator=generator
    )
    small, large, part = inputs[:1001].clone(), inputs.clone(), torch.empty(DIRECT)
    group.all_reduce(small)
    group.all_reduce(large)
    group.reduce_scatter(part, inputs)
    whole = torch.empty_like(inputs)
    group.all_gather(whole, part)
    gathered = torch.empty(group.size, inputs.numel())
    group.all_gather(gathered, inputs)
    return [small, large, whole, gathered]


def test_sums_are_taken_in_rank_order_on_every_rank_and_in_both_forms(warm_ranks: Warm) -> None:
    """In float32 another order gives other bits."""
    results = warm_ranks(4).run(sums, False) + warm_ranks(4).run(sums, None) + warm_ranks(4).run(sums, None)
    inputs = results[0][3]
    in_order = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    assert not torch.equal(in_order, inputs[3] + inputs[2] + inputs[1] + inputs[0])
    for small, large, whole, _ in results:
        assert torch.equal(small, in_order[:1001])
        assert torch.equal(large, in_order)
        assert torch.equal(whole, in_order)


def entries() -> list[tuple[str, int, int, int]]:
    return one_of_each(world())


def test_the_ledger_shows_the_same_as_over_the_backend(warm_ranks: Warm) -> None:
    assert warm_ranks(4).run(entries) == [one_of_each(RecordingGroup("data", rank, 4)) for rank in range(4)]


def completes_in_the_background() -> bool:
    """Whether the completion is known without a wait, and is what the ledger gets."""
    group = world()
    handle = group.all_reduce(torch.ones(1_000_000), wait=False)
    work = handle._work
    assert work is not None
    wait_until(lambda: work.done_at() is not None)  # no one waits, and no one polls
    seen = time.perf_counter()
    handle.wait()
    (move,) = group.ledger.moves
    assert move.start + move.seconds <= seen <= move.wait_start
    return group.ledger.hidden() == group.ledger.busy() > 0


def test_an_operation_advances_while_the_rank_does_other_work(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(completes_in_the_background) == [True, True]


def leaves_autograd_alone() -> None:
    group = world()
    weight = torch.full((3,), float(group.rank), requires_grad=True)
    result = (weight * weight).sum()  # saves the weight for the backward pass
    group.broadcast(weight, source=1)
    assert weight.tolist() == [1.0, 1.0, 1.0]
    result.backward()  # a version that was counted up would be refused here
    with torch.inference_mode():
        tensor = torch.ones(3)
        group.all_reduce(tensor)
    assert tensor.tolist() == [float(group.size)] * 3


def test_tensors_of_autograd_and_inference_work(warm_ranks: Warm) -> None:
    warm_ranks(2).run(leaves_autograd_alone)


def falls_through() -> None:
    """What shared memory does not take over still works, between operations that it does."""
    group = world()
    tensor = torch.tensor([group.rank + 1])
    group.all_reduce(tensor)
    flags = torch.tensor([group.rank == 0, False])
    group.all_reduce(flags, "max")
    assert flags.tolist() == [True, False]
    group.barrier()
    parts = torch.zeros(group.size, dtype=torch.int64)
    group.gather(tensor, parts if group.rank == 0 else None)
    assert group.rank != 0 or parts.tolist() == [3, 3]
    swapped = torch.zeros(2)
    group.all_to_all(swapped, torch.tensor([0.0, 1.0]) + 10 * group.rank)
    assert swapped.tolist() == [float(group.rank), 10.0 + group.rank]


def test_other_operations_and_types_go_through_the_backend(warm_ranks: Warm) -> None:
    warm_ranks(2).run(falls_through)


def conjugate() -> list[complex]:
    group = new_group()
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with pytest.raises(ValueError, match="resolve_conj"):
        group.broadcast(tensor)
    if group.rank == 0:
        group.send(tensor, 1)
        return tensor.tolist()
    incoming = torch.zeros(2, dtype=torch.complex64)
    group.recv(incoming, 0)
    return incoming.tolist()


def test_conjugates_are_sent_with_their_values(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(conjugate) == [[1 - 2j, 3 + 4j]] * 2


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
