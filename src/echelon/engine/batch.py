"""Batches and losses as the engine sees them: any structure of tensors whose first dim counts samples.

Cutting follows numpy's array_split: where samples do not divide evenly the first parts take one more, so
parts may differ by one, and may be empty.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import UserError

Batch = tuple[Any, Any]  # (inputs, targets)
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int]]


def num_samples(structure: Any) -> int:
    """How many samples a batch, or a part of one, holds."""
    sizes = {len(leaf) for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)}
    if len(sizes) != 1:
        raise UserError(
            "every tensor of a batch must have the same first dim, the samples; "
            f"got {sorted(sizes) or 'no tensor at all'}"
        )
    return sizes.pop()


def take_part(batch: Any, index: int, parts: int) -> Any:
    """Part `index` of `parts` of the samples, as views."""
    base, more = divmod(num_samples(batch), parts)
    begin = index * base + min(index, more)
    end = begin + base + (index < more)
    return tree_map(lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) else leaf, batch)


def split_microbatches(batch: Any, count: int) -> list[Any]:
    """The batch in at most `count` parts that hold samples."""
    return [take_part(batch, index, count) for index in range(min(count, num_samples(batch)))]


def to_device(structure: Any, device: torch.device) -> Any:
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, structure
    )


def total_and_count(result: Any, targets: Any) -> tuple[Tensor, Tensor | int]:
    """A loss as (total, count). A plain mean counts samples: it was taken over that many."""
    if isinstance(result, tuple):
        return result
    samples = num_samples(targets)
    return result * samples, samples
