"""Flags of which ranks want to know whether any of them has set each: used parameters, changed buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.collectives import Group


def set_anywhere(flags: Sequence[bool], group: Group, device: torch.device) -> Sequence[bool]:
    """Which of `flags` are set on any rank of the group; all ranks take part.

    To read the result is to wait for the device. A rank that has set all of them knows it without: so in most
    steps nobody waits.
    """
    on_device = _to_device(flags, device)
    group.all_reduce(on_device, "max")
    return flags if all(flags) else on_device.bool().tolist()


def _to_device(flags: Sequence[bool], device: torch.device) -> Tensor:
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    # From memory that is not pinned, a copy to a CUDA device waits for it.
    local = torch.tensor(flags, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return local.to(device, non_blocking=True)
