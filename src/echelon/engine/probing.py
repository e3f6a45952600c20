"""Whether a loss adds up: with `context`, each rank has that of its part of the positions, and their sum must
be the loss of the whole sequence. A loss cannot be read, so it is tried once, beside the first output: on
some of the true targets, whole and in parts, with random numbers for what the model returns.
"""

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.context_parallel import take
from echelon.engine.batch import Loss, total_and_count
from echelon.errors import UserError

_IGNORED = -100
_SAMPLES, _POSITIONS = 2, 4  # of each rank; few, since a position may have 100,000 logits
_TOLERANCE = 1e-4  # of what a loss may compute in float32

_MEND = (
    "return (total, count) of the targets that count; to predict the next token, shift targets before the "
    "batch is given, and not in the loss (output[:, :-1] against targets[:, 1:])"
)


@final
class Probe:
    """Tries `loss` once, for sequences that `parts` ranks share."""

    def __init__(self, loss: Loss, parts: int) -> None:
        self._loss, self._parts = loss, parts
        self._targets: Any = None  # of some samples, whole
        self._done = self._ignored = False

    def keep(self, targets: Any) -> None:
        """The targets of a microbatch, before they are cut."""
        leaves = tree_leaves(targets)
        if not any(map(_has_positions, leaves)):
            raise UserError(
                f"context={self._parts}: targets have no positions, [samples, sequence], so every rank would "
                "count all of them for a part of the sequence; give each position a target, or use context=1"
            )
        self._ignored = self._ignored or any(map(_has_ignored, leaves))
        if self._targets is None and not self._done:
            self._targets = tree_map(lambda leaf: self._some(leaf) if _is_tensor(leaf) else leaf, targets)

    def judge(self, output: Any, targets: Any, result: Any) -> None:
        """Raise unless the loss of a whole is that of its parts; `output` shows what the model returns for
        the part `targets`, of which the loss has made `result`."""
        if not isinstance(result, tuple) and self._ignored:
            raise UserError(
                f"context={self._parts}: the loss is a plain mean, and some targets are {_IGNORED}: ranks "
                f"leave out different numbers of them, and a mean of means is not that of all; {_MEND}"
            )
        if self._done:
            return
        self._done, kept = True, self._targets
        self._targets = None
        length = next(leaf.shape[1] for leaf in tree_leaves(targets) if _has_positions(leaf))
        made = [leaf for leaf in tree_leaves(output) if _is_tensor(leaf)]
        if made and all(_has_positions(leaf) and leaf.shape[1] == length for leaf in made):
            self._compare(output, kept)

    @torch.no_grad()
    def _compare(self, output: Any, targets: Any) -> None:
        length = next(leaf.shape[1] for leaf in tree_leaves(targets) if _has_positions(leaf))
        samples = next(len(leaf) for leaf in tree_leaves(targets) if _is_tensor(leaf))
        random = torch.Generator().manual_seed(0)

        def drawn(leaf: Any) -> Any:
            if not _is_tensor(leaf) or not leaf.is_floating_point():
                return leaf
            shape = (samples, length, *leaf.shape[2:])
            return torch.randn(shape, dtype=torch.float64, generator=random).to(leaf.device)

        whole = tree_map(drawn, output), tree_map(lambda leaf: _moved(leaf, output), targets)
        try:
            one = self._value(whole, share=1)
            parts = [self._value(self._part(whole, rank), self._parts) for rank in range(self._parts)]
        except Exception:  # it takes nothing but a whole batch as it is: then it cannot be tried
            return
        several = [math.fsum(numbers) for numbers in zip(*parts, strict=True)]
        if math.isfinite(one[0]) and not all(map(_near, one, several)):
            raise UserError(
                f"context={self._parts}: the loss of a sequence is not that of its parts added up: total and "
                f"count are {one[0]:.6g} and {one[1]:g} of the whole, {several[0]:.6g} and {several[1]:g} of "
                f"each rank's positions by themselves; {_MEND}"
            )

    def _value(self, given: tuple[Any, Any], share: int) -> tuple[float, float]:
        """Total and count, as the engine counts: the samples of a mean are shared by so many ranks."""
        output, targets = given
        result = self._loss(output, targets)
        total, count = total_and_count(result, targets)
        share = 1 if isinstance(result, tuple) else share
        return float(total) / share, float(count) / share

    def _part(self, structure: Any, rank: int) -> Any:
        def cut(leaf: Any) -> Any:
            return take(leaf, rank, self._parts) if _has_positions(leaf) else leaf

        return tree_map(cut, structure)

    def _some(self, leaf: Tensor) -> Tensor:
        """Some samples, and of them some positions from everywhere in the sequence."""
        few = leaf[:_SAMPLES]
        if leaf.ndim < 2:
            return few
        count = min(few.shape[1], _POSITIONS * self._parts)
        return few[:, torch.arange(count, device=few.device) * few.shape[1] // count]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _has_positions(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 1


def _has_ignored(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and bool((leaf == _IGNORED).any())


def _moved(leaf: Any, output: Any) -> Any:
    device = next(its.device for its in tree_leaves(output) if _is_tensor(its))
    return leaf.to(device) if _is_tensor(leaf) else leaf


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
