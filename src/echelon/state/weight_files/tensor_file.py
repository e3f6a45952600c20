"""One safetensors file, read by boxes and written tensor by tensor.

It has the length of the header, the header as JSON, then the tensors' bytes. Boxes are read at their place in
the file, straight into the tensors that are returned: a memory map would keep every page that was touched in
the memory of the process. Writing needs one tensor at a time, in any order, and the file gets its name when
it is complete.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError, raise_errors
from echelon.hardware import usable_cores
from echelon.state.bounded_json import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Opener = Callable[[str, int], int]  # of open(): who may be followed, and what is refused
LENGTH = struct.Struct("<Q")  # of the header, in front of it
METADATA = "__metadata__"  # the one key of a header that is no tensor

_ALIGNMENT = 8  # of the first tensor, for readers that map the file
_LONGEST_HEADER = 100_000_000  # as in safetensors itself
_MOST_VALUES = 1 << 22  # of a header: some 500,000 tensors
_MOST_DIMS, _LARGEST = 64, 2**63 - 1  # of a shape, as in torch
_BLOCK_BYTES = 2**20  # of whole rows, from which parts are cut
_SHARE_BYTES, _MOST_THREADS = 4 * 2**20, 4  # of a large read: what a thread reads at once


class StoredTensor(NamedTuple):
    """A tensor in a file: `begin` is where its bytes start."""

    path: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_header(path: Path, opener: Opener | None = None) -> dict[str, StoredTensor]:
    """Read where each tensor of a file is, and no weight. A file that is cut short or damaged is refused."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise ValueError("it is not a regular file")
        with open(path, "rb", opener=opener) as file:
            size = os.fstat(file.fileno()).st_size
            begin, entries = _parse_header(file, size)
        return _place_tensors(path, begin, size, entries)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, LookupError, struct.error) as error:
        raise UserError(f"{path}: cannot be read as safetensors (cut short, or damaged?): {error}") from error


def _parse_header(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Return where the tensors' bytes begin, and what the header says of each."""
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > min(size - LENGTH.size, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    entries = parse_json(file.read(length), most_bytes=_LONGEST_HEADER, most_values=_MOST_VALUES)
    if not isinstance(entries, dict):
        raise TypeError(f"the header is a {type(entries).__name__}, must be an object")
    entries.pop(METADATA, None)
    return LENGTH.size + length, entries


def _place_tensors(path: Path, begin: int, size: int, entries: dict[str, Any]) -> dict[str, StoredTensor]:
    """Check that the tensors lie one behind the other and fill the file."""
    tensors = {}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name} is of type {entry['dtype']}; must be one of {', '.join(DTYPES)}")
        tensor = StoredTensor(path, end, tuple(entry["shape"]), DTYPES[entry["dtype"]])
        if not is_text(name):
            raise ValueError(f"the name {ascii(name)[:200]} has half a character")
        if len(tensor.shape) > _MOST_DIMS:
            raise ValueError(f"{name} has {len(tensor.shape)} dims")
        if any(type(length) is not int or not 0 <= length <= _LARGEST for length in tensor.shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}")
        end += nbytes(tensor.shape, tensor.dtype)
        if entry["data_offsets"] != [tensor.begin - begin, end - begin]:
            raise ValueError(f"the bytes of {name} are not where its shape and its neighbours say")
        tensors[name] = tensor
    if end != size:
        raise ValueError(f"the tensors end at byte {end}, and the file at {size}")
    return tensors


def is_text(name: str) -> bool:
    """Return whether it can be written as UTF-8: JSON can hold half a character, a surrogate of UTF-16."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def read_box(tensor: StoredTensor, box: tuple[slice, ...], out: Tensor, opener: Opener | None = None) -> None:
    """Fill `out`, which has the shape of the box and may be strided, with that box of a tensor."""
    if not out.numel():
        return
    with FileIO(tensor.path, opener=opener) as file:
        _read_box(file, tensor.begin, tensor.shape, box, out)


# Of a 6 × 8 matrix,
#
#     rows 2 to 3        one read of the bytes of 2 rows, into `out`
#     columns 2 to 3     blocks of whole rows, of 1 MiB at most, from which the columns are copied
#     … of long rows     for each row one read of its 2 elements
def _read_box(file: FileIO, begin: int, shape: tuple[int, ...], box: tuple[slice, ...], out: Tensor) -> None:
    if not shape:
        shape, box, out = (1,), (slice(0, 1),), out[None]
    row_bytes = nbytes(shape[1:], out.dtype)
    begin += box[0].start * row_bytes
    if out.shape[1:] == shape[1:] and out.is_contiguous():
        _read_exactly(file, begin, out)
    elif row_bytes > _BLOCK_BYTES:
        for index, row in enumerate(out):
            _read_box(file, begin + index * row_bytes, shape[1:], box[1:], row)
    else:
        num_rows = min(_BLOCK_BYTES // row_bytes, len(out))
        block = torch.empty((num_rows, *shape[1:]), dtype=out.dtype, device="cpu")
        for start in range(0, len(out), num_rows):
            part = out[start : start + num_rows]
            _read_exactly(file, begin + start * row_bytes, block[: len(part)])
            part.copy_(block[(slice(len(part)), *box[1:])])


def _read_exactly(file: FileIO, begin: int, out: Tensor) -> None:
    """Fill contiguous memory with the bytes from `begin` on; a large one by several threads."""
    flat = out.as_strided((out.numel(),), (1,))  # unlike view(-1), also where one element has any stride
    memory = flat.view(torch.uint8).numpy().data
    if len(memory) <= _SHARE_BYTES or usable_cores() == 1:
        _read_share(file, begin, memory)
        return
    reading = [
        _threads().submit(_read_share, file, begin + at, memory[at : at + _SHARE_BYTES])
        for at in range(0, len(memory), _SHARE_BYTES)
    ]
    wait(reading)  # also after an error: the file is closed behind this
    for share in reading:
        share.result()


def _read_share(file: FileIO, begin: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(file.fileno(), [memory], begin)
        if not count:
            raise UserError(f"{file.name!s}: became shorter while it was read; is it being written?")
        memory, begin = memory[count:], begin + count


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, usable_cores()), thread_name_prefix="echelon-read")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not come along


class TensorEntry(NamedTuple):
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
    """Raise a UserError that names every tensor of a type that safetensors does not have."""
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
    """Raise errors of the disk as errors of the user. What makes the tensors may have OSErrors of its own."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def make_header(entries: Sequence[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes in front of the tensors, and where each begins: aligned, widest types first."""
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
