"""The server's own queue of device work.

On a GPU each thread queues its work on the same stream unless it says otherwise, and the stream of a rank may
hold a collective that waits for a worker. If that worker waits for the server, the server must not queue
behind the collective.
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream


@final
class DeviceQueue:
    """A stream of its own on a GPU; on the CPU work is done when the call returns, and there is no queue."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _new_stream(device) if device.type == "cuda" else None
        with self.behind_caller():
            pass  # what the caller has queued so far may be what this queue will work on

    @contextmanager
    def behind_caller(self) -> Iterator[None]:
        """What is queued inside runs after the caller's work so far, and before the caller's later work."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def alone(self) -> AbstractContextManager[object]:
        """What is queued inside waits for nothing that the caller's stream holds."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has. torch hands out the same 32 again and again, to NCCL too."""
    if torch.version.hip is not None:
        return torch.cuda.Stream(device, priority=-1)  # those of NCCL have priority 0
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # starts CUDA in this thread
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(pointer), _NON_BLOCKING)
    if code != 0 or pointer.value is None:
        raise RuntimeError(f"CUDA made no stream on {device}: cuStreamCreate returned {code}")
    return torch.cuda.ExternalStream(pointer.value, device)
