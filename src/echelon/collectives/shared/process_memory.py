"""Read the memory of another process: one copy by the kernel, where a slot would need two."""

import ctypes
import os
import sys

_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h


class _IoVector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter's lock


def let_siblings_read() -> None:
    """Allow the other children of our parent, which are the ranks, to read this process.

    Yama (on Ubuntu, for example) forbids that by default.
    """
    if sys.platform == "linux" and os.getppid() > 1:  # under process 1 every process would be a sibling
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(process: int, address: int, destination: int, length: int) -> None:
    """Copy `length` bytes at `address` of `process` to `destination`, an address of this process."""
    num_copied = 0
    while num_copied < length:
        local = _IoVector(destination + num_copied, length - num_copied)
        remote = _IoVector(address + num_copied, length - num_copied)
        result = _libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if result <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        num_copied += result
