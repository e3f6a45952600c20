"""One safetensors file, read by boxes: the length of the header, the header as JSON, then the tensors' bytes.

Boxes are read at their place in the file, straight into the tensors that are returned. A memory map would
keep every page that was touched in the memory of the process.
"""

import math
import os
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
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
Opener = Callable[[str, int], int]  # of open(): who may be followed, and what is refused
LENGTH = struct.Struct("<Q")  # of the header, in front of it
METADATA = "__metadata__"  # the one key of a header that is no tensor

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
    """Every tensor of a file, by name; no weight is read. A file that is cut short or damaged is refused."""
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
    """Where the tensors' bytes begin, and what the header says of each."""
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > min(size - LENGTH.size, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    entries = parse_json(file.read(length), most_bytes=_LONGEST_HEADER, most_values=_MOST_VALUES)
    if not isinstance(entries, dict):
        raise TypeError(f"the header is a {type(entries).__name__}, must be an object")
    entries.pop(METADATA, None)
    return LENGTH.size + length, entries


def _place_tensors(path: Path, begin: int, size: int, entries: dict[str, Any]) -> dict[str, StoredTensor]:
    """The tensors, which must lie one behind the other and fill the file."""
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
    """Whether it can be written as UTF-8: JSON can hold half a character, a surrogate of UTF-16."""
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
