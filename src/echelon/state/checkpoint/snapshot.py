"""A copy of what a rank writes, in host memory that is kept for the next one: training goes on behind it.

The memory holds the files as they will be, so that they are written from it without another copy. To ask the
system for it again would cost more than to fill it.

What the next step changes only at its end, when it updates, may be copied while that step computes:

    training    save | forward, backward                 | update
    now              | buffers                           |
    later            | weights, optimizer state          |      a thread, or a stream of the device

`Snapshot.wait` is called by the thread that writes the files, `before_changes` by the training, between its
backward pass and its update.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.state.checkpoint.part_writer import FileLayout, aligned_memory, as_bytes, round_up
from echelon.state.ownership import Slice

Later = Callable[[Slice], bool]


def nothing(_: Slice) -> bool:
    return False


class _Copy(NamedTuple):
    """One tensor, and where its bytes go."""

    name: str
    tensor: Tensor
    memory: Tensor
    version: int  # torch counts the changes of a tensor

    def make(self) -> None:
        self.memory.copy_(as_bytes(self.tensor), non_blocking=self.memory.is_pinned())

    @property
    def has_changed(self) -> bool:
        return self.tensor._version != self.version


@final
class SnapshotMemory:
    """Host memory for one snapshot, pinned for copies from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def take(
        self, layouts: Sequence[FileLayout], tensor_of: Callable[[Slice], Tensor], later: Later = nothing
    ) -> "Snapshot":
        """Copy the bytes of each file: now (on a GPU, before what it is told next), or `later`."""
        sizes = [round_up(layout.size) for layout in layouts]
        is_gpu = self._device.type == "cuda"
        if sum(sizes) > len(self._memory):
            self._memory = aligned_memory(sum(sizes), pinned=is_gpu)
        files = list(self._memory[: sum(sizes)].split(sizes))
        rest = []
        for layout, memory in zip(layouts, files, strict=True):
            memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            for box in layout.boxes:
                tensor = tensor_of(box.slice).detach()
                part = memory[box.begin : box.begin + box.nbytes]
                copy = _Copy(f"{box.slice.name} ({box.slice.part})", tensor, part, tensor._version)
                if later(box.slice):
                    rest.append(copy)
                else:
                    copy.make()
        return Snapshot(files, rest, self._copy_on_device(rest) if is_gpu else None, self._device)

    def _copy_on_device(self, rest: Sequence[_Copy]) -> torch.cuda.Event:
        """Copy on a stream of its own, beside what the device is told next. Returns an event after it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # The weights are those of the steps so far, which the current stream may still compute.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for copy in rest:
                if not copy.tensor.is_cpu:
                    copy.make()
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied


@final
class Snapshot:
    """The files of one save. `rest` is still to be copied: by an event of the device, or else by `wait`."""

    def __init__(
        self,
        files: Sequence[Tensor],
        rest: Sequence[_Copy],
        copied_on_device: torch.cuda.Event | None,
        device: torch.device,
    ) -> None:
        self.files, self._rest, self._copied_on_device, self._device = files, rest, copied_on_device, device
        self._is_host_copied = threading.Event()
        self._lock, self._is_compared = threading.Lock(), False
        self.changed: list[str] = []  # by something else than the engine's steps

    def wait(self) -> None:
        """Return when all is copied; called by the thread that writes."""
        try:
            for copy in self._rest:
                if copy.tensor.is_cpu:
                    copy.make()
        finally:
            self._is_host_copied.set()  # also after an error: the training waits for it before its update
        if self._copied_on_device is not None:
            self._copied_on_device.synchronize()
        self._compare()
        self._rest = ()  # the tensors of a step that is over are not kept alive

    def before_changes(self) -> None:
        """Make what the training does from now on come after the copies; called by the training."""
        self._compare()  # first: afterwards the update itself changes the tensors
        self._is_host_copied.wait()
        if self._copied_on_device is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied_on_device)

    def _compare(self) -> None:
        """Compare versions once, before the update: by the thread or by the training, whichever is first."""
        with self._lock:
            if not self._is_compared:
                self.changed = [copy.name for copy in self._rest if copy.has_changed]
                self._is_compared = True
