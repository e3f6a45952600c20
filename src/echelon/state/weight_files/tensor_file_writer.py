"""One safetensors file, written tensor by tensor: the header first, then each tensor's bytes at their place.

No more than one tensor is needed at a time, in any order. The file gets its name when it is complete.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError, raise_errors
from echelon.state.weight_files.tensor_file import DTYPES, LENGTH, METADATA, nbytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the first tensor, for readers that map the file


class TensorEntry(NamedTuple):
    """What the header of a file says of a tensor, but for its place."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)


def write_tensor_file(path: Path, entries: Sequence[TensorEntry], tensors: Iterator[Tensor]) -> None:
    """Write a file of the next tensors of an iterator, one for each entry, in their order."""
    check_types(str(path), entries)

    def write(file: BinaryIO) -> None:
        with report_os_errors(path):
            header, begins = make_header(entries)
            file.write(header)
        for entry in entries:
            # As an argument, so that no name keeps the tensor while the next one is made.
            _write_tensor(file, path, begins[entry.name], entry, next(tensors, None))

    write_complete(path, write)


def check_types(subject: str, entries: Sequence[TensorEntry]) -> None:
    """A UserError that names every tensor of a type that safetensors does not have."""
    unknown = [
        f"{e.name}: is {e.dtype}, which safetensors does not have" for e in entries if e.dtype not in _NAMES
    ]
    raise_errors(subject, unknown)


def write_complete(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write under a temporary name first: a file with its final name is complete, and on the disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        with report_os_errors(path):
            file = part.open("wb")
        with file:
            write(file)
            with report_os_errors(path):
                file.flush()
                os.fsync(file.fileno())
        with report_os_errors(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def report_os_errors(path: Path) -> Iterator[None]:
    """Errors of the disk as errors of the user. What makes the tensors may have OSErrors of its own."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def make_header(entries: Sequence[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """All bytes in front of the tensors, and where each begins: widest types first, so all are aligned."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    offsets = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        begin, end = end, end + entry.nbytes
        offsets[entry.name] = begin
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begins = {name: LENGTH.size + len(text) + offset for name, offset in offsets.items()}
    return LENGTH.pack(len(text)) + text, begins


def _write_tensor(file: BinaryIO, path: Path, begin: int, entry: TensorEntry, tensor: Tensor | None) -> None:
    found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    if tensor is None or found != (entry.shape, entry.dtype):
        received = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        raise UserError(
            f"{path}: {entry.name} must be {list(entry.shape)} of {entry.dtype}, received {received}; give "
            "the tensors in the order of their entries"
        )
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    with report_os_errors(path):
        file.seek(begin)
        file.write(values.data)
