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

from echelon.collectives.agreement import RankAgreement
from echelon.collectives.mesh import Mesh
from echelon.nn.batch import Batch, num_samples, tensors_of

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


# Traits of samples: what may change how a loss or a forward treats them. A loss that is a mean over what it
# counts (padding left out, classes weighted) adds up over parts of a batch as long as all samples are alike.
# So the audit takes samples that are as different as the batch has them, and compares again at the first
# batch that shows a trait which no audited batch has shown. A trait is a bit:
#
#     0 … 39    an integer target whose remainder by 40 this is: rare classes are new for some time
#     40 … 47   zero (False), a negative number, NaN; other numbers of these than the first sample has; a
#               number that is at least as large as the second dim of an input (a position past the end)
#
# Targets count, and integer and bool inputs (masks). Everything stays on the device of the tensors.

_CLASSES = 40
_FLAGS = 0b111111 << _CLASSES
_LARGEST = 2**24  # elements of a tensor: a larger one is no target of a loss that counts


def sample_traits(batch: Any) -> Tensor | None:
    """The traits of each sample, [samples] of int64; None where there is no tensor that counts."""
    inputs, targets = batch
    wide = max((leaf.shape[1] for leaf in _tensors(inputs) if leaf.dim() > 1), default=None)
    rows = [_traits(leaf, wide, is_target=True) for leaf in _tensors(targets)]
    rows += [_traits(leaf, None, is_target=False) for leaf in _tensors(inputs) if not _is_real(leaf)]
    rows = [row.to(rows[0].device, non_blocking=True) for row in rows]
    if not rows:
        return None
    traits = rows[0]
    for row in rows[1:]:
        traits = traits | row
    return traits


def union(traits: Tensor) -> Tensor:
    """The bits that any sample has."""
    if not len(traits):
        return traits.new_zeros(())
    bits = torch.arange(_CLASSES + 8, device=traits.device)
    return (((traits[:, None] >> bits) & 1).amax(0) << bits).sum()


def most_different(batch: Any, traits: Tensor | None, count: int, known: int = 0) -> list[int]:
    """`count` samples, in the order of how much they have of traits that are not `known`, or of zeros,
    negative numbers and NaNs: the first and the last. Parts of them have different amounts."""
    if traits is None:
        return list(range(min(count, num_samples(batch))))
    rows: list[int] = traits.tolist()
    new = int(union(traits)) & ~known
    amounts = _amounts(batch, new or _FLAGS)
    ordered = sorted(range(len(rows)), key=lambda number: (amounts[number], rows[number]))
    most = [number for number in reversed(ordered) if rows[number] & new][: -(-count // 2)]
    left = [number for number in ordered if number not in most]
    chosen = most + left[: max(0, count - len(most))]
    return [number for number in ordered if number in chosen]


@torch.no_grad()
def _amounts(batch: Any, wanted: int) -> list[int]:
    """How many numbers of each sample have one of the `wanted` traits."""
    inputs, targets = batch
    leaves = [*_tensors(targets), *(leaf for leaf in _tensors(inputs) if not _is_real(leaf))]
    amounts = [0] * num_samples(batch)
    for leaf in leaves:
        if not _is_seen(leaf):
            continue
        values = leaf.reshape(len(leaf), -1)
        counts = sum(
            flag.sum(1) for place, flag in enumerate(_flags(values)) if wanted >> (_CLASSES + 2 * place) & 3
        )
        if _has_classes(values):
            table = torch.tensor([wanted >> bucket & 1 for bucket in range(_CLASSES)], device=leaf.device)
            counts = counts + table[values.long() % _CLASSES].sum(1)
        if isinstance(counts, Tensor):
            amounts = [one + other for one, other in zip(amounts, counts.tolist(), strict=True)]
    return amounts


@torch.no_grad()
def _traits(leaf: Tensor, wide: int | None, *, is_target: bool) -> Tensor:
    traits = torch.zeros(len(leaf), dtype=torch.int64, device=leaf.device)
    if not _is_seen(leaf):
        return traits
    values = leaf.reshape(len(leaf), -1)
    for place, flag in enumerate(_flags(values)):
        counts = flag.sum(1)
        traits |= (counts > 0).long() << (_CLASSES + 2 * place)
        traits |= (counts != counts[0]).long() << (_CLASSES + 2 * place + 1)
    if is_target and _has_classes(values):
        present = torch.zeros(len(leaf), _CLASSES, dtype=torch.int64, device=leaf.device)
        present.scatter_(1, values.long() % _CLASSES, 1)
        traits |= (present << torch.arange(_CLASSES, device=leaf.device)).sum(1)
        if wide is not None and values.shape[1] < wide:
            traits |= (values >= wide).any(1).long() << (_CLASSES + 7)
    return traits


def _flags(values: Tensor) -> list[Tensor]:
    """Which numbers are zero, negative, not a number."""
    flags = [values == 0]
    if values.dtype != torch.bool:
        flags.append(values < 0)
    if values.is_floating_point():
        flags.append(values.isnan())
    return flags


def _has_classes(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype != torch.bool


def _is_seen(leaf: Tensor) -> bool:
    return 0 < leaf.numel() <= _LARGEST and not leaf.is_complex() and leaf.layout == torch.strided


def _is_real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _tensors(structure: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(structure) if tensor.dim() > 0]
