"""Traits of samples: what may change how a loss or a forward treats them.

A loss that is a mean over what it counts (padding left out, classes weighted) adds up over parts of a batch
as long as all samples are alike. So the audit looks at samples that are as different as the batch has them,
and again at the first batch that shows a trait which no audited batch has shown. A trait is a bit:

    0 … 39    an integer target whose remainder by 40 this is: rare classes are new for some time
    40 … 47   a negative number, zero (False), NaN; other numbers of these than the first sample has; a number
              that is at least as large as the second dim of an input (a position past the end)

Targets are looked at, and integer and bool inputs (masks). Everything stays on the device of the tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_CLASSES = 40
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
    bits = torch.arange(_CLASSES + 8, device=traits.device)
    return (((traits[:, None] >> bits) & 1).amax(0) << bits).sum()


def most_different(traits: Tensor | None, count: int, samples: int, known: int = 0) -> list[int]:
    """`count` samples, those with traits that are not `known` first, then each the most unlike the others."""
    if traits is None or samples <= count:
        return list(range(min(count, samples)))
    rows: list[int] = traits.tolist()
    chosen: list[int] = []
    seen = known
    left = list(range(samples))
    while len(chosen) < count:
        best = max(
            left, key=lambda number: ((rows[number] & ~seen).bit_count(), _distance(rows, number, chosen))
        )
        chosen.append(best)
        left.remove(best)
        seen |= rows[best]
    return sorted(chosen)


def _distance(rows: Sequence[int], number: int, chosen: Sequence[int]) -> int:
    """How many bits tell a sample from the chosen one that is most like it."""
    return min(((rows[number] ^ rows[other]).bit_count() for other in chosen), default=0)


@torch.no_grad()
def _traits(leaf: Tensor, wide: int | None, *, is_target: bool) -> Tensor:
    if leaf.numel() == 0 or leaf.numel() > _LARGEST or leaf.is_complex() or leaf.layout != torch.strided:
        return torch.zeros(len(leaf), dtype=torch.int64, device=leaf.device)
    values = leaf.reshape(len(leaf), -1)
    flags = [values == 0]
    if values.dtype != torch.bool:
        flags.append(values < 0)
    if values.is_floating_point():
        flags.append(values.isnan())
    traits = torch.zeros(len(leaf), dtype=torch.int64, device=leaf.device)
    for place, flag in enumerate(flags):
        counts = flag.sum(1)
        traits |= (counts > 0).long() << (_CLASSES + 2 * place)
        traits |= (counts != counts[0]).long() << (_CLASSES + 2 * place + 1)
    is_class = not values.is_floating_point() and values.dtype != torch.bool
    if is_class and is_target:
        present = torch.zeros(len(leaf), _CLASSES, dtype=torch.int64, device=leaf.device)
        present.scatter_(1, values.long() % _CLASSES, 1)
        traits |= (present << torch.arange(_CLASSES, device=leaf.device)).sum(1)
        if wide is not None and values.shape[1] < wide:
            traits |= (values >= wide).any(1).long() << (_CLASSES + 7)
    return traits


def _is_real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor) and leaf.dim() > 0]
