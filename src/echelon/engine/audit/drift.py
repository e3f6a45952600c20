"""Drift: copies of one weight on several ranks that are no longer the same.

Replicas update their copies by the same sums, and ranks along `tensor` theirs by gradients that each computes
for itself. A forward that draws at random by itself, in another way on each rank, makes them different, and
nothing else would show it.

    step        0        1   …   200      201   202
    device      numbers  ·       numbers  ·     ·        of all copies, compared over ranks
    host        reads    ·       ·        ·     reads    one number, which has long been there

The first step reads other things too, and a CPU has each number at once. Between these steps nothing is done.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.agreement import RankAgreement, device_fingerprint, gather_rows, measures, near
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.parallel.copies import Copies
from echelon.update.numbers import HostCopy


class _Compared(NamedTuple):
    """The numbers of one kind of copies, on the device: [ranks, tensors], and the number of each rank."""

    copies: Copies
    names: list[str]
    differs: Tensor
    ranks: Tensor


@final
class DriftCheck:
    """Compares copies after the first step, and after every `every` steps; never if that is 0."""

    def __init__(self, copies: Sequence[Copies], mesh: Mesh, every: int) -> None:
        self._copies, self._mesh, self._every = copies, mesh, every
        # All ranks take part, also one that has a copy of nothing: a stage without replicas beside one with.
        self._next_step: float = 0 if every and copies and mesh.plan.ranks > 1 else math.inf
        self._compared: list[_Compared] = []
        self._found: HostCopy | None = None
        self._step, self._is_first = 0, True

    def after_step(self, step: int) -> None:
        """Step number `step` is queued: compare what its update has left, if it is time. Raises, on every
        rank, if the first comparison finds a difference; `error` has what later ones find."""
        if step < self._next_step:
            return
        self._next_step, self._step = (step // self._every + 1) * self._every, step
        self._start()
        is_first, self._is_first = self._is_first, False
        error = self.error(before=step + 1) if is_first else None
        if error is not None:
            raise error

    def _start(self) -> None:
        self._compared = [each for copies in self._copies if (each := self._compare(copies)) is not None]
        device, everyone = self._mesh.device, self._mesh.group("all")
        found = torch.zeros(1, dtype=torch.float64, device=device)
        for each in self._compared:
            found += each.differs.any()
        with everyone.ledger.about("checks"):
            everyone.all_reduce(found)
        self._found = HostCopy(found)

    @torch.no_grad()
    def _compare(self, copies: Copies) -> _Compared | None:
        named = copies.named()
        if copies.group.size == 1 or not named:
            return None
        summary = device_fingerprint if copies.exact else measures
        summaries = [summary(tensor.to(self._mesh.device)) for _, tensor in named]  # some are on the host
        gathered = gather_rows(torch.stack(summaries), copies.group, "checks")
        if copies.exact:
            differs = (gathered != gathered[:1]).any(2)
        else:
            eps = max(torch.finfo(tensor.dtype).eps for _, tensor in named)
            differs = ~near(gathered, eps) & (gathered != gathered[:1]).any(2)
        rank = torch.full((1,), self._mesh.rank, device=self._mesh.device)
        ranks = gather_rows(rank, copies.group, "checks")
        return _Compared(copies, [name for name, _ in named], differs, ranks)

    def error(self, *, before: int) -> UserError | None:
        """Return what the last comparison has found, once, if its step was `before` this one; all ranks ask
        together. Waits for the device."""
        found, compared = self._found, self._compared
        if found is None or self._step >= before:
            return None
        self._found, self._compared = None, []
        if found.wait()[0] == 0:
            return None
        own = next((self._describe(each) for each in compared if bool(each.differs.any())), "")
        texts = RankAgreement(self._mesh.group("all"), self._mesh.device).gather(own)
        return UserError(next(text for text in texts if text))

    def _describe(self, compared: _Compared) -> str:
        differs, ranks = compared.differs.tolist(), compared.ranks.flatten().tolist()
        index = next(i for i in range(len(compared.names)) if any(row[i] for row in differs))
        others = [rank for rank, row in zip(ranks, differs, strict=True) if row[index]]
        number = sum(any(row[i] for row in differs) for i in range(len(compared.names)))
        more = f" (and {number - 1} more)" if number > 1 else ""
        return (
            f"after step {self._step + 1} rank {ranks[0]} and rank{'s' if others[1:] else ''} "
            f"{', '.join(map(str, others))} hold different values of {compared.names[index]}{more}, of "
            f"which each must have the same copy: {compared.copies.cause}; fix that, and start again from a "
            "checkpoint of before; check_every=1 finds the step"
        )
