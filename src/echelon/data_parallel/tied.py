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
    """As `inner`, with `bonds` to other models."""

    def __init__(self, inner: Sync, bonds: Sequence[Bond]) -> None:
        self._inner, self._bonds = inner, list(bonds)
        self.sharded, self.lockstep = inner.sharded, inner.lockstep
        self._counted_elsewhere = {bond.parameter for bond in bonds if not bond.counts}

    def finish_gradients(self) -> None:
        self._inner.finish_gradients()
        for bond in self._bonds:
            held = [held for held in self._inner.held() if held.parameter is bond.parameter]
            with bond.group.ledger.about("tied gradients"):
                _sum(held, bond)

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

    def gather(self, *, backward: bool) -> None:
        self._inner.gather(backward=backward)

    def free(self) -> None:
        self._inner.free()

    def renew(self) -> None:
        self._inner.renew()


def _sum(held: Sequence[Held], bond: Bond) -> None:
    """Sum the gradient over the group. A rank that holds nothing of it (a server's worker) brings zeros."""
    used = torch.tensor([any(its.tensor.grad is not None for its in held)], dtype=torch.uint8)
    used = used.to(bond.parameter.device)
    bond.group.all_reduce(used, "max")
    if not used.item():
        return  # as on one device: the optimizer leaves it alone
    if not held:
        bond.group.all_reduce(torch.zeros_like(bond.parameter, requires_grad=False))
    for its in held:
        if its.tensor.grad is None:
            its.tensor.grad = torch.zeros_like(its.tensor)
        elif its.tensor.grad.is_sparse:
            its.tensor.grad = its.tensor.grad.to_dense()
        if not bond.speaks:
            its.tensor.grad.zero_()
        bond.group.all_reduce(its.tensor.grad)
