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
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.agreement import RankAgreement, device_fingerprint, gather_rows, measures, near
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.zero import Zero
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.split import Sharded
from echelon.update.numbers import HostCopy

Named = list[tuple[str, Tensor]]

_REPLICAS = (
    "replicas update their copies by the same numbers: something changes weights or buffers on one rank "
    "alone (a forward, a hook, or code between steps that runs on some ranks)"
)
_TENSOR = (
    "ranks along tensor compute their gradients alike: a forward draws at random by itself (torch.rand, "
    "F.dropout, a DropPath that is seeded by rank), or its input differs; let nn.Dropout draw, whose masks "
    "are the same on every rank, or draw from a torch.Generator with the same seed on all ranks"
)
_TIED = "stages update their copies of a tied weight by the same sums: something changes one of them alone"


class Copies(NamedTuple):
    """Tensors that the ranks of `group` hold alike, in one order; `cause`: what a difference comes from.

    `exact`: in every bit. Gradients that are computed twice on a CUDA device may differ by rounding, where
    threads add in any order.
    """

    named: Callable[[], Named]
    group: Group
    cause: str
    exact: bool = True


def find_copies(local: LocalStages, sharded: Sharded | None, mesh: Mesh) -> list[Copies]:
    """List what this rank holds a copy of. `sharded`: what ranks along `tensor` share, if there are any."""
    if mesh.plan.sync == "async":
        return []  # workers update at times of their own
    # Each rank along `tensor` has all of these.
    whole = set() if sharded is None else {*sharded.partial, *sharded.replicated}
    sharings = local.sharings
    replicas = [Copies(partial(_trained, sharing), _copies_of(sharing), _REPLICAS) for sharing in sharings]
    buffers = Copies(partial(_buffers, local.modules), mesh.group("weights"), _REPLICAS)
    is_exact = mesh.device.type == "cpu"
    tensor = Copies(partial(_whole, sharings, whole), mesh.group("tensor"), _TENSOR, exact=is_exact)
    return [*replicas, buffers, tensor, *_tied(sharings)]


def _held(sharing: Sharing) -> list[tuple[str, nn.Parameter, Tensor]]:
    """List what this rank updates of each trained parameter: all of it, or its part."""
    local = sharing.local_parameters()
    sharing.wait_for_weights(local)
    if isinstance(sharing, Zero):
        return [(each.name, each.parameter, sharing.stored_values(each)) for each in local]
    return [(name, parameter, parameter) for name, parameter in sharing.parameter_set.trained]


def _copies_of(sharing: Sharing) -> Group:
    """Return the ranks that hold what this one holds."""
    held = sharing.parameter_set
    return held.shard_groups.copies if isinstance(sharing, Zero) else held.group


def _trained(sharing: Sharing) -> Named:
    return [(name, tensor) for name, _, tensor in _held(sharing)]


def _whole(sharings: Sequence[Sharing], whole: Collection[nn.Parameter]) -> Named:
    held = [each for sharing in sharings for each in _held(sharing)]
    return [(name, tensor) for name, parameter, tensor in held if parameter in whole]


def _buffers(modules: Sequence[nn.Module]) -> Named:
    return [(name, buffer) for module in modules for name, buffer in module.named_buffers()]


def _tied(sharings: Sequence[Sharing]) -> list[Copies]:
    """List the weights that other stages hold too. All ranks go through them in one order."""
    shared = [(each, sharing) for sharing in sharings for each in sharing.parameter_set.shared_gradients]
    ties = sorted((pair for pair in shared if pair[0].tie is not None), key=lambda pair: pair[0].tie or 0)
    return [Copies(partial(_whole, [sharing], {tie.parameter}), tie.group, _TIED) for tie, sharing in ties]


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
