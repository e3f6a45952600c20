"""Sequences whose length is not divisible by the ranks that share them are padded at their end.

Batches (`context`) are padded before ranks take their parts. Padding repeats the last position, so that a
model computes nothing there that it would not compute elsewhere.

    sequence of 6, context=2      rank 0   0 1 · ·        rank 1   2 3 4 5        · padding

Attention is causal, so no true position sees the padding. The positions of a rank are in order, so its true
ones come first. The loss is given these alone.

Hidden states (`sequence`) are padded behind the first layer, which sees whole sequences: how many positions
it returns, it alone says (one more than there are tokens, or one for each patch of an image).

    tokens ── first layer ── 7 positions ── pad ── 8, split over ranks ── … ── last layer ── cut ── loss

A stage passes the true length on to the next one, which cannot know it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.collectives.buffer_layout import round_up
from echelon.errors import UserError
from echelon.nn.batch import tensors_of
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.context import count_before
from echelon.parallel.sequence_checks import check_gate_padding, check_weight_masks
from echelon.plan import Plan


class LocalTargets(NamedTuple):
    """The targets of a rank's part of a microbatch, and which of its positions are no padding. `share`: the
    part of all true positions that is on this rank, by which a plain mean counts."""

    values: Any
    share: float
    num_samples: int
    num_true: int | None = None  # positions here that are no padding, the first ones; None: nothing is padded
    num_positions: int = 0  # here, with padding

    def without_padding(self, output: Any, *, ignores: bool) -> tuple[Any, Any]:
        """Return output and targets of the positions that are no padding; see `true_pair`."""
        if self.num_true is None:
            return output, self.values
        targets = _cut(self.values, self.num_true)
        return true_pair(output, targets, self.num_true, self.num_positions, ignores=ignores)


def true_pair(
    output: Any, targets: Any, num_true: int, num_positions: int, *, ignores: bool
) -> tuple[Any, Any]:
    """An output of `num_positions` positions and targets of the true ones, as a loss takes them. A loss that
    `ignores` targets gets the whole (large) output with such targets; any other a cut output."""
    _check_positions(output, num_true, num_positions)
    if ignores and isinstance(targets, Tensor) and targets.shape[1:] == (num_true,):
        return output, F.pad(targets, (0, num_positions - num_true), value=IGNORED_TARGET)
    return _cut(output, num_true), targets


def _check_positions(output: Any, num_true: int, num_positions: int) -> None:
    """Refuse an output from which padding cannot be cut."""
    leaves = tensors_of(output)
    if leaves and all(leaf.ndim > 1 and leaf.shape[1] == num_positions for leaf in leaves):
        return
    found = [list(leaf.shape) for leaf in leaves] or f"a {type(output).__name__} without known tensors"
    raise UserError(
        f"the model returned {found} for {num_positions} positions, of which {num_positions - num_true} are "
        "padding: only an output of [samples, positions, …] can be cut for the loss; use sequences of a "
        "length that ranks share evenly"
    )


class Padding:
    def __init__(self, plan: Plan, context_rank: int) -> None:
        self._plan, self._rank = plan, context_rank
        parts = plan.context * plan.tensor if plan.sequence else 1
        self._multiple = math.lcm(2 * plan.context, parts)

    def true_length(self, batch: tuple[Any, Any]) -> int | None:
        """The length of the sequences of a batch, if they are to be padded."""
        if self._plan.context == 1:
            return None
        self._check_sequences(batch[0])
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
        """All sequences, of `length`, padded."""
        padded = self._padded(length)
        return tree_map(lambda leaf: pad_to(leaf, padded) if has_positions(leaf) else leaf, structure)

    def targets(self, values: Any, length: int | None, num_samples: int) -> LocalTargets:
        """The targets of this rank's part; `length`: of the whole sequence, if it is padded."""
        if length is None:
            return LocalTargets(values, 1 / self._plan.context, num_samples)
        num_true = self._num_true(length, self._rank)
        return LocalTargets(values, num_true / length, num_samples, num_true, self._num_positions(length))

    def _num_true(self, length: int, rank: int) -> int:
        return count_before(length, self._num_positions(length), rank, self._plan.context)

    def _num_positions(self, length: int) -> int:
        return self._padded(length) // self._plan.context

    def _padded(self, length: int) -> int:
        return round_up(length, self._multiple)

    def _check_sequences(self, inputs: Any) -> None:
        """Refuse a batch of vectors, whose features would be taken for positions."""
        tensors = [leaf for leaf in tree_leaves(inputs) if has_positions(leaf)]
        if not tensors or any(leaf.ndim > 2 or not leaf.is_floating_point() for leaf in tensors):
            return
        raise UserError(
            f"plan '{self._plan}': the inputs are vectors {[list(leaf.shape) for leaf in tensors]}; context "
            "divides sequences, [samples, positions] of tokens or [samples, positions, features]: use data "
            f"instead of context={self._plan.context}"
        )

    def _check_every_rank_has_some(self, length: int) -> None:
        if all(self._num_true(length, rank) for rank in range(self._plan.context)):
            return
        raise UserError(
            f"plan '{self._plan}': a sequence of {length} positions is too short: a rank would have only "
            f"padding; use sequences of at least {self._multiple} positions, or a smaller context"
        )


