"""What every kind of group does the same: it checks, and counts by the ledger's rule."""

from collections.abc import Callable

import pytest
import torch

from echelon.collectives import Group, RecordingGroup
from echelon.launching import Ranks
from tests.collectives.test_torch_group import world

Warm = Callable[[int], Ranks]


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


def test_a_closed_group_refuses_every_operation() -> None:
    group = RecordingGroup("data", 0, 2)
    group.close()
    group.close()
    with pytest.raises(RuntimeError, match="barrier along data: the group is closed; make a new engine"):
        group.barrier()
    assert group.ledger.rows() == []
