"""Which positions of each sample a gate sees, where ranks share the sequences."""

import torch
from torch import Tensor

from echelon.errors import UserError


class Positions:
    """All positions are on this rank, in order. The engine knows other layouts (`token_positions`)."""

    def numbers(self, length: int) -> Tensor | None:  # noqa: ARG002
        """The places in the whole sequence of the `length` positions here, [length]; None: they are all."""
        return None

    def is_true(self, length: int) -> Tensor | None:  # noqa: ARG002
        """Which of the `length` positions here are no padding, [length]; None: all of them."""
        return None

    def whole_length(self, length: int) -> int:
        """Of the whole sequence, without padding, where `length` positions are here."""
        return length

    def gather(self, x: Tensor) -> Tensor:
        """The same of all ranks, [samples, all positions, …] with padding, without a gradient."""
        return x

    def here(self, whole: Tensor, length: int) -> Tensor:
        """The part that this rank has of [samples, all positions, …]."""
        numbers = self.numbers(length)
        return whole if numbers is None else whole.index_select(1, numbers)


WHOLE = Positions()


def as_samples(x: Tensor) -> Tensor:
    """x as [samples, positions, width]; [samples, width] has one position, an image has all its places."""
    if x.ndim < 2:
        raise UserError(
            f"a gate cannot tell samples in an input {list(x.shape)}: give it [samples, positions, width], "
            "or [samples, width]"
        )
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def router_dtype(x: Tensor) -> torch.dtype:
    """What a gate computes in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
