"""Every collective over real processes: values for several rank counts, lengths and types."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Group, Ledger, RecordingGroup, TorchGroup, naive_all_reduce, ring_all_reduce
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def world() -> TorchGroup:
    assert dist.group.WORLD is not None
    return TorchGroup("data", dist.group.WORLD, Ledger())


def each_rank(size: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """What every rank starts with: small whole numbers, exact in any type."""
    return [(torch.arange(length) % 5 + rank + 1).to(dtype) for rank in range(size)]


def reductions(length: int, dtype: torch.dtype) -> None:
    group = world()
    inputs = torch.stack(each_rank(group.size, length, dtype)).double()
    wanted = {"sum": inputs.sum(0), "min": inputs.amin(0), "max": inputs.amax(0)}
    if dtype.is_floating_point:
        wanted["mean"] = inputs.mean(0).to(dtype).double()
    for op, value in wanted.items():
        for reduce in (
            lambda t, op=op: group.all_reduce(t, op),
            lambda t, op=op: group.all_reduce(t, op, wait=False).wait(),
            lambda t, op=op: ring_all_reduce(group, t, op),
            lambda t, op=op: naive_all_reduce(group, t, op, hub=group.size - 1),
        ):
            tensor = inputs[group.rank].to(dtype, copy=True)
            reduce(tensor)
            torch.testing.assert_close(tensor.double(), value, rtol=0.01 if op == "mean" else 0, atol=0)
        tensor = inputs[group.rank].to(dtype, copy=True)
        group.reduce(tensor, target=group.size - 1, op=op)
        if group.rank == group.size - 1:
            torch.testing.assert_close(tensor.double(), value, rtol=0.01 if op == "mean" else 0, atol=0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions(warm_ranks: Warm, size: int) -> None:
    for length in (0, 1, size - 1, size, 7, 1000):
        warm_ranks(size).run(reductions, length, torch.float64)
    for dtype in DTYPES:
        warm_ranks(size).run(reductions, 5, dtype)


def movements(part: int, dtype: torch.dtype) -> None:
    group = world()
    size, rank, last = group.size, group.rank, group.size - 1
    inputs = each_rank(size, part * size, dtype)
    whole = torch.stack(inputs)
    mine = inputs[rank].clone()

    tensor = mine.clone()
    group.broadcast(tensor, source=last)
    assert torch.equal(tensor, inputs[last])

    output = torch.empty(part, dtype=dtype)
    group.reduce_scatter(output, mine.clone())
    assert torch.equal(output.double(), whole.double().sum(0)[rank * part : (rank + 1) * part])

    gathered = torch.empty(size, part * size, dtype=dtype)
    group.all_gather(gathered, mine)
    assert torch.equal(gathered, whole)

    swapped = torch.empty_like(mine)
    group.all_to_all(swapped, mine)
    assert torch.equal(swapped, whole[:, rank * part : (rank + 1) * part].flatten())

    group.scatter(output, mine if rank == last else None, source=last)
    assert torch.equal(output, inputs[last][rank * part : (rank + 1) * part])

    gathered = torch.empty(size, part * size, dtype=dtype)
    group.gather(mine, gathered if rank == 0 else None, target=0)
    assert rank != 0 or torch.equal(gathered, whole)

    left, right = (rank - 1) % size, (rank + 1) % size
    incoming = torch.empty_like(mine)
    receiving = group.recv(incoming, left, wait=False)
    group.send(mine, right)
    receiving.wait()
    receiving.wait()  # waiting again is harmless
    assert torch.equal(incoming, inputs[left])
    group.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(warm_ranks: Warm, size: int) -> None:
    for part in (0, 1, 3, 250):
        warm_ranks(size).run(movements, part, torch.float32)
    for dtype in DTYPES:
        warm_ranks(size).run(movements, 2, dtype)


def carries_types_gloo_does_not_know() -> None:
    group = world()
    for dtype in (torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn):
        sent = torch.arange(6).to(dtype)
        tensor = sent.clone() if group.rank == 0 else torch.zeros(6, dtype=dtype)
        group.broadcast(tensor, source=0)
        assert torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8))


def test_types_that_gloo_does_not_know_travel_as_bytes(warm_ranks: Warm) -> None:
    warm_ranks(2).run(carries_types_gloo_does_not_know)


def uneven_exchange() -> tuple[list[float], int, int]:
    """Rank r sends r+1 rows to rank 0 and nothing to the others."""
    group = world()
    to_all = [group.rank + 1] + [0] * (group.size - 1)
    from_all = [rank + 1 for rank in range(group.size)] if group.rank == 0 else [0] * group.size
    output = torch.empty(sum(from_all), 2)
    group.all_to_all(output, torch.full((sum(to_all), 2), float(group.rank)), from_all, to_all)
    total = group.ledger.total(operation="all_to_all")
    return output[:, 0].tolist(), total.sent, total.received


def test_uneven_and_empty_parts(warm_ranks: Warm) -> None:
    results = warm_ranks(3).run(uneven_exchange)
    assert [rows for rows, _, _ in results] == [[0, 1, 1, 2, 2, 2], [], []]
    assert [sent for _, sent, _ in results] == [0, 2 * 8, 3 * 8]
    assert [received for _, _, received in results] == [5 * 8, 0, 0]


def ring_traffic(length: int, naive: bool) -> tuple[int, int, int]:
    group = world()
    tensor = torch.ones(length)
    (naive_all_reduce if naive else ring_all_reduce)(group, tensor)
    assert torch.equal(tensor, torch.full((length,), float(group.size)))
    total = group.ledger.total("data")
    return total.sent // 4, total.received // 4, total.count


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_ring_moves_its_share_and_no_more(warm_ranks: Warm, size: int) -> None:
    n = 24 * size
    for sent, received, _ in warm_ranks(size).run(ring_traffic, n, False):
        assert sent == received == 2 * (size - 1) * n // size


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_of_uneven_chunks_shows_exactly_the_chunks_passed_on(warm_ranks: Warm, size: int) -> None:
    for n in (0, 1, size - 1, size + 1, 10 * size - 1):
        chunks = [n // size + (index < n % size) for index in range(size)]
        for rank, (sent, received, count) in enumerate(warm_ranks(size).run(ring_traffic, n, False)):
            # Rank r passes on every chunk but r+1, then every chunk but r+2; its left neighbour likewise.
            assert sent == 2 * n - chunks[(rank + 1) % size] - chunks[(rank + 2) % size]
            left = (rank - 1) % size
            assert received == 2 * n - chunks[(left + 1) % size] - chunks[(left + 2) % size]
            assert n > 0 or count == 0


def test_the_naive_one_loads_one_rank(warm_ranks: Warm) -> None:
    hub, *others = warm_ranks(4).run(ring_traffic, 1000, True)
    assert hub == (3000, 3000, 6)
    assert others == [(1000, 1000, 2)] * 3


def one_of_each(group: Group) -> list[tuple[str, int, int, int]]:
    """What the ledger holds after one operation of each kind."""
    part, whole = torch.ones(6), torch.ones(6 * group.size)
    group.all_reduce(whole)
    group.reduce_scatter(part, whole)
    group.all_gather(whole, part)
    group.broadcast(whole, 0)
    group.reduce(whole, 0)
    group.scatter(part, whole if group.rank == 0 else None, 0)
    group.gather(part, whole if group.rank == 0 else None, 0)
    return [(m.operation, *m.traffic) for m in group.ledger.moves]


def entries() -> list[tuple[str, int, int, int]]:
    return one_of_each(world())


def test_what_the_ledger_counts(warm_ranks: Warm) -> None:
    first, second, *_ = warm_ranks(4).run(entries)
    p = 24 * 4  # bytes of the whole buffer
    assert first == [
        ("all_reduce", p, 6 * p // 4, 6 * p // 4),
        ("reduce_scatter", p, 3 * p // 4, 3 * p // 4),
        ("all_gather", p, 3 * p // 4, 3 * p // 4),
        ("broadcast", p, p, 0),
        ("reduce", p, 0, p),
        ("scatter", p, 3 * p // 4, 0),
        ("gather", p, 0, 3 * p // 4),
    ]
    assert second[3:] == [
        ("broadcast", p, 0, p),
        ("reduce", p, p, 0),
        ("scatter", p, 0, p // 4),
        ("gather", p, p // 4, 0),
    ]


def test_a_recorder_counts_what_the_real_group_counts(warm_ranks: Warm) -> None:
    assert warm_ranks(4).run(entries) == [one_of_each(RecordingGroup("data", rank, 4)) for rank in range(4)]


def test_a_recorder_can_be_any_rank_of_thousands() -> None:
    group = RecordingGroup("data", rank=4095, size=4096)
    buffer = torch.ones(4096 * 2)
    group.all_reduce(buffer)
    assert group.ledger.total().sent == 2 * 4095 * 8
    assert torch.equal(buffer, torch.ones(4096 * 2))
    gathered = torch.zeros(4096)
    group.all_gather(gathered, torch.full((1,), 7.0))
    assert gathered[4095] == 7
    ring_all_reduce(RecordingGroup("data", 3, 5), torch.ones(7))


def test_a_recorder_needs_no_memory_for_what_it_pretends() -> None:
    group = RecordingGroup("data", rank=0, size=1024)
    group.all_reduce(torch.empty(10**12, device="meta"))
    assert group.ledger.total().payload == 4 * 10**12


def test_a_group_of_one_moves_nothing_and_enters_nothing() -> None:
    group = RecordingGroup("data")
    tensor, output = torch.arange(4.0), torch.zeros(4)
    group.all_reduce(tensor)
    group.all_gather(output, tensor)
    assert torch.equal(output, tensor)
    assert group.ledger.rows() == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda g: g.all_reduce(torch.ones(4, 4).t()[:, :2]), "contiguous"),
        (lambda g: g.all_gather(torch.ones(7), torch.ones(4)), "2 equal parts"),
        (lambda g: g.reduce_scatter(torch.ones(4, dtype=torch.int32), torch.ones(8)), "one type"),
        (lambda g: g.all_to_all(torch.ones(4), torch.ones(4), [1, 2], [2, 2]), r"got \[1, 2\]"),
        (lambda g: g.all_to_all(torch.ones(4), torch.ones(3)), "even parts"),
    ],
)
def test_mistakes_are_refused_before_anything_moves(
    call: Callable[[RecordingGroup], object], says: str
) -> None:
    group = RecordingGroup("data", 0, 2)
    with pytest.raises(ValueError, match=says):
        call(group)
    assert group.ledger.rows() == []
