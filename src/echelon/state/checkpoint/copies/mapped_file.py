"""A file on a RAM disk as a tensor of bytes: to fill the tensor is to write the file."""

import errno
import mmap
import os
from pathlib import Path
from typing import final

import torch

from echelon.errors import UserError
from echelon.quantities import show_bytes
from echelon.state.checkpoint.copies.folder import VARIABLE


@final
class MappedFile:
    """One that is there with the same size is written again: to ask for new memory would cost more."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        try:
            descriptor = _open(path, size)
        except OSError as error:
            raise _explained(path, size, error) from error
        try:
            self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)


def _open(path: Path, size: int) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        if os.fstat(descriptor).st_size == size:
            return descriptor
        os.close(descriptor)
        path.unlink()
    except FileNotFoundError:
        pass
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # without it, a full RAM disk would end the process
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _explained(path: Path, size: int, error: OSError) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(
            f"keep='memory': {path.parent} has no room for the {show_bytes(size)} of {path.name}; make that "
            f"RAM disk larger (mount -o remount,size=…), set {VARIABLE} to another, or keep=2 for "
            "checkpoints on disk"
        )
    return UserError(f"keep='memory': {path} cannot be written: {error.strerror or error}")
