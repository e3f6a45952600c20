"""Traits of samples: what may change how a loss or a forward treats them.

A loss that is a mean over what it counts (padding left out, classes weighted) adds up over parts of a batch
as long as all samples are alike. So the audit looks at samples that are as different as the batch has them,
and again at the first batch that shows a trait which no audited batch has shown. A trait is a bit:

    0 … 39    an integer target whose remainder by 40 this is: rare classes are new for some time
    40 … 47   zero (False), a negative number, NaN; other numbers of these than the first sample has; a number
              that is at least as large as the second dim of an input (a position past the end)

Targets are looked at, and integer and bool inputs (masks). Everything stays on the device of the tensors.
"""

from typing import Any

import torch
from torch import Tensor

from echelon.nn.batch import num_samples, tensors_of

_CLASSES = 40
_FLAGS = 0b111111 << _CLASSES
_LARGEST = 2**24  # elements of a tensor: a larger one is no target of a loss that counts


def sample_traits(batch: Any) -> Tensor | None:
    """The traits of each sample, [samples] of int64; None where there is nothing to look at."""
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
