"""Boxes that hold each element of a tensor once."""

import random
from itertools import pairwise, product

import pytest

from echelon.state.checkpoint import tiling
from echelon.state.checkpoint.tiling import Box, CornerBudget, tiling_error
from echelon.state.ownership import run_slices


@pytest.mark.parametrize(
    ("shape", "boxes", "error"),
    [
        ((), [((), ())], None),
        ((3, 4), [((0, 0), (3, 4))], None),
        ((3, 4), [((0, 0), (1, 4)), ((1, 0), (2, 4))], None),
        ((0, 4), [((0, 0), (0, 4))], None),
        ((0, 4), [], None),
        ((), [], "hold 0 elements"),
        ((3, 4), [((0, 0), (1, 4))], "hold 4 elements"),
        ((3, 4), [((0, 0), (3, 4)), ((0, 0), (3, 4))], "hold 24 elements"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "overlap"),
        ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))], "overlap"),
        ((4,), [((1,), (4,))], "outside"),
        ((4,), [((0, 0), (2, 2))], "other dims"),
    ],
)
def test_boxes_by_hand(shape: tuple[int, ...], boxes: list[Box], error: str | None) -> None:
    found = tiling_error(shape, boxes, CornerBudget(len(boxes)))
    assert found is None if error is None else found is not None and error in found


def test_random_boxes_as_counting_elements_says() -> None:
    draw = random.Random(0)
    verdicts = []
    for _ in range(3000):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
        boxes = [_random_box(shape, draw) for _ in range(draw.randint(1, 4))]
        if draw.random() < 0.5:
            cuts = sorted({0, 4**3, *(draw.randint(0, 20) for _ in range(3))})
            numel = len(list(product(*map(range, shape))))
            ends = [min(cut, numel) for cut in cuts]
            pairs = pairwise(ends)
            boxes = [(b.offsets, b.sizes) for begin, end in pairs for b in run_slices("w", shape, begin, end)]
            if draw.random() < 0.5 and boxes:
                boxes[draw.randrange(len(boxes))] = _random_box(shape, draw)
        expected = _covers_once(shape, boxes)
        assert (tiling_error(shape, boxes, CornerBudget(len(boxes))) is None) == expected, (shape, boxes)
        verdicts.append(expected)
    assert 300 < sum(verdicts) < 2700


def test_more_boxes_than_can_be_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[Box] = [((i, j), (1, 1)) for i, j in product(range(2), range(9))]
    assert tiling_error((2, 9), boxes, CornerBudget(18)) is None
    monkeypatch.setattr(tiling, "MOST_CORNERS", 4 * 18 - 1)
    error = tiling_error((2, 9), boxes, CornerBudget(18))
    assert error is not None
    assert "more than a checkpoint has" in error


def test_a_few_boxes_of_many_dims_are_compared_only_for_a_few_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 boxes of an eighth each, which halve 3 dims each, have 2^15 corners: 20 a byte of text."""
    monkeypatch.setattr(tiling, "_FREE_CORNERS", 2**15)
    boxes: list[Box] = [
        ((0,) * 12, tuple(1 if dim // 3 == number % 4 else 2 for dim in range(12))) for number in range(8)
    ]
    budget = CornerBudget(8 * 100)
    errors = [tiling_error((2,) * 12, boxes, budget) for _ in range(100)]
    assert errors[0] == "its pieces overlap"
    assert errors[1:] == ["8 pieces along 12 dims are more than a checkpoint has"] * 99


def _random_box(shape: tuple[int, ...], draw: random.Random) -> Box:
    offsets = tuple(draw.randrange(length) for length in shape)
    sizes = tuple(draw.randint(0, length - o) for length, o in zip(shape, offsets, strict=True))
    return offsets, sizes


def _covers_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    held = [
        place
        for offsets, sizes in boxes
        for place in product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    ]
    return sorted(held) == list(product(*map(range, shape)))


def test_how_many_corners_are_looked_at() -> None:
    budget = CornerBudget(3)
    assert budget.take(2**18 + 3 * 32 - 5)
    assert not budget.take(6)
    assert budget.take(5), "what was refused has taken nothing"
    assert not budget.take(1)
    large = CornerBudget(2**20)
    assert not large.take(2**20 + 1)
    assert large.take(2**20)
