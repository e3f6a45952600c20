"""The entries of a manifest, one by one: the last value that is right, and the first that is not."""

import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint import manifest_reader
from echelon.state.checkpoint.manifest_reader import (
    DTYPE_NAMES,
    Box,
    CornerBudget,
    Reader,
    check_pieces,
    inside,
    shown,
    tiling_error,
)
from echelon.state.ownership import run_slices
from echelon.state.weight_files.tensor_file import DTYPES


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def as_objects(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def is_read(read: Callable[[Reader], Any], expected: Any) -> bool:
    """Whether a value is read as `expected`; both, in any case."""
    reader = Reader()
    found = read(reader)
    assert (type(found), found) == (type(expected), expected)
    try:
        reader.finish()
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "harmless"),
    [
        ("integer", (0, 2**63 - 1), (-1, 2**63, True, 1.0, "1", None), 0),
        ("text", ("", "x" * 10_000, "ü"), ("x" * 10_001, "\n", 7, None), ""),
        ("number", (0, True, 2**64 - 1, 1 - 2**64, 128, 1.5), (2**64, -(2**64), "1", None, 1e999), 0),
        ("dtype", ("bfloat16", "uint8"), ("torch.uint8", 7, None), "uint8"),
        ("file_name", ("a", "x" * 100, "A.b_c-9"), ("", "x" * 101, ".a", "a/b", 7), ""),
        ("hash", ("0" * 64,), ("0" * 63, "0" * 65, "G" * 64, 7), ""),
        ("shape", ((), (0,), (1,) * 64, (2**63 - 1,), (0, 2**62), (3, 2**61)), (), ()),
        ("shape", (), ((1,) * 65, (2**63,), (2, 2**62), (0, 2**63), (-1,), (True,), (1.0,), "12", 5), ()),
        ("plain", (None, "x", 7, 1.5, [1, ["a"]], {"a": {"b": [None]}}), (), None),
    ],
)
def test_the_limits_of_an_entry(
    kind: str, right: tuple[Any, ...], wrong: tuple[Any, ...], harmless: Any
) -> None:
    for value in right:
        assert is_read(lambda reader, value=value: getattr(reader, kind)(value, "e"), value)
    for value in wrong:
        assert not is_read(lambda reader, value=value: getattr(reader, kind)(value, "e"), harmless), value


def test_an_integer_of_at_least_one() -> None:
    assert is_read(lambda reader: reader.integer(3, "e", 3), 3)
    assert not is_read(lambda reader: reader.integer(2, "e", 3), 3)


def test_objects_and_lists_of_one_kind() -> None:
    assert is_read(lambda r: r.entries({"a": 1, "b": 2}, "e", r.integer), {"a": 1, "b": 2})
    assert not is_read(lambda r: r.entries([1], "e", r.integer), {})
    assert is_read(lambda r: r.items((1, 2), "e", r.integer), [1, 2])
    assert not is_read(lambda r: r.items({"a": 1}, "e", r.integer), [])
    assert is_read(lambda r: r.fields({"a": 1, "b": None}, "e", ("a", "b")), {"a": 1, "b": None})
    assert not is_read(lambda r: r.fields({"a": 1}, "e", ("a", "b")), {"a": 1, "b": None})
    assert not is_read(lambda r: r.fields({"a": 1, "c": 2}, "e", ("a",)), {"a": 1})
    assert not is_read(lambda r: r.fields(7, "e", ("a", "b")), {"a": None, "b": None})


@pytest.mark.parametrize("made", [nested, as_objects])
def test_how_deep_the_users_own_data_may_be(made: Callable[[int], Any]) -> None:
    deepest = 33 if made is nested else 32  # the number in the last object is inside it
    assert is_read(lambda reader: reader.plain(made(deepest), "e"), made(deepest))
    reader = Reader()
    reader.plain(made(deepest + 1), "e")
    with pytest.raises(UserError, match="has more than 32 brackets inside each other"):
        reader.finish()


@pytest.mark.parametrize("value", [{1, 2}, b"x", {"a": object()}])
def test_data_that_is_not_plain(value: Any) -> None:
    reader = Reader()
    reader.plain(value, "e")
    with pytest.raises(UserError) as refusal:
        reader.finish()
    assert "must be plain data, is" in refusal.value.errors[0]


def test_twenty_errors_are_shown_and_the_others_counted() -> None:
    for number, rest in ((20, []), (21, ["and 1 more"]), (25, ["and 5 more"])):
        reader = Reader()
        for each in range(number):
            reader.error(f"e{each}", "is wrong")
        with pytest.raises(UserError) as refusal:
            reader.finish()
        assert list(refusal.value.errors) == [*(f"e{each}: is wrong" for each in range(20)), *rest]
    Reader().finish()


def test_values_in_messages_are_short() -> None:
    assert shown("x" * 159) == "x" * 159
    assert shown("x" * 160) == "x" * 160 + "…"
    assert shown("\x1b") == r"'\x1b'"
    assert (shown([1, 2]), shown({"a": 1}), shown(7), shown((1,))) == (
        "a list of 2",
        "a object of 1",
        "7",
        "(1,)",
    )
    assert inside("e", "x" * 200) == "e " + "x" * 158
    assert len(inside("e" * 200, "name")) == 160


def test_types_have_the_names_of_torch() -> None:
    assert {str(DTYPE_NAMES[str(dtype).removeprefix("torch.")]) for dtype in DTYPES.values()} == {
        str(dtype) for dtype in DTYPES.values()
    }


def errors_of(
    file_bytes: dict[str, int], *pieces: tuple[str, str, int, int], is_whole: bool = True
) -> list[str]:
    """Of a tensor of 4 floats; a piece: file, name, offset, size."""
    reader = Reader()
    placed = [(file, name, (offset,), (size,)) for file, name, offset, size in pieces]
    check_pieces(reader, [("w", (4,), "float32", placed)], file_bytes, is_whole=is_whole)
    return reader._errors


def test_a_file_has_room_for_its_pieces() -> None:
    halves = (("f", "a", 0, 2), ("f", "b", 2, 2))
    assert errors_of({"f": 16}, *halves) == []
    assert errors_of({"f": 15}, *halves) == ["files f: has 15 bytes, too few for its pieces of 16"]
    assert errors_of({"g": 16}, *halves) == ["w: is in f, which 'files' does not list"] * 2
    assert errors_of({"f": 16}, ("f", "a", 0, 2), ("f", "a", 2, 2)) == ["w: f has a for two pieces"]
    assert errors_of({"f": 8, "g": 8}, ("f", "a", 0, 2), ("g", "a", 2, 2)) == []


def test_only_one_ranks_file_may_have_a_part_of_a_tensor() -> None:
    (error,) = errors_of({"f": 8}, ("f", "a", 0, 2))
    assert error.startswith("w: the pieces hold 2")
    assert errors_of({"f": 8}, ("f", "a", 0, 2), is_whole=False) == []
    reader = Reader()
    check_pieces(reader, [("w", (4,), "float32", [("f", "a", (0,), (2,))])], {"f": 8})
    assert reader._errors == [error]


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
    monkeypatch.setattr(manifest_reader, "MOST_CORNERS", 4 * 18 - 1)
    error = tiling_error((2, 9), boxes, CornerBudget(18))
    assert error is not None
    assert "more than a checkpoint has" in error


def test_a_few_boxes_of_many_dims_are_compared_only_for_a_few_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 boxes of an eighth each, which halve 3 dims each, have 2^15 corners: 20 a byte of text."""
    monkeypatch.setattr(manifest_reader, "_FREE_CORNERS", 2**15)
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
