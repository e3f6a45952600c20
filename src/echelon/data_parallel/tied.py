"""Parameters that other ranks hold too, as parts of other models: their gradients are summed with theirs.

The first and the last stage of a language model share the embedding. Each sums its gradient over its own
replicas; then both sum over each other, part by part, so that both make the same update. One of them counts
it in the norm of all gradients.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.data_parallel.sync import NOTHING, Storages, Sync
from echelon.ownership import Held, Owned, Slice


class Bond(NamedTuple):
    """A parameter, and the ranks that hold it elsewhere.

    `speaks`: whether this rank brings in its own model's gradient; its replicas would bring the same again.
    `counts`: whether this rank's model counts the parameter in norms.
    """

    parameter: nn.Parameter
    group: Group
    speaks: bool
    counts: bool


@final
class Tied(Sync):
    """As `inner`, with `bonds` to other models. `elsewhere`: more parameters that others count in norms."""

    def __init__(self, inner: Sync, bonds: Sequence[Bond], elsewhere: Set[nn.Parameter] = NOTHING) -> None:
        self._inner = inner
        self._bonds: dict[Group, list[Bond]] = {}  # in the order of their first, the same on all ranks
        for bond in bonds:
            self._bonds.setdefault(bond.group, []).append(bond)
        self.sharded, self.lockstep = inner.sharded, inner.lockstep
        self._counted_elsewhere = {bond.parameter for bond in bonds if not bond.counts} | elsewhere

    def finish_gradients(self) -> None:
        self._inner.finish_gradients()
        for group, bonds in self._bonds.items():  # what one group sums is one message
            with group.ledger.about("tied gradients"):
                _sum(self._inner.held(), bonds, group)

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        return self._inner.norm_share(without | self._counted_elsewhere)

    def parameters(self) -> list[nn.Parameter]:
        return self._inner.parameters()

    def held(self) -> list[Held]:
        return self._inner.held()

    def start_step(self) -> None:
        self._inner.start_step()

    def start_backward(self, *, last: bool) -> None:
        self._inner.start_backward(last=last)

    def finish_backward(self) -> None:
        self._inner.finish_backward()

    def finish_step(self) -> None:
        self._inner.finish_step()

    def owned(self) -> list[Owned]:
        return self._inner.owned()

    def slices(self, held: Held) -> list[Slice]:
        return self._inner.slices(held)

    def storages(self) -> Storages:
        return self._inner.storages()

    def renew(self) -> None:
        self._inner.renew()


def _sum(held: Sequence[Held], bonds: Sequence[Bond], group: Group) -> None:
    """Sum the gradients over the group. A rank that holds nothing of one (a server's worker) brings zeros."""
    mine = {bond.parameter: [its for its in held if its.parameter is bond.parameter] for bond in bonds}
    flags = [any(its.tensor.grad is not None for its in mine[bond.parameter]) for bond in bonds]
    used = torch.tensor(flags, dtype=torch.uint8, device=bonds[0].parameter.device)
    group.all_reduce(used, "max")
    told = zip(bonds, used.tolist(), strict=True)
    summed = [bond for bond, is_used in told if is_used]  # the others are left alone, as on one device
    gradients = [gradient for bond in summed for gradient in _gradients(bond, mine[bond.parameter])]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        _sum_flat([gradient for gradient in gradients if gradient.dtype == dtype], group)


def _gradients(bond: Bond, held: Sequence[Held]) -> list[Tensor]:
    """What this rank brings in, where the sum is to be."""
    for its in held:
        if its.tensor.grad is None:
            its.tensor.grad = torch.zeros_like(its.tensor)
        elif its.tensor.grad.is_sparse:
            its.tensor.grad = its.tensor.grad.to_dense()
        if not bond.speaks:
            its.tensor.grad.zero_()
    if not held:
        return [torch.zeros_like(bond.parameter, requires_grad=False)]
    return [its.tensor.grad for its in held if its.tensor.grad is not None]


def _sum_flat(gradients: Sequence[Tensor], group: Group) -> None:
    """In one message, unless there is just one gradient."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        group.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    group.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
