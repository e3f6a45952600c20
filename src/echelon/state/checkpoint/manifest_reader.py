"""The checks of a manifest that may come from a stranger: the type and size of each entry, and its pieces.

Errors are collected, each with the entry that it is about.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar, final

from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import DTYPES

T = TypeVar("T")

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offsets and sizes
# The entry; shape and type; its pieces: file, name there, offsets, sizes.
PlacedTensor = tuple[str, Shape, str, list[tuple[str, str, Shape, Shape]]]

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

_MOST_DIMS = 64  # of a tensor, as in torch
_MOST_ELEMENTS = 2**63
_MOST_ERRORS = 20
_DEEPEST = 32  # brackets in the user's own data
_LONGEST_TEXT = 10_000
_LONGEST_SHOWN = 160
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

MOST_CORNERS = 2**20  # of one tensor: they are in memory together
_FREE_CORNERS = 2**18  # of all tensors, beside those of each box
_CORNERS_PER_BOX = 32  # boxes are cut along 5 dims at most, but for a few


class Reader:
    """Reads entries; where one is wrong, it notes the error and returns something harmless."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._num_errors = 0

    def error(self, entry: str, rule: str) -> None:
        self._num_errors += 1
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append(f"{shown(entry)}: {rule}")

    def finish(self) -> None:
        if self._errors:
            more = self._num_errors - len(self._errors)
            rest = [f"and {more} more"] if more else []
            raise UserError("is not the manifest of a whole checkpoint:", [*self._errors, *rest])

    def integer(self, value: Any, entry: str, least: int = 0) -> int:
        if type(value) is int and least <= value < 2**63:
            return value
        self.error(entry, f"must be an integer, at least {least}, is {shown(value)}")
        return least

    def text(self, value: Any, entry: str) -> str:
        if isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable():
            return value
        self.error(entry, f"must be a line of text, is {shown(value)}")
        return ""

    def number(self, value: Any, entry: str) -> bool | int | float:
        is_integer = isinstance(value, int) and abs(value) < 2**64
        if is_integer or (isinstance(value, float) and math.isfinite(value)):
            return value  # type: ignore[no-any-return]
        self.error(entry, f"must be a finite number, is {shown(value)}")
        return 0

    def entries(self, value: Any, entry: str, read: Callable[[Any, str], T]) -> dict[str, T]:
        """Read an object, each entry by `read`."""
        if isinstance(value, dict):
            return {name: read(each, inside(entry, name)) for name, each in _named(value)}
        self.error(entry, f"must be an object, is {shown(value)}")
        return {}

    def items(self, value: Any, entry: str, read: Callable[[Any, str], T]) -> list[T]:
        if isinstance(value, list | tuple):
            return [read(each, f"{entry} [{number}]") for number, each in enumerate(value)]
        self.error(entry, f"must be a list, is {shown(value)}")
        return []

    def fields(self, value: Any, entry: str, names: tuple[str, ...]) -> dict[str, Any]:
        """Read an object of exactly these entries; missing ones are None."""
        if not isinstance(value, dict):
            self.error(entry, f"must be an object of {', '.join(names)}, is {shown(value)}")
            return dict.fromkeys(names)
        for name in names:
            if name not in value:
                self.error(entry, f"has no {name!r}")
        for name in value:
            if name not in names:
                self.error(entry, f"has an unknown entry {shown(name)}; known: {', '.join(names)}")
        return {name: value.get(name) for name in names}

    def shape(self, value: Any, entry: str) -> Shape:
        if isinstance(value, list | tuple) and len(value) <= _MOST_DIMS:
            num_elements = 1  # a loop, not a generator: there are two shapes for each of many pieces
            for length in value:
                is_length = type(length) is int and length >= 0
                num_elements *= max(length, 1) if is_length else _MOST_ELEMENTS
            if num_elements < _MOST_ELEMENTS:
                return tuple(value)
        self.error(
            entry, f"must be a list of integers, at least 0, for at most 2^63 elements, is {shown(value)}"
        )
        return ()

    def dtype(self, value: Any, entry: str) -> str:
        if isinstance(value, str) and value in DTYPE_NAMES:
            return value
        self.error(entry, f"must be one of {', '.join(DTYPE_NAMES)}, is {shown(value)}")
        return "uint8"

    def file_name(self, value: Any, entry: str) -> str:
        if isinstance(value, str) and _FILE.fullmatch(value):
            return value
        self.error(entry, f"{shown(value)} is not the name of a file beside the manifest")
        return ""

    def hash(self, value: Any, entry: str) -> str:
        if isinstance(value, str) and _SHA256.fullmatch(value):
            return value
        self.error(entry, f"must be 64 hexadecimal digits, is {shown(value)}")
        return ""

    def plain(self, value: Any, entry: str, depth: int = 0) -> Any:
        """Read the user's own data: numbers, texts, lists and objects."""
        if depth > _DEEPEST:
            self.error(entry, f"has more than {_DEEPEST} brackets inside each other")
            return None
        if isinstance(value, dict):
            return {name: self.plain(each, inside(entry, name), depth + 1) for name, each in _named(value)}
        if isinstance(value, list | tuple):
            return [self.plain(each, entry, depth + 1) for each in value]
        if isinstance(value, int | float):
            return self.number(value, entry)
        if value is not None and not isinstance(value, str):
            self.error(entry, f"must be plain data, is {shown(value)}")
        return value


