"""Pieces: regions of a model's tensors that lie as one box in a tensor of a file.

Files may hold a model's tensors joined, transposed or taken apart. GPT-2's attention and Mixtral's experts:

    name          offsets    sizes        stored         stored_offsets
    key.weight    (0, 0)     (16, 16)     c_attn.weight  (0, 16)         transposed: [inputs, outputs]
    gate_up_proj  (3, 0, 0)  (1, 24, 16)  experts.3.w1   (0, 0)          without the dim of experts

One list of pieces serves both directions: `FileTensor.join` makes a file's tensor from the model's, which are
whole; `read_pieces` makes a box of a model's tensor from boxes of the files'.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from echelon.errors import UserError

Shape = tuple[int, ...]
Window = tuple[slice, ...]


class Box(Protocol):
    """Where a part of a tensor lies; `echelon.state.ownership.Slice` is one."""

    @property
    def offsets(self) -> Shape: ...

    @property
    def sizes(self) -> Shape: ...


class Region(NamedTuple):
    """A box without a tensor."""

    offsets: Shape
    sizes: Shape


def whole(shape: Sequence[int]) -> Region:
    """The box that is all of a tensor of this shape."""
    return Region((0,) * len(shape), tuple(shape))


class Piece(NamedTuple):
    """A region of the model's tensor `name`, and where in the tensor `stored` of a file it begins."""

    name: str
    offsets: Shape
    sizes: Shape
    stored: str
    stored_offsets: Shape
    is_transposed: bool = False

    @property
    def window(self) -> Window:
        return _window(self.offsets, self.sizes)

    @property
    def stored_window(self) -> Window:
        return _window(self.stored_offsets, self._stored_order(self.sizes))

    def as_stored(self, part: Tensor) -> Tensor:
        """A view of a part of the region, as the file has it: without the first dims, transposed."""
        for _ in range(part.dim() - len(self.stored_offsets)):
            part = part[0]  # of size 1
        return part.T if self.is_transposed else part

    def overlap(self, box: Box) -> tuple[Window, Window] | None:
        """What a box has of this region: where that lies in the box, and where in the file's tensor."""
        begins = tuple(map(max, box.offsets, self.offsets))
        ends = tuple(map(min, _add(box.offsets, box.sizes), _add(self.offsets, self.sizes)))
        sizes = _subtract(ends, begins)
        if any(size <= 0 for size in sizes):
            return None
        inside = self._stored_order(_subtract(begins, self.offsets))
        stored = _add(self.stored_offsets, inside)
        return _window(_subtract(begins, box.offsets), sizes), _window(stored, self._stored_order(sizes))

    def _stored_order(self, values: Shape) -> Shape:
        values = values[len(values) - len(self.stored_offsets) :]
        return values[::-1] if self.is_transposed else values


class FileTensor(NamedTuple):
    """A tensor of a file, and the pieces that fill it. `dtype` is that of the model's tensors."""

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def names(self) -> list[str]:
        """The model's tensors that it is made of."""
        return list(dict.fromkeys(piece.name for piece in self.pieces))

    def renamed(self, name: str) -> "FileTensor":
        """The same tensor under another name in the file."""
        pieces = tuple(piece._replace(stored=name) for piece in self.pieces)
        return self._replace(name=name, pieces=pieces)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Make it from whole tensors of the model; the model's own tensor where both are the same."""
        first = tensors[self.pieces[0].name]
        if is_same(self.pieces, self.shape, first.shape):
            return first.contiguous()
        dtype = reduce(torch.promote_types, (tensors[name].dtype for name in self.names))
        joined = torch.empty(self.shape, dtype=dtype, device=first.device)
        for piece in self.pieces:
            joined[piece.stored_window].copy_(piece.as_stored(tensors[piece.name].detach()[piece.window]))
        return joined


def is_same(pieces: Sequence[Piece], stored_shape: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a file has a tensor of the model as it is."""
    is_whole = len(pieces) == 1 and pieces[0].sizes == tuple(shape) == tuple(stored_shape)
    return is_whole and not pieces[0].is_transposed


def read_pieces(
    pieces: Iterable[Piece], box: Box, out: Tensor, read: Callable[[str, Window, Tensor], None]
) -> None:
    """Fill `out` with a box of a model's tensor; `read(stored, window, part)` fills a part from a file's."""
    num_read = 0
    for piece in pieces:
        overlap = piece.overlap(box)
        if overlap is not None:
            window, stored_window = overlap
            part = piece.as_stored(out[window])
            read(piece.stored, stored_window, part)
            num_read += part.numel()
    if num_read != out.numel():
        raise UserError(
            f"a box of {list(box.sizes)} at {list(box.offsets)}: the files hold {num_read} of its "
            f"{out.numel()} elements; it must lie inside the tensor"
        )


def _window(offsets: Shape, sizes: Shape) -> Window:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _add(left: Shape, right: Shape) -> Shape:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _subtract(left: Shape, right: Shape) -> Shape:
    return tuple(a - b for a, b in zip(left, right, strict=True))
