"""The shared expert runs once: while tokens travel, or after."""

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.experts import (
    Experts,
    MixtureOfExperts,
    SoftmaxGate,
)
from echelon.nn.experts.layer import beside, run_beside
from echelon.nn.wrapping import Wrapper, Wrapping


class Noted(nn.Module):
    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append("shared")
        return 3 * x


class Sending(Wrapper):
    """Runs what it may while tokens travel."""

    entry = "tensor"
    notes: list[str]

    def __call__(self, *args: Tensor) -> Tensor:
        self.notes.append("sent")
        run_beside()
        self.notes.append("received")
        output: Tensor = self.inner(*args)
        return output


@pytest.mark.parametrize("sends", [False, True])
def test_the_shared_expert_runs_once_and_while_tokens_travel(sends: bool) -> None:
    notes: list[str] = []
    experts = Experts(4, 6, 5)
    layer = MixtureOfExperts(SoftmaxGate(6, 4, 2), experts, Noted(notes)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = MixtureOfExperts(layer.gate, experts)(x) + 3 * x
    with Wrapping() as wrapping:
        if sends:
            wrapper = Sending(experts)
            wrapper.notes = notes
            wrapping.wrap(wrapper)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert notes == (["sent", "shared", "received"] if sends else ["shared"])


def test_nothing_is_offered_outside() -> None:
    run_beside()
    ran: list[int] = []

    def compute() -> Tensor:
        ran.append(1)
        return torch.ones(1)

    with beside(compute) as work:
        pass
    run_beside()
    assert not ran
    assert work.result() is work.result()
    assert ran == [1]


def test_experts_inside_of_the_shared_expert_do_not_run_it_again() -> None:
    ran: list[int] = []

    def compute() -> Tensor:
        ran.append(1)
        assert len(ran) == 1
        run_beside()  # of experts inside
        return torch.ones(1)

    with beside(compute) as work:
        run_beside()
        run_beside()
    assert work.result() is work.result()
    assert ran == [1]


def test_work_beside_ends_with_its_layer() -> None:
    runs: list[str] = []

    def compute() -> Tensor:
        runs.append("outer")
        run_beside()  # inside of it nothing is offered
        return torch.ones(1)

    with beside(compute) as work:
        run_beside()
        run_beside()
        with beside(lambda: torch.zeros(1)) as other:
            run_beside()
        assert other.result() == 0
        run_beside()
    run_beside()
    assert (work.result().item(), runs) == (1.0, ["outer"])
