"""The gate: which experts see which token. The interface of all of them."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.nn.autograd.tracing import untraced
from echelon.nn.dropout import KeyedNoise
from echelon.nn.experts.gates.gate_checks import gate_errors
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.positions import WHOLE, Positions


class Gate(nn.Module):
    """Routes tokens to `top_k` of `num_experts` experts.

    What its balancing losses are computed of are sums over tokens, the `rows` of a matrix with a column for
    each expert. A gate computes the sums of its tokens and hands them to `record`; whoever records adds up
    those of all microbatches and ranks. `auxiliary_loss` is a function of the sums of the global batch: so it
    does not depend on how the batch is divided.

    `capacity`: what an expert takes of each sample, as a factor of its fair share; None: all that comes. See
    `capacity.py`.
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
        # Statistics that nobody records: of each pass, for `auxiliary_loss`; of all, for `after_step`.
        self.pending: list[Tensor] = []
        self.seen: Tensor | None = None
        self.ran_in_backward = False  # where nobody recorded it

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of x [samples, positions, width]; of [samples, width], one of each sample."""
        # Noise, capacity and what records the statistics are others in each step: nothing to be compiled.
        return self._route_untraced(x) if torch.compiler.is_compiling() else self.route(x)

    def route(self, x: Tensor) -> Routing:
        """What a gate computes, up to `finish`. A gate with a `forward` of its own needs none."""
        raise NotImplementedError

    @property
    def skips_padding(self) -> bool:
        """Whether padding has no experts, and no part in the statistics: `finish` sees to that."""
        return type(self).forward is Gate.forward

    @untraced
    def _route_untraced(self, x: Tensor) -> Routing:
        return self.route(x)

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """What is added to the loss for these `rows`, summed over the global batch; one number."""
        return statistics.new_zeros(())

    def num_tokens(self, statistics: Tensor) -> Tensor:
        """How many tokens these `rows` are the sums of."""
        return statistics[0].sum() / self.top_k

    @property
    def has_loss(self) -> bool:
        """Whether `auxiliary_loss` depends on the statistics at all."""
        return type(self).auxiliary_loss is not Gate.auxiliary_loss

    @property
    def balances_itself(self) -> bool:
        """Whether `after_step` does anything."""
        return type(self).after_step is not Gate.after_step

    @torch.no_grad()
    def after_step(self, statistics: Tensor) -> None:
        """An update was made with a global batch of these statistics: the same call on every rank."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in forward passes of the original."""
        return self.__dict__ | {"pending": [], "seen": None, "ran_in_backward": False}
