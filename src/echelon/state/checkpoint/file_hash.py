"""The hash of a file: SHA-256 over the XXH3 (64 bits) of each of its blocks of 4 MiB.

It finds damage; it proves nothing about who wrote a file, who could have written the manifest too. XXH3 is as
fast as memory, where SHA-256 of all bytes, without instructions for it, is slower than a disk.
"""

import errno
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, final

from xxhash import xxh3_64_digest

from echelon.hardware import usable_cores
from echelon.launching.watch.pulse import beat

BLOCK_BYTES = 4 << 20
_PART_BYTES, _THREADS = 4 * BLOCK_BYTES, 4


@final
class FileHash:
    """Takes the bytes of a file in order; every part but the last must be of whole blocks."""

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


def hash_bytes(data: bytes | bytearray) -> str:
    found = FileHash()
    found.update(memoryview(data))
    return found.hexdigest()


def hash_file(file: BinaryIO) -> str:
    """Of all bytes of a file that is on a disk. Several threads read it, each other parts."""
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    parts = range(0, size, _PART_BYTES)
    with ThreadPoolExecutor(max(1, min(_THREADS, usable_cores(), len(parts)))) as threads:
        checks = threads.map(lambda begin: _checks(descriptor, begin, min(_PART_BYTES, size - begin)), parts)
        return hashlib.sha256(b"".join(checks)).hexdigest()


def _checks(descriptor: int, begin: int, size: int) -> bytes:
    """The hash of each block of a part of a file, one behind the other."""
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
