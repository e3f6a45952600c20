"""What gates record, whatever becomes of it."""

import torch
from torch import Tensor

from echelon.nn.experts import Gate, Recorder, recording


class Kept(Recorder):
    """Keeps the statistics of all passes."""

    def __init__(self) -> None:
        self.passes: list[Tensor] = []

    def add(self, gate: Gate, statistics: Tensor) -> None:  # noqa: ARG002
        self.passes.append(statistics)

    def attach(self, gate: Gate) -> None:
        pass

    def gradient(self, gate: Gate, statistics: Tensor | None) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(gate.rows), gate.num_experts)


def statistics_of(gate: Gate, x: Tensor) -> Tensor:
    kept = Kept()
    with recording(kept):
        gate(x)
    (statistics,) = kept.passes
    return statistics
