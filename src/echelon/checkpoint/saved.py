"""A checkpoint that is there: any box of any of its tensors can be read, whatever the plan that saved it."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.checkpoint.manifest import MANIFEST, Manifest, TensorRecord
from echelon.errors import UserError
from echelon.ownership import MASTER, VALUE, OwnedSlice, Slice
from echelon.weight_files.pieces import Piece, Window, read_pieces, whole
from echelon.weight_files.tensor_file import StoredTensor, read_box, read_header


class SavedTensor(NamedTuple):
    """What a checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@final
class SavedState:
    """The contents of a checkpoint's folder. Tensors are read when they are asked for, by boxes."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> "SavedState":
        """Read the manifest. Raises a UserError that names the file if anything is wrong with it."""
        path = Path(path)
        try:
            text = (path / MANIFEST).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path / MANIFEST}: cannot be read: {error.strerror}") from error
        return cls(path, Manifest.from_json(json.loads(text)))

    def parts(self, name: str) -> dict[str, SavedTensor]:
        """What there is of a tensor: its value, its master, the optimizer's state."""
        records = self.manifest.tensors.get(name, {})
        return {part: _described(record) for part, record in records.items()}

    def value_part(self, name: str, dtype: torch.dtype) -> str:
        """What a weight of this type is read from: its value, or where that is of another type, the float32
        master it was rounded from."""
        parts = self.parts(name)
        return MASTER if MASTER in parts and parts[VALUE].dtype != dtype else VALUE

    def read(self, box: Slice, out: Tensor) -> None:
        """Fill `out`, on any device and of any type, with the box of a tensor."""
        record = self.manifest.tensors[box.name][box.part]
        pieces = [
            Piece("", p.offsets, p.sizes, f"{p.file}/{p.tensor}", (0,) * len(p.sizes)) for p in record.pieces
        ]
        values = torch.empty(box.sizes, dtype=_described(record).dtype)
        read_pieces(pieces, box, values, self._read_stored)
        out.copy_(values)

    def _read_stored(self, stored: str, window: Window, out: Tensor) -> None:
        read_box(self._stored[stored], window, out)

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        return {
            f"{file}/{name}": tensor
            for file in self.manifest.files
            for name, tensor in read_header(self.path / file).items()
        }


def _described(record: TensorRecord) -> SavedTensor:
    return SavedTensor(record.shape, getattr(torch, record.dtype))


@final
class SavedParameter:
    """What a checkpoint has of a parameter, as a rank needs it that updates a part of it, or all.

    `boxes(tensor)`: a tensor like the local parameter, as boxes of the whole one. Without `state`, the
    optimizer's is as if there were none.
    """

    def __init__(
        self,
        saved: SavedState,
        name: str,
        boxes: Callable[[Tensor], Sequence[OwnedSlice]],
        *,
        state: bool = True,
    ) -> None:
        self._saved, self.name, self._boxes = saved, name, boxes
        parts = saved.parts(name)
        self.parts = {part: each for part, each in parts.items() if state or part in (VALUE, MASTER)}
        self.numbers = saved.manifest.state_numbers.get(name, {}) if state else {}

    @property
    def state_parts(self) -> list[str]:
        """The parts that are state of an optimizer, and tensors."""
        return sorted(self.parts.keys() - {VALUE, MASTER})

    def is_by_element(self, part: str) -> bool:
        """Whether it has one number for each element of the parameter; else it belongs to all of it."""
        return self.parts[part].shape == self.parts[VALUE].shape

    def fill(self, part: str, out: Tensor) -> None:
        """Fill a tensor like the local parameter with this rank's elements of a part; padding is zeros."""
        out.zero_()
        for each in self._boxes(out):
            self._saved.read(each.slice._replace(part=part), each.tensor)

    def fill_value(self, out: Tensor) -> None:
        """Fill a tensor like the local parameter with this rank's elements of the weight."""
        self.fill(self._saved.value_part(self.name, out.dtype), out)

    def whole(self, part: str) -> Tensor:
        """All of a part, in host memory."""
        saved = self.parts[part]
        out = torch.empty(saved.shape, dtype=saved.dtype)
        origin, sizes = whole(saved.shape)
        self._saved.read(Slice(self.name, part, saved.shape, origin, sizes), out)
        return out

    def has_finer(self, dtype: torch.dtype) -> bool:
        """Whether a weight of this type lacks bits that are here."""
        return self.parts[self.finest].dtype != dtype

    @property
    def finest(self) -> str:
        """The part with all bits of the weight: its float32 master, if there is one."""
        return MASTER if MASTER in self.parts else VALUE
