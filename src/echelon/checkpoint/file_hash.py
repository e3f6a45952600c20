"""The hash of a file: SHA-256 over the CRC-32 of each of its blocks of 1 MiB.

It finds damage; it proves nothing about who wrote a file, who could have written the manifest too. A CRC-32
is read as fast as memory where SHA-256 of all bytes, without instructions for it, is slower than a disk.
"""

import hashlib
import zlib
from typing import BinaryIO, final

BLOCK_BYTES = 1 << 20


@final
class FileHash:
    """Takes the bytes of a file in order; every part but the last must be of whole blocks."""

    def __init__(self) -> None:
        self._blocks = hashlib.sha256()
        self._is_ended = False

    def update(self, data: memoryview) -> None:
        assert not self._is_ended or not len(data), "a part before this one did not end with a block"
        for begin in range(0, len(data), BLOCK_BYTES):
            self._blocks.update(zlib.crc32(data[begin : begin + BLOCK_BYTES]).to_bytes(4, "little"))
        self._is_ended = len(data) % BLOCK_BYTES != 0

    def hexdigest(self) -> str:
        return self._blocks.hexdigest()


def hash_file(file: BinaryIO) -> str:
    """Of what is left to read of a file."""
    found, memory = FileHash(), memoryview(bytearray(BLOCK_BYTES))
    while count := _fill(file, memory):
        found.update(memory[:count])
    return found.hexdigest()


def _fill(file: BinaryIO, memory: memoryview) -> int:
    """Read as much as fits; less only at the end of the file."""
    filled = 0
    while filled < len(memory):
        count = file.readinto(memory[filled:])  # type: ignore[attr-defined]  # every binary file has it
        if not count:
            break
        filled += count
    return filled
