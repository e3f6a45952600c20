"""Cutting batches and reading losses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.nn.batch import microbatches, num_samples, take_part, total_and_count


@given(samples=st.integers(0, 20), parts=st.integers(1, 8))
def test_parts_are_the_whole_in_order_and_differ_by_one(samples: int, parts: int) -> None:
    batch = (torch.arange(samples), {"x": torch.arange(samples) * 2, "name": "kept"})
    cut = [take_part(batch, index, parts) for index in range(parts)]
    assert torch.equal(torch.cat([part[0] for part in cut]), batch[0])
    assert torch.equal(torch.cat([part[1]["x"] for part in cut]), batch[1]["x"])
    assert {part[1]["name"] for part in cut} == {"kept"}
    sizes = [len(part[0]) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_microbatches_are_never_empty() -> None:
    batch = (torch.arange(3), torch.arange(3))
    assert [len(part[0]) for part, _ in microbatches(batch, 2, always=False)] == [2, 1]
    assert [len(part[0]) for part, _ in microbatches(batch, 5, always=False)] == [1, 1, 1]
    assert microbatches((torch.empty(0), torch.empty(0)), 2, always=False) == []


def test_where_ranks_keep_step_missing_microbatches_weigh_nothing() -> None:
    batch = (torch.arange(2), torch.arange(2))
    parts = microbatches(batch, 4, always=True)
    assert [(part[0].tolist(), weight) for part, weight in parts] == [([0], 1), ([1], 1), ([0], 0), ([0], 0)]
    with pytest.raises(UserError, match="give each replica at least one sample"):
        microbatches((torch.empty(0), torch.empty(0)), 2, always=True)


def test_a_batch_needs_one_number_of_samples() -> None:
    with pytest.raises(UserError, match=r"got \[2, 3\]"):
        num_samples((torch.ones(2), torch.ones(3)))
    with pytest.raises(UserError, match="no tensor at all"):
        num_samples(({"a": 1}, None))


def test_a_mean_counts_samples_and_a_pair_counts_itself() -> None:
    total, count = total_and_count(torch.tensor(2.0), 3)
    assert (float(total), count) == (6.0, 3)
    assert total_and_count((torch.tensor(8.0), 4), 3) == (torch.tensor(8.0), 4)
