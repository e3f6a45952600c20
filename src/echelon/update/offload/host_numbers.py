"""The factor of an update's gradients, and whether the update is skipped, read by the thread that updates.

Both may be results on a device. To read them in the thread of the step would stop it until the backward pass
is done; a copy is under way instead, and the other thread waits for that.
"""

from typing import final

import torch
from torch import Tensor

from echelon.update.precision.optimizer_call import Factor, Skip


@final
class HostNumbers:
    """Factor and skip flag of one update."""

    def __init__(self, factor: Factor, skip: Skip) -> None:
        self._copied: torch.cuda.Event | None = None
        on_device = next((each for each in (factor, skip) if isinstance(each, Tensor) and each.is_cuda), None)
        if on_device is None:
            self._values = torch.tensor([float(factor), float(skip)], dtype=torch.float64)
            return
        rows = [
            each.detach().double().reshape(())
            if isinstance(each, Tensor)
            else on_device.new_full((), each, dtype=torch.float64)
            for each in (factor, skip)
        ]
        self._values = torch.empty(2, dtype=torch.float64, pin_memory=True)
        self._values.copy_(torch.stack(rows), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> tuple[float, bool]:
        """Waits for the device. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()
        factor, skip = self._values.tolist()
        return factor, bool(skip)
