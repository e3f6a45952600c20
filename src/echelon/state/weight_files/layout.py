"""The tensors in the files of a model, and the pieces of the model's own tensors that they are made of.

A layout is made for the names that the files have: with or without the prefix of the base model, with the
tied head or without. Without names it is the one to write. Files may hold a model's tensors joined,
transposed or taken apart: a piece is a region of a model's tensor that lies as one box in a tensor of a file.
GPT-2's attention and Mixtral's experts:

    name          offsets    sizes        stored         stored_offsets
    key.weight    (0, 0)     (16, 16)     c_attn.weight  (0, 16)         transposed: [inputs, outputs]
    gate_up_proj  (3, 0, 0)  (1, 24, 16)  experts.3.w1   (0, 0)          without the dim of experts

One list of pieces serves both directions: `FileTensor.join` makes a file's tensor from the model's, which are
whole; `read_pieces` makes a box of a model's tensor from boxes of the files'.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.ownership import Slice
from echelon.state.weight_files.tensor_file import TensorEntry

Shape = tuple[int, ...]
Window = tuple[slice, ...]


class Region(NamedTuple):
    offsets: Shape
    sizes: Shape


Box = Region | Slice  # a part of a tensor by its place


def whole(shape: Sequence[int]) -> Region:
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
        """View a part of the region as the file has it: without the first dims, transposed."""
        for _ in range(part.dim() - len(self.stored_offsets)):
            part = part[0]  # of size 1
        return part.T if self.is_transposed else part

    def overlap(self, box: Box) -> tuple[Window, Window] | None:
        """Return where the part of a box in this region lies: in the box, and in the file's tensor."""
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
        return list(dict.fromkeys(piece.name for piece in self.pieces))

    def renamed(self, name: str) -> "FileTensor":
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
    """Return whether a file has a tensor of the model as it is."""
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


class Described(Protocol):
    """A tensor, or the header of one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@final
@dataclass(frozen=True)
class WeightLayout:
    """The tensors of the files by name, in the order of writing.

    ties      further names of the model's tied tensors → the name that is stored
    copies    tensors that files hold a second time → the one that they must equal
    ignored   constants in files that are not read
    problems  why the files' tensors cannot become the model's
    """

    tensors: Mapping[str, FileTensor]
    ties: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    problems: Sequence[str] = ()

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """The pieces of each of the model's tensors; tied ones once."""
        pieces: dict[str, list[Piece]] = {}
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                pieces.setdefault(piece.name, []).append(piece)
        return pieces

    def pieces_of(self, name: str) -> list[Piece]:
        return self.pieces[self.ties.get(name, name)]

    def errors(self, found: Mapping[str, Described], unreadable: Collection[str] = ()) -> list[str]:
        """List the errors of files' tensors, from their headers; `unreadable` ones are not judged."""
        unread = {*self.copies, *self.ignored}
        stored = {name: tensor for name, tensor in found.items() if name not in unread}
        expected = {name: tensor for name, tensor in self.tensors.items() if name not in unreadable}
        return [*self.problems, *tensor_errors(stored, expected), *self._mixture_errors(found)]

    def _mixture_errors(self, found: Mapping[str, Described]) -> list[str]:
        dtypes = {
            name: sorted({str(found[piece.stored].dtype) for piece in pieces if piece.stored in found})
            for name, pieces in self.pieces.items()
        }
        return [
            f"{name}: its parts in the files are of several types, {', '.join(kinds)}; must be of one"
            for name, kinds in dtypes.items()
            if len(kinds) > 1
        ]

    def entries(self, dtypes: Mapping[str, torch.dtype]) -> list[TensorEntry]:
        """List the tensors to write, in order, if the model's have these types."""
        return [
            TensorEntry(
                tensor.name, tensor.shape, reduce(torch.promote_types, (dtypes[n] for n in tensor.names))
            )
            for tensor in self.tensors.values()
        ]

    def needed_names(self) -> list[str]:
        """List the model's tensors in the order in which writing needs them, each once."""
        return list(self.pieces)

    def joined(self, fetch: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Make the tensors to write, in order. Each of the model's is fetched once, and freed after use."""
        last_use = {name: tensor.name for tensor in self.tensors.values() for name in tensor.names}
        held: dict[str, Tensor] = {}
        for tensor in self.tensors.values():
            for name in tensor.names:
                if name not in held:
                    held[name] = fetch(name)
            yield tensor.join(held)
            for name in tensor.names:
                if last_use[name] == tensor.name:
                    del held[name]


def tensor_errors(found: Mapping[str, Described], expected: Mapping[str, Described]) -> list[str]:
    """List names that are missing or unknown, wrong shapes, and numbers of the wrong kind."""
    errors = [f"{name}: is missing" for name in expected if name not in found]
    errors += [f"{name}: is not a tensor of this model" for name in found if name not in expected]
    for name in expected:
        if name not in found:
            continue
        tensor, wanted = found[name], expected[name]
        if tuple(tensor.shape) != tuple(wanted.shape):
            errors.append(f"{name}: has shape {list(tensor.shape)}, must be {list(wanted.shape)}")
        if wanted.dtype.is_floating_point and not tensor.dtype.is_floating_point:
            errors.append(
                f"{name}: is {tensor.dtype}, must be floating point (quantised weights are not read)"
            )
        elif not wanted.dtype.is_floating_point and tensor.dtype != wanted.dtype:
            errors.append(f"{name}: is {tensor.dtype}, must be {wanted.dtype}")
    return errors


def whole_tensor(name: str, tensor: Described, stored: str) -> FileTensor:
    """Describe a tensor that the files have as the model has it."""
    origin, shape = whole(tensor.shape)
    return FileTensor(stored, shape, tensor.dtype, (Piece(name, origin, shape, stored, origin),))


def plain_layout(
    model: nn.Module, names: Collection[str] = (), state: Mapping[str, object] | None = None
) -> WeightLayout:
    """Return the layout of files with the names of a model's state dict; of tied tensors one name is enough.

    `state` is the state dict, if the model itself has only parts of it.
    """
    tensors, problems = state_tensors(model, state)
    ties = find_ties(tensors, names)
    return WeightLayout(
        tensors={name: whole_tensor(name, t, name) for name, t in tensors.items() if name not in ties},
        ties=ties,
        copies={name: first for name, first in ties.items() if name in names},
        problems=problems,
    )


def state_tensors(
    model: nn.Module, state: Mapping[str, object] | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict, in which tied tensors are one object; and errors for what in it is no tensor."""
    state = model.state_dict(keep_vars=True) if state is None else state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, [
        f"{name}: is a {type(value).__name__} in the model, and files hold tensors only"
        for name, value in state.items()
        if name not in tensors
    ]


def find_ties(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, str]:
    """Map further names of each tensor to the one in files: the first that is in `names`, or the first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    ties: dict[str, str] = {}
    for group in groups.values():
        stored = next((name for name in group if name in names), group[0])
        ties |= {name: stored for name in group if name != stored}
    return ties
