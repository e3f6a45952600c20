"""The samples that an audit compares: few, as different as the batch has them, cut as the plan cuts batches.

One device sees each of them once. The plan sees them as often as it has replicas and microbatches, in turn:
the mean over repeated samples is the mean over the samples, if every one is repeated as often.

    data=4 microbatches=2, samples a to d        replica 0   replica 1   replica 2   replica 3
    one device: a b c d                          a | b       c | d       a | b       c | d
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from echelon.collectives.mesh import Mesh
from echelon.engine.audit.agreement import RankAgreement
from echelon.engine.audit.batch_traits import most_different
from echelon.nn.batch import Batch, num_samples

_PER_PART = 2  # samples of a microbatch, if it has so many: a model may treat one sample differently


class GivenBatch(NamedTuple):
    """A batch as the user gave it, whose form is the same on all ranks, and as (inputs, targets), whose form
    may depend on its values: a mask of nothing is left out."""

    given: Any
    pair: Batch
    read: Callable[[Any], Batch]


class AuditBatch(NamedTuple):
    """`whole` is what one device sees, on every rank; `local` what this replica does. A part is what a
    microbatch holds: `places` says where in the whole each of this replica's parts begins."""

    whole: Any
    local: Any
    places: list[int]
    per_part: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The parts of the whole."""
        samples = num_samples(self.whole)
        return [(begin, begin + self.per_part) for begin in range(0, samples, self.per_part)]

    def part(self, number: int) -> Any:
        return take(self.whole, range(*self.bounds[number]))


def choose_samples(
    batch: GivenBatch,
    traits: Tensor | None,
    known: int,
    source: int,
    mesh: Mesh,
    agreement: RankAgreement,
    *,
    is_small: bool = True,
) -> AuditBatch | None:
    """The samples of an audit, on all ranks together; None where a replica has none. `source` is the replica
    that gives them, if it has enough; `known`: traits that were compared already. `is_small`: parts are
    smaller than microbatches."""
    plan, samples = mesh.plan, num_samples(batch.pair)
    (least,) = agreement.least(samples)
    if least == 0:
        return None
    is_alone = plan.data == 1 or plan.sync == "async"
    replicas = 1 if is_alone else smallest_factor(plan.data)
    parts = min(plan.microbatches, least)
    period = 1 if plan.updates_per_step > 1 else smallest_factor(parts)
    per_part = least // parts
    per_part = min(_PER_PART, per_part) if is_small else per_part
    share = period * per_part
    if is_alone:
        replicas, wholes = 1, [_choose(batch, traits, share, known)]
    elif least >= replicas * share:
        wholes = [_send(_choose(batch, traits, replicas * share, known), source, mesh, agreement)]
    else:
        own = _choose(batch, traits, share, known)
        wholes = [_send(own, replica, mesh, agreement) for replica in range(replicas)]
        if len({_form(each) for each in wholes}) > 1:  # nobody can put them into one batch
            replicas, wholes = 1, wholes[:1]
    whole = wholes[0] if len(wholes) == 1 else tree_map(_joined, *wholes)
    first = 0 if is_alone else mesh.position.replica % replicas * share
    places = [first + part % period * per_part for part in range(parts)]
    numbers = [place + offset for place in places for offset in range(per_part)]
    return AuditBatch(batch.read(whole), batch.read(take(whole, numbers)), places, per_part)


def smallest_factor(number: int) -> int:
    """smallest_factor(12) == 2, smallest_factor(1) == 1."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


def take(batch: Any, numbers: Sequence[int]) -> Any:
    """These samples of a batch; copies."""
    index = torch.tensor(numbers)
    return tree_map(lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, batch)


def _choose(batch: GivenBatch, traits: Tensor | None, count: int, known: int) -> Any:
    return take(batch.given, most_different(batch.pair, traits, count, known))


def _joined(first: Any, *others: Any) -> Any:
    if not isinstance(first, Tensor):
        return first
    return torch.cat([first, *(other.to(first.device) for other in others)])


def _form(batch: Any) -> str:
    leaves, tree = tree_flatten(batch)
    shapes = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return f"{shapes} {tree}"


def _send(batch: Any, replica: int, mesh: Mesh, agreement: RankAgreement) -> Any:
    """The samples of a replica, on every rank. What is no tensor stays this rank's own."""
    leaves, tree = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    forms = agreement.gather(
        [[list(t.shape), str(t.dtype).removeprefix("torch."), t.is_cuda] for t in tensors]
    )
    group = mesh.group("all")
    sender = next(rank for rank in range(group.size) if mesh.layout.position(rank).replica == replica)
    received = []
    with group.ledger.about("checks"):
        for number, (shape, name, is_cuda) in enumerate(forms[sender]):
            dtype = getattr(torch, name)
            data = torch.empty(shape, dtype=dtype, device=mesh.device)
            if mesh.rank == sender:
                data.copy_(tensors[number].detach())
            if data.numel():
                group.broadcast(data.view(-1).view(torch.uint8), sender)
            received.append(data if is_cuda else data.cpu())
    values = iter(received)
    return tree_unflatten([next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
