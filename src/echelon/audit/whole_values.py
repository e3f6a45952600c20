"""Hidden states that ranks hold in parts: put together for a layer that is not split, and taken apart again.

    context     each rank has two chunks of the positions (dim 1)
    sequence    of these, the ranks along `tensor` have a part each
    vocabulary  each rank along `tensor` has a part of the logits (the last dim)

What is behind the true length, or behind the vocabulary, is padding.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from echelon.audit.texts import gather_rows
from echelon.collectives import Group
from echelon.context_parallel import put_together, take


class Division(NamedTuple):
    """How the ranks divide one tensor; with none of the three, each has all of it."""

    by_context: bool = False
    by_sequence: bool = False
    by_vocabulary: bool = False


class ValueGroups(NamedTuple):
    """The ranks that share the values of a layer."""

    context: Group
    tensor: Group
    sequence: bool  # whether hidden states are divided along `tensor` too
    vocabulary: int | None  # of logits that each rank has a part of

    def division_of_input(self, local: Tensor, *, is_first: bool) -> Division:
        """`is_first`: of the first layer of the model, which sees all that its context rank has."""
        has_positions = local.ndim > 1
        return Division(
            has_positions and self.context.size > 1, has_positions and self.sequence and not is_first
        )

    def division_of_output(self, local: Tensor, whole: Tensor) -> Division | None:
        """The division by which the ranks have this much of `whole`; None if there is none."""
        if local.ndim != whole.ndim:
            return None
        by_vocabulary = (
            self.vocabulary is not None
            and whole.ndim > 0
            and local.shape[-1] != whole.shape[-1] == self.vocabulary
            and local.shape[-1] == -(-self.vocabulary // self.tensor.size)
        )
        has_positions = local.ndim > 1
        by_context = has_positions and self.context.size > 1
        length = local.shape[1] * (self.context.size if by_context else 1) if has_positions else 0
        by_sequence = has_positions and self.sequence and length < whole.shape[1]
        division = Division(by_context, by_sequence, by_vocabulary)
        return division if self._fits(local, whole, division) else None

    def _fits(self, local: Tensor, whole: Tensor, division: Division) -> bool:
        sizes = list(local.shape)
        if division.by_context:
            sizes[1] *= self.context.size
        if division.by_sequence:
            sizes[1] *= self.tensor.size
        if division.by_vocabulary:
            sizes[-1] *= self.tensor.size
        padded = [dim for dim, size in enumerate(whole.shape) if sizes[dim] != size]
        may_be_padded = {1} if division.by_context or division.by_sequence else set()
        may_be_padded |= {whole.ndim - 1} if division.by_vocabulary else set()
        return set(padded) <= may_be_padded and all(sizes[dim] > whole.shape[dim] for dim in padded)

    def join(self, local: Tensor, division: Division) -> Tensor:
        """The whole tensor, with padding."""
        whole = local
        if division.by_vocabulary:
            whole = _concatenated(whole, self.tensor, whole.ndim - 1)
        if division.by_sequence:
            whole = _concatenated(whole, self.tensor, 1)
        if division.by_context:
            whole = put_together(list(gather_rows(whole, self.context)))
        return whole

    def take(self, whole: Tensor, division: Division, like: Tensor) -> Tensor:
        """This rank's part of a tensor without padding, in the shape of `like`; padding is zeros."""
        if division.by_context or division.by_sequence:
            parts = self.context.size if division.by_context else 1
            parts *= self.tensor.size if division.by_sequence else 1
            whole = _padded(whole, 1, like.shape[1] * parts)
        if division.by_context:
            whole = take(whole, self.context.rank, self.context.size)
        if division.by_sequence:
            whole = whole.chunk(self.tensor.size, 1)[self.tensor.rank]
        if division.by_vocabulary:
            whole = _padded(whole, whole.ndim - 1, like.shape[-1] * self.tensor.size)
            whole = whole.chunk(self.tensor.size, -1)[self.tensor.rank]
        return whole.contiguous()


def cut(padded: Tensor, whole: Tensor) -> Tensor:
    """What of `padded` has the shape of `whole`."""
    return padded[tuple(slice(size) for size in whole.shape)]


def _concatenated(local: Tensor, group: Group, dim: int) -> Tensor:
    return gather_rows(local, group).movedim(0, dim).flatten(dim, dim + 1)


def _padded(whole: Tensor, dim: int, size: int) -> Tensor:
    later_dims = [0, 0] * (whole.ndim - 1 - dim)
    return F.pad(whole, [*later_dims, 0, size - whole.shape[dim]])
