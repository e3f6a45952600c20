"""The feed-forward part of a transformer block as a mixture of experts, with matrices stacked along dim 0.

Names and shapes are those of transformers' models, so that what splits one splits the other:

    gate_up_proj [experts, 2 · hidden, width]   down_proj [experts, width, hidden]      SwiGLU
    up_proj [experts, hidden, width]            down_proj [experts, width, hidden]      GELU
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.nn.experts.compute import grouped_experts, routed_experts
from echelon.nn.experts.gate import Gate, Routing, size_errors, weight_errors

# Work that runs while the tokens of a layer are on their way to their experts.
#
#     with beside(lambda: shared(x)) as work:     the layer offers it
#         mixed = experts(…)                      the sender of tokens calls `run_beside()` while they travel
#     return mixed + work.result()                without a sender it runs here
#
# Neither of the two knows the other, nor what is wrapped around the experts.


@final
class Work:
    """A computation that runs once, when it is asked for first."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._result: Tensor | None = None

    def run(self) -> None:
        if self._result is None:
            token = _WORK.set(None)  # experts inside of it wait for their own tokens
            try:
                self._result = self._compute()
            finally:
                _WORK.reset(token)

    def result(self) -> Tensor:
        self.run()
        assert self._result is not None
        return self._result


_WORK: ContextVar[Work | None] = ContextVar("echelon.nn.experts.beside", default=None)


@contextmanager
def beside(compute: Callable[[], Tensor]) -> Iterator[Work]:
    """Offer `compute` to code inside that waits for tokens."""
    work = Work(compute)
    token = _WORK.set(work)
    try:
        yield work
    finally:
        _WORK.reset(token)


def run_beside() -> None:
    """Run the work that a layer around has offered, if it has not run yet."""
    work = _WORK.get()
    if work is not None:
        work.run()


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
        rows = 2 * hidden if activation == "swiglu" else hidden
        self.register_parameter(self._first_name, nn.Parameter(torch.empty(num_experts, rows, width)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.down_proj, std=self.std)

    @property
    def _first_name(self) -> str:
        return "gate_up_proj" if self.activation == "swiglu" else "up_proj"

    @property
    def first(self) -> nn.Parameter:
        """The matrices that a row is multiplied with first."""
        parameter: nn.Parameter = getattr(self, self._first_name)
        return parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum over the experts of each token; an index of `num_experts` is none."""
        return routed_experts(
            hidden_states, top_k_index, top_k_weights, self.first, self.down_proj, self.activation
        )

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows [rows, width] sorted by expert; `counts` [experts] are on the device."""
        return grouped_experts(rows, counts, self.first, self.down_proj, self.activation)


@final
class MixtureOfExperts(nn.Module):
    """y = shared(x) + Σ over the experts that the gate chose, weighted.

    The shared expert may compute while tokens are on their way to the others. An index that a gate of your
    own returns is not looked at: from the number of experts on, it is a dropped slot.
    """

    def __init__(self, gate: Gate, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        _check_numbers(gate, experts)
        self.gate, self.experts, self.shared = gate, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        routing, shared = self.gate(x), self.shared
        if shared is None:
            return self._mix(x, routing)
        if torch.compiler.is_compiling():  # which orders operations itself
            return self._mix(x, routing).add(shared(x))
        with beside(lambda: shared(x)) as work:
            mixed = self._mix(x, routing)
        return mixed + work.result()

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        mixed: Tensor = self.experts(x.flatten(0, -2), routing.indices, routing.weights)
        return mixed.view_as(x)


def _check_numbers(gate: nn.Module, experts: nn.Module) -> None:
    routed, held = (getattr(module, "num_experts", None) for module in (gate, experts))
    if None not in (routed, held) and routed != held:
        error = (
            f"the gate has num_experts={routed}, the experts num_experts={held}: what is routed to an "
            "expert that is not there would be dropped; give both the same number"
        )
        raise_errors("MixtureOfExperts", [error])
