"""The bytes of a safetensors file before they are written: its header, then tensors one behind the other.

Any range of them can be made by itself, so that a file is written from a small buffer, chunk by chunk, or
from a copy of all of it:

    image     header | a            | b    | c               |
    chunks    |  0      |  1      |  2      |  3      |  4   |
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.buffer_layout import portions
from echelon.state.ownership import Slice
from echelon.state.weight_files.tensor_file import TensorEntry, make_header

FILE_BYTES = 4 << 30  # a rank begins another file when one has so many


class StoredBox(NamedTuple):
    """A box that a file holds, under a name of its own; `begin` is where in the file."""

    slice: Slice
    dtype: torch.dtype
    tensor: str
    begin: int

    @property
    def nbytes(self) -> int:
        return self.slice.numel * self.dtype.itemsize


class FileLayout(NamedTuple):
    """The contents of a file of a checkpoint, in the order of its bytes."""

    name: str
    header: bytes
    boxes: tuple[StoredBox, ...]
    size: int


def lay_out(
    rank: int, boxes: Sequence[tuple[Slice, torch.dtype]], limit: int = FILE_BYTES
) -> list[FileLayout]:
    """Lay out the files of what a rank writes; every rank computes the same for each."""
    parts = portions(boxes, lambda pair: pair[0].numel * pair[1].itemsize, limit)
    return [
        _layout(f"rank-{rank:05d}{f'-{number + 1}' if number else ''}.safetensors", part)
        for number, part in enumerate(parts)
    ]


def _layout(name: str, boxes: Sequence[tuple[Slice, torch.dtype]]) -> FileLayout:
    entries = {}
    for box, dtype in boxes:
        place = "" if box.is_whole else "@" + ",".join(map(str, box.offsets))
        entries[f"{box.name}/{box.part}{place}"] = (box, dtype)
    header, begins = make_header([TensorEntry(n, box.sizes, dtype) for n, (box, dtype) in entries.items()])
    placed = sorted(
        (StoredBox(box, dtype, n, begins[n]) for n, (box, dtype) in entries.items()),
        key=lambda box: box.begin,
    )
    end = max((box.begin + box.nbytes for box in placed), default=len(header))
    return FileLayout(name, header, tuple(placed), end)


@final
class FileImage:
    """Makes the bytes of a file. Ranges must be asked for in order: one tensor that does not lie in a piece
    is copied at a time, and kept until the next."""

    def __init__(self, layout: FileLayout, tensor_of: Callable[[Slice], Tensor]) -> None:
        self.layout, self._tensor_of = layout, tensor_of
        self._first = 0  # of the boxes that do not end before the next range
        self._bytes: tuple[int, Tensor] | None = None

    def fill(self, begin: int, out: Tensor) -> None:
        """Fill host memory with the bytes from `begin` on; returns when they are there, unless the tensors
        are on a device and `out` is pinned: then when the current stream has done it."""
        end, is_pinned = begin + len(out), out.is_pinned()
        header = self.layout.header[begin:end]
        if header:
            out[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        while self._first < len(self.layout.boxes):
            box = self.layout.boxes[self._first]
            low, high = max(begin, box.begin), min(end, box.begin + box.nbytes)
            if low < high:
                part = self._flat(self._first)[low - box.begin : high - box.begin]
                out[low - begin : high - begin].copy_(part, non_blocking=is_pinned)
            if box.begin + box.nbytes > end:  # the next range begins inside this box
                return
            self._first += 1

    def _flat(self, index: int) -> Tensor:
        if self._bytes is None or self._bytes[0] != index:
            self._bytes = None  # before the next one is made
            self._bytes = index, as_bytes(self._tensor_of(self.layout.boxes[index].slice))
        return self._bytes[1]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in order; a copy of one that does not lie in one piece."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
