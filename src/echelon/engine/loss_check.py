"""Whether a loss adds up over the parts of a sequence.

With `context`, each rank computes the loss of its part of the positions, and the sum over ranks must be the
loss of the whole sequence.

The code of a loss cannot be read. So the ranks exchange a few positions of the first real output and its
targets, and every rank compares the loss of that short sequence with the losses of its parts:

    rank 0   chunk 0  ■ ■ · · ·   chunk 3  ■ ■ · · ·          ■ taken, · left out
    rank 1   chunk 1  ■ ■ · · ·   chunk 2  ■ ■ · · ·
    whole    ■ ■ ■ ■ ■ ■ ■ ■
"""

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.collectives import Group
from echelon.context_parallel import put_together
from echelon.engine.batch import Loss, num_samples, total_and_count
from echelon.errors import UserError
from echelon.targets import IGNORED_TARGET

_SAMPLES, _POSITIONS = 2, 2  # positions of each chunk; few, since a position may have 100,000 logits
_TOLERANCE = 1e-4  # relative; a loss may compute in float32

_FIX = (
    "return (total, count) of the targets that count; to predict the next token, shift targets before you "
    "pass the batch, not in the loss (output[:, :-1] against targets[:, 1:])"
)


@final
class LossCheck:
    """Checks `loss` once, for sequences that the ranks of `group` (along `context`) share."""

    def __init__(self, loss: Loss, group: Group) -> None:
        self._loss, self._group = loss, group
        self._done = self._has_count = self._has_ignored = False

    def check_targets(self, targets: Any) -> None:
        """Refuse targets without positions. `targets` are those of a microbatch, before they are split."""
        leaves = tree_leaves(targets)
        if not any(map(_has_positions, leaves)):
            raise UserError(
                f"context={self._group.size}: targets have no positions, [samples, sequence], so every rank "
                "would count all of them for its part of the sequence; give each position a target, or use "
                "context=1"
            )
        if not self._has_count and not self._has_ignored:
            self._has_ignored = any(map(_contains_ignored, leaves))

    def check_result(self, output: Any, targets: Any, result: Any) -> None:
        """Refuse a loss that does not add up, where it returned `result` for this rank's part.

        All ranks of the group call it together: the first time that it can tell, they exchange values.
        """
        self._has_count = isinstance(result, tuple)
        if not self._has_count and self._has_ignored:
            raise UserError(
                f"context={self._group.size}: the loss is a plain mean, and some targets are "
                f"{IGNORED_TARGET}: ranks leave out different numbers of them, and the mean of their means "
                f"is not the mean of all; {_FIX}"
            )
        if self._done:
            return
        if not _is_by_position(output, targets):
            self._done = True  # there is no way to take a few positions
            return
        parts = self._gather((output, targets))
        # Where all positions have one output (a head that starts at zero), a wrong mean shows no difference.
        if any(_varies(leaf) for part, _ in parts for leaf in tree_leaves(part)):
            self._done = True
            self._compare(parts)

    @torch.no_grad()
    def _gather(self, structure: Any) -> list[Any]:
        """A few positions of every rank's structure."""
        with self._group.ledger.about("checks"):
            gathered = tree_map(lambda leaf: _gather_few(leaf, self._group), structure)
        return [_part(gathered, rank) for rank in range(self._group.size)]

    @torch.no_grad()
    def _compare(self, parts: list[Any]) -> None:
        try:
            whole = self._total_and_count(_join(parts), ranks=1)
            by_rank = [self._total_and_count(part, ranks=len(parts)) for part in parts]
        except Exception:  # a loss that takes only the shapes of the model cannot be checked
            return
        total, count = (math.fsum(numbers) for numbers in zip(*by_rank, strict=True))
        if math.isfinite(whole[0]) and not (_is_near(whole[0], total) and _is_near(whole[1], count)):
            raise UserError(
                f"context={len(parts)}: the loss of a sequence is not the sum over its parts: total and "
                f"count of {_POSITIONS * 2} positions per rank are {whole[0]:.6g} and {whole[1]:g} together, "
                f"{total:.6g} and {count:g} as the sum over ranks; {_FIX}"
            )

    def _total_and_count(self, batch: tuple[Any, Any], ranks: int) -> tuple[float, float]:
        """As the engine counts: `ranks` ranks share the samples of a mean."""
        output, targets = batch
        result = self._loss(output, targets)
        total, count = total_and_count(result, num_samples(batch))
        share = 1 if isinstance(result, tuple) else ranks
        return float(total) / share, float(count) / share


def _gather_few(leaf: Any, group: Group) -> Any:
    """[ranks, samples, positions, …]: the first positions of both chunks of every rank, in float64."""
    if not isinstance(leaf, Tensor):
        return leaf
    few = leaf.detach()[:_SAMPLES]
    if few.ndim > 1:
        first, second = few.chunk(2, 1)
        few = torch.cat([first[:, :_POSITIONS], second[:, :_POSITIONS]], 1)
    # Integers and flags as int64, which every backend sends.
    few = few.to(torch.float64 if few.is_floating_point() else torch.int64).contiguous()
    gathered = few.new_empty(group.size, *few.shape)
    group.all_gather(gathered, few)
    return gathered if leaf.is_floating_point() else gathered.to(leaf.dtype)


def _part(gathered: Any, rank: int) -> Any:
    return tree_map(lambda leaf: leaf[rank] if isinstance(leaf, Tensor) else leaf, gathered)


def _join(parts: list[Any]) -> Any:
    """The parts of all ranks as one sequence, in order."""

    def join(*leaves: Any) -> Any:
        return put_together(leaves) if _has_positions(leaves[0]) else leaves[0]

    return tree_map(join, *parts)


def _is_by_position(output: Any, targets: Any) -> bool:
    """Whether the output has values for each position of the targets, and nothing else."""
    length = next(leaf.shape[1] for leaf in tree_leaves(targets) if _has_positions(leaf))
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(
        _has_positions(leaf) and leaf.shape[1] == length and not leaf.is_complex() for leaf in tensors
    )


def _varies(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and bool((leaf != leaf[:1, :1]).any())


def _has_positions(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 1


def _contains_ignored(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and bool((leaf == IGNORED_TARGET).any())


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