def check_pieces(
    reader: Reader, tensors: Sequence[PlacedTensor], file_bytes: dict[str, int], *, is_whole: bool = True
) -> None:
    """Check that tensors have every element once, that pieces do not overlap, and that files hold them."""
    claimed: Counter[str] = Counter()
    places: set[tuple[str, str]] = set()
    budget = CornerBudget(sum(len(pieces) for _, _, _, pieces in tensors))
    for entry, shape, dtype, pieces in tensors:
        for file, name, _, sizes in pieces:
            if file not in file_bytes:
                reader.error(entry, f"is in {shown(file)}, which 'files' does not list")
            if (file, name) in places:
                reader.error(entry, f"{shown(file)} has {shown(name)} for two pieces")
            places.add((file, name))
            claimed[file] += math.prod(sizes) * DTYPE_NAMES[dtype].itemsize
        error = tiling_error(shape, [(offsets, sizes) for _, _, offsets, sizes in pieces], budget)
        if error is not None and is_whole:
            reader.error(entry, error)
    for file, num_bytes in claimed.items():
        if num_bytes > file_bytes.get(file, num_bytes):
            reader.error(
                f"files {file}", f"has {file_bytes[file]} bytes, too few for its pieces of {num_bytes}"
            )


# [Note: boxes that tile a tensor]
# The corners of a box, + where an even number of coordinates are ends, - where an odd number are, say what it
# covers. Those of boxes side by side cancel, and what remains are the corners of the whole:
#
#     +---+---+      + 0 -        The corners of 0…2 and 2…4, added up:  + at 0, - at 2, + at 2, - at 4
#     |   |   |                   are those of 0…4. With a gap, or with two boxes on one place, they are not.
#     +---+---+      - 0 +
#
# The time grows with the number of boxes alone: no list of elements, no pairs of boxes.
@final
class CornerBudget:
    """A limit of corners for all tensors of a manifest: few boxes of many dims have many."""

    def __init__(self, num_boxes: int) -> None:
        self._left = _FREE_CORNERS + _CORNERS_PER_BOX * num_boxes

    def take(self, count: int) -> bool:
        is_enough = count <= min(self._left, MOST_CORNERS)
        self._left -= count if is_enough else 0
        return is_enough


def tiling_error(shape: Shape, boxes: Sequence[Box], budget: CornerBudget) -> str | None:
    """Return the error of boxes that do not lie inside a tensor or hold each element once; or None."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a piece at {list(offsets)} of {list(sizes)} has other dims than the shape {list(shape)}"
        if any(begin + size > end for begin, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"a piece at {list(offsets)} of {list(sizes)} lies outside the shape {list(shape)}"
    filled = [box for box in boxes if math.prod(box[1])]
    held = sum(math.prod(sizes) for _, sizes in filled)
    if held != math.prod(shape):
        return f"the pieces hold {held} elements of the {math.prod(shape)} in shape {list(shape)}"
    if not filled:
        return None
    cut = [dim for dim, length in enumerate(shape) if any(sizes[dim] != length for _, sizes in filled)]
    if not budget.take(len(filled) * 2 ** len(cut)):
        return f"{len(filled)} pieces along {len(cut)} dims are more than a checkpoint has"
    return None if _corners_cancel(shape, filled, cut) else "its pieces overlap"


def _corners_cancel(shape: Shape, boxes: Sequence[Box], cut: Sequence[int]) -> bool:
    corners: dict[Shape, int] = {}
    whole = ((0,) * len(shape), shape)
    # The corners of a box: what is added to its offsets, per dim that is cut, and the sign.
    kinds = [
        (list(zip(cut, ends, strict=True)), (-1) ** sum(ends)) for ends in product((0, 1), repeat=len(cut))
    ]
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        for ends, parity in kinds:
            place = tuple([offsets[dim] + end * sizes[dim] for dim, end in ends])
            corners[place] = corners.get(place, 0) + sign * parity
    return not any(corners.values())


def inside(entry: str, name: str) -> str:
    """Name an entry of an entry, for messages. Short: it is made for every entry."""
    return f"{entry} {name[:_LONGEST_SHOWN]}"[:_LONGEST_SHOWN]


def shown(value: object) -> str:
    """Show a value in a message: short, and in printable characters."""
    if isinstance(value, str):
        text = value if value.isprintable() else ascii(value)
    elif isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) < _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _named(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((name if isinstance(name, str) else repr(name), each) for name, each in value.items())
