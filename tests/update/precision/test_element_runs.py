"""Runs of elements of a part, as the picture of the module has them."""

import torch

from echelon.state.ownership import OwnedSlice, Slice, own_run, run_slices
from echelon.update.precision.element_runs import ElementRuns, runs_of, whole_run

CPU = torch.device("cpu")


def shown(runs: list[ElementRuns]) -> list[tuple[list[int], list[int], int]]:
    return [(each.in_part.tolist(), each.in_whole.tolist(), each.length) for each in runs]


def box(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> OwnedSlice:
    return OwnedSlice(Slice("w", "value", shape, offsets, sizes), torch.empty(sizes))


def test_columns_are_a_run_of_each_row() -> None:
    assert shown(runs_of([box((3, 8), (0, 4), (3, 4))], CPU)) == [([0, 4, 8], [4, 12, 20], 4)]


def test_rows_are_one_run() -> None:
    assert shown(runs_of([box((3, 8), (1, 0), (2, 8))], CPU)) == [([0], [8], 16)]
    assert shown(runs_of([box((3, 8), (0, 0), (3, 8))], CPU)) == [([0], [0], 24)]
    assert shown(runs_of([box((), (), ())], CPU)) == [([0], [0], 1)]


def test_the_last_dim_that_is_cut_ends_a_run() -> None:
    assert shown(runs_of([box((2, 4, 3), (0, 1, 0), (2, 2, 3))], CPU)) == [([0, 6], [3, 15], 6)]
    assert shown(runs_of([box((2, 2, 4), (1, 0, 1), (1, 2, 2))], CPU)) == [([0, 2], [9, 13], 2)]
    assert shown(runs_of([box((2, 2, 4), (0, 0, 3), (2, 2, 1))], CPU)) == [([0, 1, 2, 3], [3, 7, 11, 15], 1)]


def test_boxes_of_a_flat_part_begin_where_they_lie_and_empty_ones_are_left_out() -> None:
    boxes = own_run(torch.empty(7), run_slices("w", (3, 4), 2, 9))
    assert shown(runs_of(boxes, CPU)) == [([0], [2], 2), ([2], [4], 4), ([6], [8], 1)]
    assert runs_of([box((0, 3), (0, 0), (0, 3))], CPU) == []


def test_a_whole_parameter_is_one_run() -> None:
    assert shown([whole_run(torch.empty(2, 3))]) == [([0], [0], 6)]
    assert whole_run(torch.empty(1)).in_part.dtype == torch.int64
