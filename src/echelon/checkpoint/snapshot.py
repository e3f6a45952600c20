"""A copy of what a rank writes, in host memory that is kept for the next one: training goes on behind it.

The memory holds the files as they will be, so that they are written from it without another copy. To ask the
system for it again would cost more than to fill it.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.checkpoint.direct_file import aligned_memory, round_up
from echelon.checkpoint.file_image import FileImage, FileLayout
from echelon.ownership import Slice


@final
class SnapshotMemory:
    """Host memory for one snapshot, pinned for copies from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def take(self, layouts: Sequence[FileLayout], tensor_of: Callable[[Slice], Tensor]) -> list[Tensor]:
        """The bytes of each file. On a GPU they are there after `wait`, and what the device does from now on
        comes after the copies."""
        sizes = [round_up(layout.size) for layout in layouts]
        if sum(sizes) > len(self._memory):
            self._memory = aligned_memory(sum(sizes), pinned=self._device.type == "cuda")
        files = list(self._memory[: sum(sizes)].split(sizes))
        for layout, memory in zip(layouts, files, strict=True):
            FileImage(layout, tensor_of).fill(0, memory[: layout.size])
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))
        return files

    def wait(self) -> None:
        """Until the copies are made; in the thread that writes them."""
        if self._copied is not None:
            self._copied.synchronize()
