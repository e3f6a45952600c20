"""Which tensors the files of a model hold, and which pieces of the model's own tensors they are made of.

A layout is made for the names that the files have: with or without the prefix of the base model, with the
tied head or without. Without names it is the one to write.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Protocol, final

import torch
from torch import Tensor, nn

from echelon.state.weight_files.pieces import FileTensor, Piece, whole
from echelon.state.weight_files.tensor_file_writer import TensorEntry


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
    ignored   constants in files that nobody reads
    problems  why the files' tensors cannot become the model's
    """

    tensors: Mapping[str, FileTensor]
    ties: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    problems: Sequence[str] = ()

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """Of each of the model's tensors; tied ones once."""
        pieces: dict[str, list[Piece]] = {}
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                pieces.setdefault(piece.name, []).append(piece)
        return pieces

    def pieces_of(self, name: str) -> list[Piece]:
        return self.pieces[self.ties.get(name, name)]

    def errors(self, found: Mapping[str, Described], unreadable: Collection[str] = ()) -> list[str]:
        """What is wrong with the tensors of files, from their headers; `unreadable` ones are not judged."""
        unread = {*self.copies, *self.ignored}
        stored = {name: tensor for name, tensor in found.items() if name not in unread}
        expected = {name: tensor for name, tensor in self.tensors.items() if name not in unreadable}
        return [*self.problems, *tensor_errors(stored, expected), *self._mixture_errors(found)]

    def _mixture_errors(self, found: Mapping[str, Described]) -> list[str]:
        """A tensor that is put together must have one type."""
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
        """What to write, in order, if the model's tensors have these types."""
        return [
            TensorEntry(
                tensor.name, tensor.shape, reduce(torch.promote_types, (dtypes[n] for n in tensor.names))
            )
            for tensor in self.tensors.values()
        ]

    def needed_names(self) -> list[str]:
        """The model's tensors in the order in which writing needs them, each once."""
        return list(self.pieces)

    def joined(self, fetch: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """The tensors to write, in order. Each of the model's is fetched once, and freed after use."""
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
    """Names that are missing or unknown, wrong shapes, and numbers of the wrong kind."""
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
    """A tensor that the files have as the model has it."""
    origin, shape = whole(tensor.shape)
    return FileTensor(stored, shape, tensor.dtype, (Piece(name, origin, shape, stored, origin),))


def plain_layout(
    model: nn.Module, names: Collection[str] = (), state: Mapping[str, object] | None = None
) -> WeightLayout:
    """Of a model whose files have the names of its state dict; of tied tensors one name is enough.

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
    """The state dict, in which tied tensors are one object; and errors for what in it is no tensor."""
    state = model.state_dict(keep_vars=True) if state is None else state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, [
        f"{name}: is a {type(value).__name__} in the model, and files hold tensors only"
        for name, value in state.items()
        if name not in tensors
    ]


def find_ties(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, str]:
    """Further names of each tensor → the one that files have: the first that is in `names`, or the first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    ties: dict[str, str] = {}
    for group in groups.values():
        stored = next((name for name in group if name in names), group[0])
        ties |= {name: stored for name in group if name != stored}
    return ties
