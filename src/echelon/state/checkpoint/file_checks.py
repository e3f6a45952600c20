"""Checks that the files of a checkpoint are those that its manifest lists: sizes, hashes and headers.

Files are opened as what they must be: regular files in the checkpoint's folder, no links out of it. The hash
of a file is SHA-256 over the XXH3 (64 bits) of each of its blocks of 4 MiB. It finds damage, and proves
nothing about the writer of a file, who could have written the manifest too. XXH3 is as fast as memory;
SHA-256 of all bytes, without instructions for it, is slower than a disk.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, final

from xxhash import xxh3_64_digest

from echelon.errors import DamagedError, UserError
from echelon.hardware import usable_cores
from echelon.launching.watch.pulse import beat
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.manifest_reader import shown
from echelon.state.weight_files.layout import Described
from echelon.state.weight_files.tensor_file import StoredTensor, read_header

BLOCK_BYTES = 4 << 20
_PART_BYTES, _THREADS = 4 * BLOCK_BYTES, 4


@final
class FileHash:
    """The hash of a file whose bytes come in order; every part but the last must be of whole blocks."""

    def __init__(self) -> None:
        self._blocks = hashlib.sha256()
        self._is_ended = False

    def update(self, data: memoryview) -> None:
        assert not self._is_ended or not len(data), "a part before this one did not end with a block"
        for begin in range(0, len(data), BLOCK_BYTES):
            self._blocks.update(xxh3_64_digest(data[begin : begin + BLOCK_BYTES]))
        self._is_ended = len(data) % BLOCK_BYTES != 0

    def hexdigest(self) -> str:
        return self._blocks.hexdigest()


def hash_file(file: BinaryIO) -> str:
    """Return the hash of a file on a disk. Several threads read it, each other parts."""
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    parts = range(0, size, _PART_BYTES)
    with ThreadPoolExecutor(max(1, min(_THREADS, usable_cores(), len(parts)))) as threads:
        checks = threads.map(lambda begin: _checks(descriptor, begin, min(_PART_BYTES, size - begin)), parts)
        return hashlib.sha256(b"".join(checks)).hexdigest()


def _checks(descriptor: int, begin: int, size: int) -> bytes:
    """Return the hash of each block of a part of a file, one behind the other."""
    memory, checks = memoryview(bytearray(min(BLOCK_BYTES, size))), []
    for offset in range(begin, begin + size, BLOCK_BYTES):
        block = memory[: begin + size - offset]
        _read_exactly(descriptor, offset, block)
        checks.append(xxh3_64_digest(block))
        beat()
    return b"".join(checks)


def _read_exactly(descriptor: int, offset: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise OSError(errno.EIO, "became shorter while it was read")
        memory, offset = memory[count:], offset + count


def no_links(path: str, flags: int) -> int:
    """Open for open(opener=…): refuse links, folders, pipes and devices, and wait for none of them."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", path)
    return descriptor


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint to read. Errors of the disk are errors of this file."""
    try:
        with open(path, "rb", opener=no_links) as file:
            yield file
    except OSError as error:
        kind = DamagedError if isinstance(error, FileNotFoundError) else UserError
        link = "is a link; the files of a checkpoint must be in its folder"
        reason = link if path.is_symlink() else error.strerror or str(error)
        raise kind(f"{path}: cannot be read: {reason}") from error


def read_regular(path: Path, most_bytes: int) -> bytes:
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= most_bytes:
            return file.read(most_bytes)
    raise DamagedError(f"{path}: has {num_bytes} bytes; must have {most_bytes} at most")


def check_size(path: Path, record: FileRecord) -> None:
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
    if found != record.bytes:
        raise DamagedError(f"{path}: is damaged: it has {found} bytes, and the manifest says {record.bytes}")


def check_hash(path: Path, record: FileRecord) -> None:
    with open_regular(path) as file:
        found = hash_file(file)
    if found != record.hash:
        raise DamagedError(
            f"{path}: is damaged: its hash is {found[:16]}…, and the manifest says {record.hash[:16]}…"
        )


def checked_header(path: Path, expected: Mapping[str, Described]) -> dict[str, StoredTensor]:
    """Read the header of a file, which must hold exactly the tensors that the manifest says."""
    try:
        header = read_header(path, opener=no_links)
    except UserError as error:
        kind = UserError if isinstance(error.__cause__, OSError) else DamagedError  # a disk may recover
        raise kind(error.title, error.errors) from error
    for name in {**expected, **header}:
        found, wanted = _described(header.get(name)), _described(expected.get(name))
        if found != wanted:
            raise DamagedError(f"{path}: holds {found} as {shown(name)}, and the manifest says {wanted}")
    return header


def share_files(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Return by rank the files that it verifies: every file once, and all ranks about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = taken.index(min(taken))
        taken[rank] += sizes[name]
        shares[rank].append(name)
    return shares


def _described(tensor: Described | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
