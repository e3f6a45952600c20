"""The samples that an audit compares: few, as different as the batch has them, cut as the plan cuts batches.

One device sees each of them once. The plan sees them as often as it has replicas and microbatches, one after
the other: the mean over repeated samples is the mean over the samples, if every one is repeated as often.

    data=4 microbatches=2, samples a to d        replica 0   replica 1   replica 2   replica 3
    one device: a b c d                          a | b       c | d       a | b       c | d
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
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
    smaller than microbatches. `repeats`: several may have the same samples, which are not seen or counted
    together."""
    plan, samples = mesh.plan, num_samples(batch.pair)
    (least,) = agreement.least(samples)
    if least == 0:
        return None
    is_alone = plan.data == 1 or plan.sync == "async"
    replicas = 1 if is_alone else smallest_factor(plan.data) if repeats else plan.data
    parts = min(plan.microbatches, least)
    period = 1 if plan.updates_per_step > 1 else smallest_factor(parts) if repeats else parts
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
#     0 … 39     integer targets with this remainder by 40: rare classes are new for some time
#     40 …       20 columns for each tensor (the ninth shares those of the first):
#     0 … 2      zeros (False), negative numbers, numbers that are not finite
#     3          targets at least as large as the second dim of an input: positions past the end
#     4 … 7      whether there are other amounts of 0 … 2 than in the first sample, and another sum
#     8 … 19     whether the largest real number is 1/4, 1/2, 1, … 512 at least
# Of real inputs, negative numbers do not count. Everything stays on the device of the tensors.

_CLASSES, _SLOTS, _COLUMNS, _NUM_SIZES = 40, 8, 20, 12
NUM_TRAITS = _CLASSES + _SLOTS * _COLUMNS
_ZEROS, _NEGATIVES, _INFINITE, _PAST_END, *_OTHER_AMOUNTS, _OTHER_SUM, _SIZES = range(9)
_FEW = 256  # integers that Python looks at sooner than torch
_LARGEST, _LARGEST_REAL, _FAR = 2**24, 2**20, 2**62  # elements of masks and targets; the end of what has none


@torch.no_grad()
def sample_traits(batch: Any) -> Tensor | None:
    """Count for each sample how often it has each trait."""
    found = [_count_traits(*leaf) for leaf in _leaves(batch)]
    if not found:
        return None
    # To the host a copy must be waited for: it is read at once.
    found = [each.to(found[0].device, non_blocking=found[0].device.type != "cpu") for each in found]
    tables = [sum(found[slot + _SLOTS :: _SLOTS], found[slot]) for slot in range(min(len(found), _SLOTS))]
    classes = reduce(torch.add, [each[:, :_CLASSES] for each in tables])
    missing = classes.new_zeros(len(classes), (_SLOTS - len(tables)) * _COLUMNS)
    return torch.cat([classes, *(each[:, _CLASSES:] for each in tables), missing], 1)


@torch.no_grad()
def shows_known(batch: Any, known: list[bool]) -> bool:
    """Return True where a look at each tensor rules out that `sample_traits` shows another trait than the
    `known` ones. Where it does not, or would wait for a device, it may."""
    return all(_shows_known(known, place % _SLOTS, *leaf) for place, leaf in enumerate(_leaves(batch)))


def _shows_known(known: list[bool], slot: int, leaf: Tensor, wide: float, signs: bool, real: bool) -> bool:
    if not leaf.numel() or not leaf.is_cpu:
        return not leaf.numel()
    values = [] if real or leaf.numel() > _FEW else leaf.flatten().tolist()
    low, high = (min(values), max(values)) if values else (each.item() for each in torch.aminmax(leaf))
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    of_tensor = known[_CLASSES + slot * _COLUMNS :]
    shown = [_OTHER_SUM] * (low < high) + [_NEGATIVES, _OTHER_AMOUNTS[1]] * (signs and low < 0)
    shown += [_PAST_END] * (high >= wide)
    if low <= 0 <= high and not (of_tensor[_ZEROS] and of_tensor[_OTHER_AMOUNTS[0]]):
        shown += [_ZEROS, _OTHER_AMOUNTS[0]] * (int(leaf.count_nonzero()) < leaf.numel())
    num_sizes = min(math.frexp(max(-low, high))[1] + 2, _NUM_SIZES) if real else 0
    shown += [_SIZES + num_sizes - 1] * (num_sizes > 0)  # and so all smaller ones
    if not all(of_tensor[column] for column in shown):
        return False
    if wide == math.inf or all(known[:_CLASSES]):
        return True
    return all(known[each % _CLASSES] for each in values or (leaf % _CLASSES).unique().tolist())


