"""The feed-forward part of a transformer block, as a mixture of experts."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.nn.experts.gates.gate import Gate
from echelon.nn.experts.gates.routing import Routing
from echelon.nn.experts.module import Experts
from echelon.nn.experts.overlap import beside


@final
class MixtureOfExperts(nn.Module):
    """y = shared(x) + Σ over the experts that the gate chose, weighted.

    The shared expert may compute while tokens are on their way to the others. An index that a gate of your
    own returns is not looked at: from the number of experts on, it is a dropped slot.
    """

    def __init__(self, gate: Gate, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        raise_errors("MixtureOfExperts", list(_errors(gate, experts)))
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


def _errors(gate: nn.Module, experts: nn.Module) -> Iterator[str]:
    routed, held = (getattr(module, "num_experts", None) for module in (gate, experts))
    if None not in (routed, held) and routed != held:
        yield (
            f"the gate has num_experts={routed}, the experts num_experts={held}: what is routed to an "
            "expert that is not there would be dropped; give both the same number"
        )
