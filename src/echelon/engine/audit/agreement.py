"""What ranks decide together in an audit: each sees a part, and all must go on, or stop, alike."""

import json
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.launching.group import check_on_every_rank


@final
class RankAgreement:
    """Among the ranks of a group; without one, this rank decides for itself."""

    def __init__(self, group: Group | None, device: torch.device) -> None:
        self.group, self._device = group, device

    @property
    def is_late(self) -> bool:
        """Return whether to read `largest` at once would wait for a device."""
        return self._device.type == "cuda"

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def least(self, *numbers: int) -> list[int]:
        """The smallest of each over all ranks."""
        if self.group is None:
            return list(numbers)
        negative = torch.tensor([-number for number in numbers], device=self._device)
        return [-int(number) for number in self.largest(negative).tolist()]

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of each over all ranks, on their device. Nothing is read there."""
        on_device = numbers.to(self._device, non_blocking=True)
        if self.group is not None:
            with self.group.ledger.about("checks"):
                self.group.all_reduce(on_device, "max")
        return on_device

    def any(self, *flags: bool) -> list[bool]:
        """Which flags are set on some rank."""
        return [number < 0 for number in self.least(*(-int(flag) for flag in flags))]

    def gather(self, value: object) -> list[Any]:
        """Every rank's plain values, in rank order; they travel as JSON."""
        if self.group is None:
            return [json.loads(json.dumps(value))]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self._device)
        longest = -self.least(-len(data))[0]
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = data
        gathered = padded.new_empty(self.group.size, longest)
        with self.group.ledger.about("checks"):
            self.group.all_gather(gathered, padded)
        return [json.loads(row.cpu().numpy().tobytes()) for row in gathered]

    def check(self, check: Callable[[], object]) -> None:
        """Raise, on every rank, the UserError that `check` raises on any."""
        if self.group is None:
            check()
        else:
            check_on_every_rank(check)
