"""Flags of which ranks want to know whether any of them has set each: used parameters, changed buffers."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group


def set_anywhere(flags: Sequence[bool], group: Group, device: torch.device) -> Sequence[bool]:
    """Which of `flags` are set on any rank of the group; all ranks take part."""
    return FlagExchange(flags, group, device).wait()


@final
class FlagExchange:
    """Flags on their way to the other ranks.

    To read the result is to wait for the device. A rank that has set all of them knows it without: so in most
    steps nobody waits.
    """

    def __init__(self, flags: Sequence[bool], group: Group, device: torch.device) -> None:
        self._flags, self._on_device = flags, _to_device(flags, device)
        self._handle = group.all_reduce(self._on_device, "max", wait=False)

    def wait(self) -> Sequence[bool]:
        """Which flags are set on any rank."""
        self._handle.wait()
        return self._flags if all(self._flags) else self._on_device.bool().tolist()


def _to_device(flags: Sequence[bool], device: torch.device) -> Tensor:
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    # From memory that is not pinned, a copy to a CUDA device waits for it.
    local = torch.tensor(flags, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return local.to(device, non_blocking=True)
