"""Which rank holds which positions, as literal tables, and that all ranks have the same work."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.parallel.context import count_before, positions, put_together, take
from echelon.parallel.context.parts import Block, block_of


def test_early_and_late_chunks_stand_together() -> None:
    assert [positions(4, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(2, rank, 4).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


@given(ranks=st.integers(1, 6), chunk=st.integers(0, 5), dim=st.integers(0, 2))
def test_parts_are_what_positions_say_and_make_the_whole(ranks: int, chunk: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = 2 * ranks * chunk
    whole = torch.randn(shape)
    parts = [take(whole, rank, ranks, dim) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, positions(2 * chunk, rank, ranks)))
        assert part.is_contiguous()
    assert torch.equal(put_together(parts, dim), whole)


@given(ranks=st.integers(1, 6), chunk=st.integers(0, 5), limit=st.integers(0, 70))
def test_positions_below_a_limit_are_the_first_ones(ranks: int, chunk: int, limit: int) -> None:
    for rank in range(ranks):
        below = positions(2 * chunk, rank, ranks) < limit
        count = count_before(limit, 2 * chunk, rank, ranks)
        assert below[:count].all()
        assert not below[count:].any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_is_a_copy(ranks: int) -> None:
    whole = torch.zeros(1, 8)
    take(whole, 0, ranks).add_(1)
    assert not whole.any()


def test_a_part_is_contiguous_whatever_the_whole_is() -> None:
    whole = torch.randn(2, 3, 8, 4).to(memory_format=torch.channels_last)
    assert take(whole, 0, 2, dim=2).is_contiguous()


@pytest.mark.parametrize(
    ("length", "ranks", "fix"), [(10, 2, "8 or 12"), (3, 2, "4"), (7, 3, "6 or 12"), (8, 3, "6 or 12")]
)
def test_a_length_that_cannot_be_split_is_refused(length: int, ranks: int, fix: str) -> None:
    rule = f"a sequence of {length} positions with context={ranks} is not divisible by {2 * ranks}"
    with pytest.raises(UserError, match=f"{rule}: .* two of {2 * ranks} equal chunks; .* length of {fix}$"):
        take(torch.zeros(1, length), 0, ranks)


def test_an_odd_part_is_refused() -> None:
    with pytest.raises(UserError, match="a sequence of 6 positions with context=2"):
        positions(3, 0, 2)


# --- work ---------------------------------------------------------------------------------------------


def sees(block: Block, length: int) -> torch.Tensor:
    """Which local query attends to which key."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    seen[block.queries, block.keys] = True
    return seen.tril() if block.causal else seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_blocks_are_the_causal_rule_and_nothing_else(ranks: int) -> None:
    length = 6
    for rank in range(ranks):
        for source in range(ranks):
            queries, keys = positions(length, rank, ranks), positions(length, source, ranks)
            assert torch.equal(sees(block_of(rank, source, length), length), queries[:, None] >= keys)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_rank_has_the_same_work_in_every_round(ranks: int) -> None:
    length = 6
    for step in range(ranks):
        blocks = [block_of(rank, (rank - step) % ranks, length) for rank in range(ranks)]
        assert len({int(sees(block, length).sum()) for block in blocks}) == 1
        spans = {len(range(length)[block.queries]) * len(range(length)[block.keys]) for block in blocks}
        assert spans == {length * length if step == 0 else length * length // 2}
