"""Statistics of gates reach the loss, with a recorder and without."""

import torch
from torch import Tensor, nn

from echelon.nn.experts import Gate, SoftmaxGate
from echelon.nn.experts.recording import (
    after_step,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)


class Noting:
    """A recorder whose gradient is 2 for each statistic."""

    def __init__(self) -> None:
        self.added: list[list[float]] = []
        self.attached: list[Gate] = []

    def add(self, _: Gate, statistics: Tensor) -> None:
        assert not statistics.requires_grad
        self.added.append(statistics.tolist())

    def attach(self, gate: Gate) -> None:
        self.attached.append(gate)

    def gradient(self, _: Gate, statistics: Tensor | None) -> Tensor:
        assert statistics is not None
        return torch.full(statistics.shape, 2.0, dtype=torch.float64)


class Balancing(SoftmaxGate):
    """Balances itself, and has no loss."""

    def __init__(self) -> None:
        super().__init__(4, 2, 1, normalize=False)
        self.told: list[list[float]] = []

    auxiliary_loss = Gate.auxiliary_loss

    def after_step(self, statistics: Tensor) -> None:
        self.told.append(statistics.tolist())


def test_statistics_reach_their_recorder_and_get_their_gradient() -> None:
    gate, recorder = SoftmaxGate(4, 2, 1, normalize=False, balance=1.0), Noting()
    weights, statistics = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    with recording(recorder):
        assert current_recorder() is recorder
        out = record(gate, weights, statistics)
        out.backward(torch.tensor([1.0, 2.0, 3.0]))
        with torch.no_grad():
            record(gate, weights.detach(), statistics)
        assert record(gate.eval(), weights, statistics) is weights
    assert current_recorder() is None
    assert (recorder.added, recorder.attached) == ([[1.0, 1.0]], [gate])
    assert weights.grad is not None
    assert statistics.grad is not None
    assert (weights.grad.tolist(), statistics.grad.tolist()) == ([1, 2, 3], [2, 2])
    assert statistics.grad.dtype == torch.float32


def test_without_a_recorder_gates_keep_their_statistics() -> None:
    gate, balancing = SoftmaxGate(4, 2, 1, normalize=False, balance=1.0), Balancing()
    model = nn.ModuleList([gate, balancing])
    assert gates_of(model) == [gate, balancing]
    assert (gate.has_loss, gate.balances_itself) == (True, False)
    assert (balancing.has_loss, balancing.balances_itself) == (False, True)
    for _ in range(2):
        for each in (gate, balancing):
            record(each, torch.ones(3), torch.ones(len(each.rows), 2))
    with torch.no_grad():
        record(gate, torch.ones(3), torch.ones(len(gate.rows), 2))
    assert (len(gate.pending), len(balancing.pending)) == (2, 0)
    assert gate.seen is None
    expected = gate.auxiliary_loss(torch.full((len(gate.rows), 2), 2.0))
    assert auxiliary_loss(model) == expected
    assert auxiliary_loss(model) == 0.0
    after_step(model)
    after_step(model)
    assert balancing.told == [[[2.0, 2.0]] * len(balancing.rows)]
    assert gate.num_tokens(torch.tensor([[3.0, 5.0]])) == 8
    assert SoftmaxGate(4, 4, 2).num_tokens(torch.tensor([[3.0, 5.0]])) == 4
