"""The gate: which experts see which token. The interface of all gates, and the options that they refuse."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.nn.dropout.mask import KeyedNoise
from echelon.nn.tracing import untraced


class Routing(NamedTuple):
    """The experts of every token, in the order of [samples, positions], and their weights in the sum.

    `indices` [tokens, k], int64; the number of experts where a token was dropped, whose weight is 0.
    `weights` [tokens, k].
    """

    indices: Tensor
    weights: Tensor


class Positions:
    """All positions are on this rank, in order. Subclasses know other layouts."""

    def numbers(self, length: int) -> Tensor | None:  # noqa: ARG002
        """Return the places in the whole sequence of the `length` positions here; None: they are all."""
        return None

    def is_true(self, length: int) -> Tensor | None:  # noqa: ARG002
        """Mark which of the `length` positions here are no padding, [length]; None: all of them."""
        return None

    def whole_length(self, length: int) -> int:
        """Return the length of the whole sequence without padding, where `length` positions are here."""
        return length

    def gather(self, x: Tensor) -> Tensor:
        """Gather x of all ranks, [samples, all positions, …] with padding, without a gradient."""
        return x

    def here(self, whole: Tensor, length: int) -> Tensor:
        """Return the part of [samples, all positions, …] that this rank has."""
        numbers = self.numbers(length)
        return whole if numbers is None else whole.index_select(1, numbers)


WHOLE = Positions()


def as_samples(x: Tensor) -> Tensor:
    """View x as [samples, positions, width]: [samples, width] has one position, an image all its places."""
    if x.ndim < 2:
        raise UserError(
            f"a gate cannot tell samples in an input {list(x.shape)}: give it [samples, positions, width], "
            "or [samples, width]"
        )
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def router_dtype(x: Tensor) -> torch.dtype:
    """Return the type that a gate computes in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


class Gate(nn.Module):
    """Routes tokens to `top_k` of `num_experts` experts.

    Balancing losses are functions of sums over tokens, the `rows` of a matrix with a column for each expert.
    A gate computes the sums of its tokens and hands them to `record`; the recorder adds up those of all
    microbatches and ranks. `auxiliary_loss` is a function of the sums of the global batch: so it does not
    depend on how the batch is divided.

    `capacity`: what an expert takes of each sample, as a factor of its fair share; None: all that comes. See
    `routing.py`.
    """

    # The first rows are the same for all gates: slots routed to each expert, also those dropped over
    # capacity; the dropped ones; and the share of each expert in the entropy of the gate's distribution,
    # which is no number if a logit is none.
    rows: ClassVar[tuple[str, ...]] = ("tokens", "dropped", "entropy")

    noise: KeyedNoise | None = None  # of a gate that draws at random in training
    positions: Positions = WHOLE  # which part of each sample is here

    def __init__(
        self, num_experts: int, top_k: int, capacity: float | None = None, errors: Iterable[str] = ()
    ) -> None:
        """`errors`: those of a subclass, to be raised together with those found here."""
        super().__init__()
        raise_errors(type(self).__name__, [*gate_errors(num_experts, top_k, capacity), *errors])
        self.num_experts, self.top_k, self.capacity = num_experts, top_k, capacity
        # Statistics of passes without a recorder: of each, for `auxiliary_loss`; of all, for `after_step`.
        self.pending: list[Tensor] = []
        self.seen: Tensor | None = None
        self.ran_in_backward = False  # without a recorder

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of x [samples, positions, width]; of [samples, width], one of each sample."""
        # Noise, capacity and what records the statistics are others in each step: nothing to be compiled.
        return self._route_untraced(x) if torch.compiler.is_compiling() else self.route(x)

    def route(self, x: Tensor) -> Routing:
        """Compute the choice of a gate, up to `finish`. A gate with a `forward` of its own needs none."""
        raise NotImplementedError

    @property
    def skips_padding(self) -> bool:
        """True if padding has no experts, and no part in the statistics: `finish` sees to that."""
        return type(self).forward is Gate.forward

    @untraced
    def _route_untraced(self, x: Tensor) -> Routing:
        return self.route(x)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Return the loss to add for these `rows`, summed over the global batch; one number."""
        return statistics.new_zeros(())

    def num_tokens(self, statistics: Tensor) -> Tensor:
        """Return the number of tokens that these `rows` are the sums of."""
        return statistics[0].sum() / self.top_k

    @property
    def has_loss(self) -> bool:
        """True if `auxiliary_loss` depends on the statistics at all."""
        return type(self).auxiliary_loss is not Gate.auxiliary_loss

    @property
    def balances_itself(self) -> bool:
        """True if `after_step` does anything."""
        return type(self).after_step is not Gate.after_step

    @torch.no_grad()
    def after_step(self, statistics: Tensor) -> None:
        """Balance after an update with a global batch of these statistics: the same call on every rank."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out forward passes: a copy has no part in those of the original."""
        return self.__dict__ | {"pending": [], "seen": None, "ran_in_backward": False}


def gate_errors(num_experts: int, top_k: int, capacity: float | None) -> Iterator[str]:
    """Yield errors in the options that all gates have."""
    wrong = list(size_errors(num_experts=num_experts))
    yield from wrong
    if not _is_integer(top_k):
        yield f"top_k={top_k!r}: must be an integer, the number of experts that a token takes"
    elif top_k < 1:
        yield f"top_k={top_k}: each token needs an expert; use at least 1"
    elif not wrong and top_k > num_experts:
        yield (
            f"top_k={top_k} is above num_experts={num_experts}: a token can take each expert once; use at "
            f"most {num_experts}"
        )
    if capacity is not None and not (math.isfinite(capacity) and capacity > 0):
        yield (
            f"capacity={capacity}: a factor of the fair share of an expert, above 0 (1.25 is usual), or None "
            "to drop nothing"
        )


def size_errors(**sizes: int) -> Iterator[str]:
    """Yield errors of numbers that must be 1 or more."""
    for name, size in sizes.items():
        if not _is_integer(size):
            yield f"{name}={size!r}: must be an integer"
        elif size < 1:
            yield f"{name}={size}: must be at least 1"


def _is_integer(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def weight_errors(**weights: float) -> Iterator[str]:
    """Yield errors of weights of losses, and of other numbers that cannot be negative."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            yield f"{name}={weight}: must be a finite number, at least 0"


def group_errors(num_experts: int, groups: int, top_groups: int, top_k: int) -> Iterator[str]:
    """Yield errors of a choice that is limited to a few groups of experts."""
    if groups < 1 or num_experts % groups:
        yield f"num_experts={num_experts} is not divisible by groups={groups}: groups must be of equal size"
        return
    if not 1 <= top_groups <= groups:
        yield f"top_groups={top_groups}: must be from 1 to groups={groups}"
    elif top_k > top_groups * (num_experts // groups):
        yield (
            f"top_k={top_k} is above the {top_groups * (num_experts // groups)} experts of "
            f"top_groups={top_groups} groups of {num_experts // groups}: use a larger top_groups"
        )


def normalize_errors(top_k: int, normalize: bool) -> Iterator[str]:
    """Yield errors of weights that are normalized to sum 1."""
    if top_k == 1 and normalize:
        yield (
            "top_k=1 normalize=True: a single weight would always be 1, and the gate would learn nothing of "
            "the loss; set normalize=False"
        )
