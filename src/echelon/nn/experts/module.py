"""The experts of a layer: many feed-forward networks whose matrices are stacked along dim 0.

Names and shapes are those of transformers' models, so that what splits one splits the other:

    gate_up_proj [experts, 2 · hidden, width]   down_proj [experts, width, hidden]      SwiGLU
    up_proj [experts, hidden, width]            down_proj [experts, width, hidden]      GELU
"""

from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.nn.experts.compute import grouped_experts, routed_experts
from echelon.nn.experts.gates.gate_checks import size_errors, weight_errors

Activation = Literal["swiglu", "gelu"]


@final
class Experts(nn.Module):
    """`num_experts` feed-forward networks; each token is computed by its own few, and their sum weighted."""

    def __init__(
        self, num_experts: int, width: int, hidden: int, activation: Activation = "swiglu", std: float = 0.02
    ) -> None:
        super().__init__()
        errors = [*size_errors(num_experts=num_experts, width=width, hidden=hidden), *weight_errors(std=std)]
        if activation not in get_args(Activation):
            errors.append(f"activation={activation!r}: must be one of {', '.join(get_args(Activation))}")
        raise_errors("Experts", errors)
        self.num_experts, self.activation, self.std = num_experts, activation, std
        first = "gate_up_proj" if activation == "swiglu" else "up_proj"
        rows = 2 * hidden if activation == "swiglu" else hidden
        self.register_parameter(first, nn.Parameter(torch.empty(num_experts, rows, width)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.down_proj, std=self.std)

    @property
    def first(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self, "gate_up_proj" if self.activation == "swiglu" else "up_proj")
        return parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum over the experts of tokens [tokens, width]; an index of `num_experts` is none."""
        return routed_experts(
            hidden_states, top_k_index, top_k_weights, self.first, self.down_proj, self.activation
        )

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [rows, width] sorted by expert; `counts` [experts], on the device, are the rows of each."""
        return grouped_experts(rows, counts, self.first, self.down_proj, self.activation)
