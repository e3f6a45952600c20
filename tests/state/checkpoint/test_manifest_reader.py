"""The entries of a manifest, one by one: the last value that is right, and the first that is not."""

from collections.abc import Callable
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.manifest_reader import Reader, check_pieces, dtype_of, inside, shown
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
    assert {str(dtype_of(str(dtype).removeprefix("torch."))) for dtype in DTYPES.values()} == {
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
