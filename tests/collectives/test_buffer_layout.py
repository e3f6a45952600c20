"""Where tensors lie in a buffer: aligned, in order, with gaps that are nobody's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.collectives.buffer_layout import BufferLayout, block_size, lay_out, portions, round_up


def test_each_parameter_begins_at_a_block_and_the_end_is_one() -> None:
    layout = lay_out([100, 64, 3], block=64)
    assert layout == BufferLayout([(0, 100), (128, 192), (192, 195)], 256)
    assert list(layout.gaps()) == [(100, 128), (195, 256)]


@pytest.mark.parametrize(
    ("dtypes", "elements"),
    [
        ([torch.float64], 32),
        ([torch.float32], 64),
        ([torch.bfloat16], 128),
        ([torch.bfloat16, torch.float32], 128),
        ([torch.float32, torch.float16], 128),
        ([torch.complex128], 16),
    ],
)
def test_a_block_is_a_multiple_of_256_bytes_in_each_type(dtypes: list[torch.dtype], elements: int) -> None:
    assert block_size(*dtypes) == elements
    assert all(elements * dtype.itemsize % 256 == 0 for dtype in dtypes)


@given(st.lists(st.integers(0, 300)), st.sampled_from([1, 32, 64, 128]), st.integers(0, 3))
def test_parameters_and_gaps_are_all_of_the_buffer_and_meet_nowhere(
    counts: list[int], block: int, more: int
) -> None:
    layout = lay_out(counts, block)
    assert [end - begin for begin, end in layout.places] == counts
    assert all(begin % block == 0 for begin, _ in layout.places)
    assert layout.size == sum(round_up(count, block) for count in counts), "in any order the same"
    padded = layout._replace(size=layout.size + more * block)
    gaps = list(padded.gaps())
    assert all(begin < end for begin, end in gaps)
    owners = [0] * padded.size
    for begin, end in (*padded.places, *gaps):
        owners[begin:end] = [owner + 1 for owner in owners[begin:end]]
    assert owners == [1] * padded.size


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3, 3, 4], [[3, 3, 4]]),
        ([3, 3, 5], [[3, 3], [5]]),
        ([20, 1, 0], [[20], [1, 0]]),
        ([20, 0, 1], [[20, 0], [1]]),
    ],
)
def test_portions_are_at_most_the_limit_or_one_item(sizes: list[int], expected: list[list[int]]) -> None:
    assert list(portions(sizes, int, 10)) == expected
