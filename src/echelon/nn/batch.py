"""Batches and losses as the engine sees them: any structure of tensors whose first dim counts samples.

Cutting follows numpy's array_split: where samples do not divide evenly the first parts take one more, so
parts may differ by one, and may be empty.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.inputs import tensors_of

Batch = tuple[Any, Any]  # (inputs, targets)
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int]]


def num_samples(structure: Any) -> int:
    """How many samples a batch, or a part of one, holds."""
    sizes = {len(tensor) for tensor in tensors_of(structure)}
    if len(sizes) != 1:
        raise UserError(
            "every tensor of a batch must have the same first dim, the samples; "
            f"got {sorted(sizes) or 'no tensor at all'}"
        )
    return sizes.pop()


def part_bounds(samples: int, index: int, parts: int) -> tuple[int, int]:
    """Where part `index` of `parts` begins and ends."""
    base, more = divmod(samples, parts)
    begin = index * base + min(index, more)
    return begin, begin + base + (index < more)


def take_part(batch: Any, index: int, parts: int) -> Any:
    """Part `index` of `parts` of the samples, as views."""
    if parts == 1:
        return batch
    begin, end = part_bounds(num_samples(batch), index, parts)
    return tree_map(lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) else leaf, batch)


def microbatches(batch: Any, count: int, *, always: bool) -> list[tuple[Any, int]]:
    """The batch in at most `count` parts that hold samples, each with weight 1.

    `always`: exactly `count`, because ranks talk in every one of them. Where samples do not suffice, the
    rest are the first sample again, with weight 0.
    """
    samples = num_samples(batch)
    parts = [(take_part(batch, index, count), 1) for index in range(min(count, samples))]
    if always and len(parts) < count:
        if samples == 0:
            raise UserError(
                "a replica has no sample in this batch, and in a pipeline, with zero=2 or 3, with batch "
                "norm, and with a schedule from a file every replica takes part in every microbatch; give "
                "each replica at least one sample"
            )
        parts += [(take_part(batch, 0, samples), 0)] * (count - len(parts))
    return parts


def cast(structure: Any, dtype: torch.dtype) -> Any:
    """The same structure, with tensors of real numbers in `dtype`."""

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return convert(structure) if type(structure) is Tensor else tree_map(convert, structure)


def total_and_count(result: Any, samples: int) -> tuple[Tensor, Tensor | int]:
    """A loss of so many samples as (total, count). A plain mean counts them: it was taken over that many.

    The total is float32 at least: a sum over samples, times a loss scale, is more than fp16 holds.
    """
    if isinstance(result, tuple):
        return _in_float32(result[0]), result[1]
    return _in_float32(result) * samples, samples


def _in_float32(total: Tensor) -> Tensor:
    return total.to(torch.promote_types(total.dtype, torch.float32))
