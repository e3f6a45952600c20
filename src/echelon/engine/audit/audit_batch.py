"""The samples that an audit compares: few, as different as the batch has them, cut as the plan cuts batches.

One device sees each of them once. The plan sees them as often as it has replicas and microbatches, one after
the other: the mean over repeated samples is the mean over the samples, if every one is repeated as often.

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
    new: Tensor | None,
    source: int,
    mesh: Mesh,
    agreement: RankAgreement,
    *,
    is_small: bool = True,
    repeats: bool = True,
) -> AuditBatch | None:
    """Choose the samples of an audit, on all ranks together; None where a replica has none. `source` is the
    replica that gives them, if it has enough; `new`: traits that were not compared yet. `is_small`: parts are
    smaller than microbatches. `repeats`: replicas may have the same samples, since none sees another's."""
    plan, samples = mesh.plan, num_samples(batch.pair)
    (least,) = agreement.least(samples)
    if least == 0:
        return None
    is_alone = plan.data == 1 or plan.sync == "async"
    replicas = 1 if is_alone else smallest_factor(plan.data) if repeats else plan.data
    parts = min(plan.microbatches, least)
    period = 1 if plan.updates_per_step > 1 else smallest_factor(parts)
    per_part = least // parts
    per_part = min(_PER_PART, per_part) if is_small else per_part
    share = period * per_part
    if is_alone:
        replicas, wholes = 1, [_choose(batch, traits, new, share)]
    elif least >= replicas * share:
        wholes = [_send(_choose(batch, traits, new, replicas * share), source, mesh, agreement)]
    else:
        own = _choose(batch, traits, new, share)
        wholes = [_send(own, replica, mesh, agreement) for replica in range(replicas)]
        if len({_form(each) for each in wholes}) > 1:  # they cannot be one batch
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
    """Copy these samples of a batch."""
    index = torch.tensor(numbers)
    return tree_map(lambda leaf: leaf[index.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, batch)


def _choose(batch: GivenBatch, traits: Tensor | None, new: Tensor | None, count: int) -> Any:
    if traits is None or new is None:
        return take(batch.given, range(min(count, num_samples(batch.pair))))
    return take(batch.given, most_different(traits, new, count))


def _joined(first: Any, *others: Any) -> Any:
    if not isinstance(first, Tensor):
        return first
    return torch.cat([first, *(other.to(first.device) for other in others)])


def _form(batch: Any) -> str:
    leaves, tree = tree_flatten(batch)
    shapes = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return f"{shapes} {tree}"


def _send(batch: Any, replica: int, mesh: Mesh, agreement: RankAgreement) -> Any:
    """Send the samples of a replica to every rank. What is no tensor stays this rank's own."""
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
# batch that shows a trait which no audited batch has shown. A trait is a column:
#
#     0 … 39     integer targets with this remainder by 40: rare classes are new for some time
#     40 … 42    zeros (False), negative numbers, NaNs
#     43         targets at least as large as the second dim of an input: positions past the end
#     44 … 46    whether there are other amounts of 40 … 42 than in the first sample
#
# Targets count, and integer and bool inputs (masks). Everything stays on the device of the tensors.

_CLASSES, NUM_TRAITS = 40, 47
_ZEROS, _NEGATIVES, _NANS, _PAST_END = range(_CLASSES, 44)
_FLAGS, _OTHER_AMOUNTS = slice(_ZEROS, _PAST_END), slice(44, NUM_TRAITS)
_LARGEST = 2**24  # elements of a tensor: a larger one is no target of a loss that counts


@torch.no_grad()
def sample_traits(batch: Any) -> Tensor | None:
    """Count the traits of each sample, [samples, traits]; None where no tensor counts."""
    inputs, targets = batch
    wide = max((leaf.shape[1] for leaf in _tensors(inputs) if leaf.dim() > 1), default=None)
    counts = [_count_traits(leaf, wide, is_target=True) for leaf in _tensors(targets)]
    counts += [_count_traits(leaf, None, is_target=False) for leaf in _tensors(inputs) if not _is_real(leaf)]
    if not counts:
        return None
    device = counts[0].device
    # To the host a copy must be waited for: it is read at once.
    return torch.stack([each.to(device, non_blocking=device.type != "cpu") for each in counts]).sum(0)


def shown_traits(traits: Tensor) -> Tensor:
    """Return which traits any sample has, [traits]."""
    return (traits > 0).any(0)


@torch.no_grad()
def shows_known(batch: Any, known: list[bool]) -> bool:
    """Return True where the smallest and the largest number of each tensor rule out that `sample_traits`
    shows another trait than the `known` ones. Where they do not, or are on a device, it may."""
    inputs, targets = batch
    wide = max((leaf.shape[1] for leaf in _tensors(inputs) if leaf.dim() > 1), default=None)
    counted = [leaf for leaf in _tensors(inputs) if not _is_real(leaf)]
    of_targets = all(_shows_known(leaf, wide, known, is_target=True) for leaf in _tensors(targets))
    return of_targets and all(_shows_known(leaf, None, known, is_target=False) for leaf in counted)


def _shows_known(leaf: Tensor, wide: int | None, known: list[bool], *, is_target: bool) -> bool:
    is_readable = leaf.is_cpu and leaf.layout == torch.strided and not leaf.is_complex()
    if not is_readable or leaf.dtype == torch.bool or not 0 < leaf.numel() <= _LARGEST:
        return False
    low, high = (each.item() for each in torch.aminmax(leaf))
    if not low <= high:  # not a number
        return False
    has_class = is_target and not leaf.is_floating_point()
    if low <= 0 <= high and not (known[_ZEROS] and known[_OTHER_AMOUNTS][0]):
        return False
    if low < 0 and not (known[_NEGATIVES] and known[_OTHER_AMOUNTS][1]):
        return False
    is_past_end = has_class and wide is not None and high >= wide
    if is_past_end and not known[_PAST_END]:
        return False
    is_short = low >= 0 and high < _CLASSES
    return not has_class or all(known[int(low) : int(high) + 1] if is_short else known[:_CLASSES])


def most_different(traits: Tensor, new: Tensor, count: int) -> list[int]:
    """Choose `count` samples, the first and the last in the order of how much they have of `new` traits, or
    else of zeros, negative numbers and NaNs: parts of them have different amounts. Among those of one amount
    samples with the same traits are next to each other."""
    wanted = new.clone()
    if not new.any():
        wanted[_FLAGS] = True
    wanted[_FLAGS] |= wanted[_OTHER_AMOUNTS]
    wanted[_OTHER_AMOUNTS] = False
    amounts, rows = traits[:, wanted].sum(1).tolist(), (traits > 0).flip(1).tolist()
    has_new: list[bool] = (traits[:, new] > 0).any(1).tolist()
    ordered = sorted(range(len(rows)), key=lambda number: (amounts[number], rows[number]))
    most = [number for number in reversed(ordered) if has_new[number]][: -(-count // 2)]
    left = [number for number in ordered if number not in most]
    chosen = most + left[: max(0, count - len(most))]
    return [number for number in ordered if number in chosen]


def _count_traits(leaf: Tensor, wide: int | None, *, is_target: bool) -> Tensor:
    counts = torch.zeros(len(leaf), NUM_TRAITS, dtype=torch.int64, device=leaf.device)
    if not 0 < leaf.numel() <= _LARGEST or leaf.is_complex() or leaf.layout != torch.strided:
        return counts
    values = leaf.reshape(len(leaf), -1)
    counts[:, _ZEROS] = (values == 0).sum(1)
    if values.dtype != torch.bool:
        counts[:, _NEGATIVES] = (values < 0).sum(1)
    if values.is_floating_point():
        counts[:, _NANS] = values.isnan().sum(1)
    counts[:, _OTHER_AMOUNTS] = counts[:, _FLAGS] != counts[0, _FLAGS]
    if is_target and not values.is_floating_point() and values.dtype != torch.bool:
        values = values.long()
        counts.scatter_add_(1, values % _CLASSES, torch.ones_like(values))
        if wide is not None and values.shape[1] < wide:
            counts[:, _PAST_END] = (values >= wide).sum(1)
    return counts


def _is_real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _tensors(structure: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(structure) if tensor.dim() > 0]
