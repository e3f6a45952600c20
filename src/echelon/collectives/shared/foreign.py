"""Reading the memory of another process: one copy by the kernel, where a slot would need two."""

import ctypes
import os
import sys

_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter's lock


def let_siblings_read() -> None:
    """Where Yama keeps processes apart (Ubuntu does), allow those of our parent, which are the ranks."""
    if sys.platform == "linux" and os.getppid() > 1:  # under process 1 everyone would be a sibling
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(process: int, address: int, into: int, length: int) -> None:
    """Copy `length` bytes that `process` has at `address` to `into`, an address of this process."""
    done = 0
    while done < length:
        here = _Vector(into + done, length - done)
        there = _Vector(address + done, length - done)
        got = _libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += got
