"""Reading the memory of another process."""

import ctypes
import mmap
import os

import pytest

from echelon.collectives.shared.process_memory import let_siblings_read, read_memory


def test_bytes_of_this_process_can_be_read() -> None:
    source = ctypes.create_string_buffer(bytes(range(100)), 100)
    destination = ctypes.create_string_buffer(100)
    let_siblings_read()
    read_memory(os.getpid(), ctypes.addressof(source) + 10, ctypes.addressof(destination), 50)
    assert destination.raw == bytes(range(10, 60)) + bytes(50)


def test_memory_that_is_not_readable_is_an_error() -> None:
    """Also where only its second half is not: a part that was read does not count."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    destination = ctypes.create_string_buffer(2 * mmap.PAGESIZE)
    read_memory(os.getpid(), address, ctypes.addressof(destination), mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), address, ctypes.addressof(destination), 2 * mmap.PAGESIZE)


def test_a_process_that_ended_is_an_error() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    buffer = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessLookupError):
        read_memory(child, ctypes.addressof(buffer), ctypes.addressof(buffer), 8)