def shown_traits(traits: Tensor) -> Tensor:
    """Return which traits any sample has, [traits]."""
    return (traits > 0).any(0)


def most_different(traits: Tensor, new: Tensor, count: int) -> list[int]:
    """Choose `count` samples, the first and the last in the order of how much they have of `new` traits, or
    else of zeros, negative numbers and such as are not finite: parts of them have different amounts. Among
    those of one amount samples with the same traits are next to each other."""
    wanted = new.clone()
    of_tensors, amounts = wanted[_CLASSES:].view(_SLOTS, _COLUMNS), slice(_OTHER_AMOUNTS[0], _OTHER_SUM)
    of_tensors[:, :_PAST_END] |= of_tensors[:, amounts] if new.any() else True
    of_tensors[:, amounts.start :] = False
    totals, rows = traits[:, wanted].sum(1).tolist(), (traits[:, wanted] > 0).flip(1).tolist()
    has_new: list[bool] = (traits[:, new] > 0).any(1).tolist()
    ordered = sorted(range(len(rows)), key=lambda number: (totals[number], rows[number]))
    most = [number for number in reversed(ordered) if has_new[number]][: -(-count // 2)]
    left = [number for number in ordered if number not in most]
    chosen = most + left[: max(0, count - len(most))]
    return [number for number in ordered if number in chosen]


def _leaves(batch: Any) -> list[tuple[Tensor, float, bool, bool]]:
    """List the tensors, empty if they have no traits; where the input ends, of targets that may be classes or
    positions, else infinity; whether signs count; whether they are real."""
    inputs, targets = ([leaf for leaf in tensors_of(part) if leaf.dim() > 0] for part in batch)
    wide = max((leaf.shape[1] for leaf in inputs if leaf.dim() > 1), default=_FAR)
    leaves: list[tuple[Tensor, float, bool, bool]] = []
    for leaf in (*targets, *inputs):
        is_target, is_real = len(leaves) < len(targets), leaf.is_floating_point()
        most = _LARGEST if is_target or not is_real else _LARGEST_REAL
        counts = leaf.numel() <= most and not leaf.is_complex() and leaf.layout == torch.strided
        signs = leaf.dtype != torch.bool and (is_target or not is_real)
        end: float = wide if leaf.numel() < len(leaf) * wide else _FAR
        end = end if is_target and signs and not is_real else math.inf
        leaves.append((leaf if counts else leaf.new_empty(len(leaf), 0), end, signs, is_real))
    return leaves


def _count_traits(leaf: Tensor, wide: float, signs: bool, real: bool) -> Tensor:
    """Return the columns of classes, and behind them those of the tensor."""
    classes = torch.zeros(len(leaf), _CLASSES, dtype=torch.int64, device=leaf.device)
    if not leaf.numel():
        return torch.cat([classes, classes[:, :_COLUMNS]], 1)
    values, nothing = leaf.reshape(len(leaf), -1), classes[:, 0]
    zeros, negatives = (values == 0).sum(1), (values < 0).sum(1) if signs else nothing
    past_end, infinite, sizes = nothing, nothing, classes[:, :_NUM_SIZES]
    if wide < math.inf:
        values = values.long()
        classes = classes.scatter_add(1, values % _CLASSES, torch.ones_like(values))
        past_end = (values >= wide).sum(1) if wide < _FAR else nothing
    if real:
        low, high = values.aminmax(dim=1, keepdim=True)
        sizes = torch.maximum(high, -low) >= torch.arange(-2, _NUM_SIZES - 2, device=leaf.device).exp2()
        infinite = (values - values != 0).sum(1)
    sums, counted = values.sum(1), torch.stack([zeros, negatives, infinite, past_end], 1)
    others = counted[:, :_PAST_END] != counted[0, :_PAST_END], (sums != sums[0]).unsqueeze(1)
    return torch.cat([classes, counted, *others, sizes], 1)
