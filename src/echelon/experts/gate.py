"""The gate: which experts see which token. The interface of all of them."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from echelon.experts.routing import Routing


class Gate(nn.Module, ABC):
    """Routes tokens to `top_k` of `num_experts` experts.

    What its balancing losses are computed of are sums over tokens, the `rows` of a matrix with a column for
    each expert. A gate computes the sums of its tokens and hands them to `record`; whoever records adds up
    those of all microbatches and ranks. `auxiliary_loss` is a function of the sums of the global batch: so it
    does not depend on how the batch is divided.
    """

    # The first rows are the same for all gates: slots routed to each expert, also those dropped over
    # capacity; the dropped ones; and the share of each expert in the entropy of the gate's distribution.
    rows: ClassVar[tuple[str, ...]] = ("tokens", "dropped", "entropy")

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.pending: list[Tensor] = []  # statistics that nobody records; see `auxiliary_loss`

    @abstractmethod
    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of x [samples, positions, width]."""

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """What is added to the loss for these `rows`, summed over the global batch; one number."""
        return statistics.new_zeros(())

    @property
    def has_loss(self) -> bool:
        """Whether `auxiliary_loss` depends on the statistics at all."""
        return False

    @torch.no_grad()
    def after_step(self, statistics: Tensor) -> None:
        """An update was made with a global batch of these statistics: the same call on every rank."""
