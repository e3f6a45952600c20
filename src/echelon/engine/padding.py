"""Sequences whose length is not divisible by the ranks that share them.

With `context`, a batch is padded at its end before ranks take their parts. With `sequence` alone, hidden
states are padded behind the first layer, where they are split. Padding repeats the last position, so that a
model computes nothing there that it would not compute elsewhere.

    sequence of 6, context=2      rank 0   0 1 · ·        rank 1   2 3 4 5        · padding

Attention is causal, so no true position sees the padding. The positions of a rank are in order, so its true
ones come first. The loss is given these alone.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.context_parallel import count_before
from echelon.errors import UserError
from echelon.plan import Plan


class LocalTargets(NamedTuple):
    """The targets of a rank's part of a microbatch, and which of its positions are no padding.

    `share`: the part of all true positions that is on this rank, by which a plain mean counts.
    """

    values: Any
    share: float
    num_true: int | None = None  # positions here that are no padding, the first ones; None: nothing is padded
    num_positions: int = 0  # here, with padding

    def true_values(self) -> Any:
        return self.values if self.num_true is None else _cut(self.values, self.num_true)

    def true_part(self, output: Any) -> Any:
        """What a model returned for the positions that are no padding."""
        if self.num_true is None:
            return output
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if any(leaf.ndim < 2 or leaf.shape[1] != self.num_positions for leaf in leaves):
            raise UserError(
                f"the model returned {[list(leaf.shape) for leaf in leaves]} for {self.num_positions} "
                f"positions, of which {self.num_positions - self.num_true} are padding: only an output of "
                "[samples, positions, …] can be cut for the loss; use sequences of a length that ranks share "
                "evenly"
            )
        return _cut(output, self.num_true)


class Padding:
    """How a plan pads sequences."""

    def __init__(self, plan: Plan, context_rank: int) -> None:
        self._plan, self._rank = plan, context_rank
        chunks = 2 * plan.context if plan.context > 1 else 1
        parts = plan.context * plan.tensor if plan.sequence else 1
        self._multiple = math.lcm(chunks, parts)

    def true_length(self, batch: Any) -> int | None:
        """The length of the sequences of a batch, if they are to be padded."""
        lengths: set[int] = {leaf.shape[1] for leaf in tree_leaves(batch) if has_positions(leaf)}
        if not any(length % self._multiple for length in lengths):
            return None
        if len(lengths) > 1:
            raise UserError(
                f"plan '{self._plan}': tensors of the batch have {sorted(lengths)} positions in dim 1, and "
                f"not all are divisible by {self._multiple}: which to pad is not clear; give all the same "
                f"length, or lengths that are multiples of {self._multiple}"
            )
        (length,) = lengths
        self._check_every_rank_has_some(length)
        return length

    def pad(self, structure: Any, length: int) -> Any:
        """All sequences, of `length`, padded; for `context`, which splits them at the start."""
        if self._plan.context == 1:
            return structure
        padded = self._padded(length)
        return tree_map(lambda leaf: pad_to(leaf, padded) if has_positions(leaf) else leaf, structure)

    def targets(self, values: Any, length: int | None) -> LocalTargets:
        """The targets of this rank's part; `length`: of the whole sequence, if it is padded."""
        if length is None:
            return LocalTargets(values, 1 / self._plan.context)
        num_true = self._num_true(length, self._rank)
        return LocalTargets(values, num_true / length, num_true, self._num_positions(length))

    def _num_true(self, length: int, rank: int) -> int:
        return count_before(length, self._num_positions(length), rank, self._plan.context)

    def _num_positions(self, length: int) -> int:
        return self._padded(length) // self._plan.context

    def _padded(self, length: int) -> int:
        return next_multiple(length, self._multiple)

    def _check_every_rank_has_some(self, length: int) -> None:
        if all(self._num_true(length, rank) for rank in range(self._plan.context)):
            return
        raise UserError(
            f"plan '{self._plan}': a sequence of {length} positions is too short: a rank would have only "
            f"padding; use sequences of at least {self._multiple} positions, or a smaller context"
        )


def next_multiple(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor


def has_positions(leaf: Any) -> bool:
    """Whether a leaf of a batch or an output is [samples, positions, …]."""
    return isinstance(leaf, Tensor) and leaf.ndim > 1


def pad_to(x: Tensor, length: int) -> Tensor:
    """`x` [samples, positions, …] with its last position repeated."""
    missing = length - x.shape[1]
    if missing == 0:
        return x
    return torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], 1)


def _cut(structure: Any, length: int) -> Any:
    return tree_map(lambda leaf: leaf[:, :length] if has_positions(leaf) else leaf, structure)