def has_positions(leaf: Any) -> bool:
    """Return whether a leaf of a batch or an output is [samples, positions, …]."""
    return isinstance(leaf, Tensor) and leaf.ndim > 1


def pad_to(x: Tensor, length: int) -> Tensor:
    """`x` [samples, positions, …] with its last position repeated."""
    missing = length - x.shape[1]
    if missing == 0:
        return x
    return torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], 1)


def _cut(structure: Any, length: int) -> Any:
    return tree_map(lambda leaf: leaf[:, :length] if has_positions(leaf) else leaf, structure)


# Hidden states, split along `tensor`.


@final
class HiddenPadding:
    """The padding of hidden states. While a forward pass runs, `view` has their true length."""

    def __init__(
        self,
        plan: Plan,
        view: View,
        not_causal: Sequence[str],
        by_heads: Collection[nn.Module],
        *,
        routes_padding: bool = False,
    ) -> None:
        """`not_causal`: classes of modules that may let positions attend to padding behind them; `by_heads`:
        dropouts of attention weights; `routes_padding`: some gates do."""
        self._routes_padding = routes_padding
        self._plan, self._view, self._not_causal, self._by_heads = plan, view, not_causal, by_heads

    def pad(self, hidden: Tensor) -> Tensor:
        """Pad what the first layer returned to a length that ranks share evenly."""
        length, ranks = hidden.shape[1], self._plan.tensor
        if length % ranks == 0:
            return hidden
        if self._not_causal:
            raise UserError(
                f"sequence=true tensor={ranks}: a sequence of {length} is not divisible by {ranks}, and "
                f"{', '.join(self._not_causal)} might attend to padding at its end; use sequences of a "
                f"multiple of {ranks}, or sequence=false, or causal attention that asks its view (self.view "
                "= echelon.sequence.WHOLE: docs/context.md; modules that mix no positions can have one too)"
            )
        check_weight_masks(self._by_heads, self._plan, length)
        if self._routes_padding:
            check_gate_padding(self._plan, length)
        self._view.true_length = length
        return pad_to(hidden, round_up(length, ranks))

    def connect(self, stages: Mapping[int, nn.Module], num_stages: int, wrapping: Wrapping) -> None:
        """Let the true length travel between the stages of a pipeline; `stages` are those of this rank."""
        for number, stage in stages.items():
            if number > 0:
                wrapping.before("sequence", stage, self._receive)
            if number < num_stages - 1:
                wrapping.after("sequence", stage, self._send)

    def _send(self, _: nn.Module, __: Any, output: Any) -> tuple[Any, int | None]:
        return output, self._view.true_length

    def _receive(self, _: nn.Module, arguments: tuple[tuple[Any, int | None]]) -> tuple[Any]:
        ((value, self._view.true_length),) = arguments
        return (value,)

    def without_padding(self, output: Any, targets: Any, *, ignores: bool) -> tuple[Any, Any]:
        """Return output and targets of the true positions; see `true_pair`."""
        length = self._view.true_length
        if length is None:
            return output, targets
        padded = round_up(length, self._plan.tensor)
        return true_pair(output, targets, length, padded, ignores=ignores)


@final
class SplitOutput:
    """A forward hook of the first layer: the rest of the model has a part of what it returns."""

    def __init__(self, part: Callable[[Tensor], Tensor], padding: HiddenPadding | None) -> None:
        self._part, self._padding = part, padding

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise UserError(
                f"sequence=true: the first layer, {type(module).__name__}, returns a "
                f"{type(output).__name__}; it must return hidden states alone, [batch, sequence, width]"
            )
        return self._part(output if self._padding is None else self._padding.pad(output))
