"""The stream of a step: in its order a trip's memory is taken, copied and let go, whoever asks.

What autograd saved may be freed by any thread, under any current stream: by the garbage collector, or by
somebody who held a loss. A wait under that stream would let the step's own work run into memory of a copy
that is under way.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor


@final
class StepOrder:
    """That of the step that runs: the current stream of its device. Without a GPU all is in one order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        """What the device is given inside comes in this order."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def lend(self, memory: Tensor) -> None:
        """The current stream uses memory of this order, as it is now."""
        if self._stream is not None:
            current = torch.cuda.current_stream(memory.device)
            if current != self._stream:
                current.wait_stream(self._stream)
                memory.record_stream(current)
