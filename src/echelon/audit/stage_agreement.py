"""What the ranks of one stage decide together while they compare a layer."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from echelon.audit.texts import SUBJECT
from echelon.collectives import Group


class CannotCompareError(Exception):
    """Why a unit cannot be compared, on all ranks of a stage alike."""


@final
class StageAgreement:
    """All ranks of `group` ask the same questions in the same order."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.count([flag])[0] > 0

    def count(self, flags: list[bool]) -> list[float]:
        """How many ranks say so, for each of the flags."""
        counts = torch.tensor(list(map(float, flags)), device=self._device)
        if flags:
            add_over(counts, self._group)
        numbers: list[float] = counts.tolist()
        return numbers

    def refuse(self, reasons: Mapping[str, bool]) -> None:
        """Raise on every rank, with the first reason that any of them has."""
        counts = self.count(list(reasons.values()))
        for reason, count in zip(reasons, counts, strict=True):
            if count:
                raise CannotCompareError(reason)


def add_over(tensor: Tensor, group: Group) -> None:
    """The sum over the ranks of a group, in place."""
    if group.size > 1:
        with group.ledger.about(SUBJECT):
            group.all_reduce(tensor)
