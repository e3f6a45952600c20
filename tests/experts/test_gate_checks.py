"""Gates that cannot be, and inputs that they cannot route: one clear error."""

from collections.abc import Callable

import pytest
import torch

from echelon.errors import UserError
from echelon.experts import (
    ExpertChoiceGate,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from tests.experts.statistics import statistics_of


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: SoftmaxGate(8, 4, 5), ["top_k=5 is above num_experts=4"]),
        (lambda: SoftmaxGate(8, 0, 0), ["num_experts=0", "top_k=0"]),
        (
            lambda: SoftmaxGate(8, 4, 0, balance=-1.0, z_loss=float("nan"), capacity=0.0),
            ["top_k=0", "capacity=0.0", "balance=-1.0", "z_loss=nan"],
        ),
        (lambda: NoisyTopKGate(8, 4, 5, importance=-1.0, load=-2.0), ["top_k=5", "importance", "load=-2.0"]),
        (lambda: SwitchGate(8, 4, capacity=-1.0, jitter=-0.1), ["capacity=-1.0", "jitter=-0.1"]),
        (lambda: GShardGate(8, 1), ["top_k=2 is above num_experts=1"]),
        (lambda: SigmoidGate(8, 6, 2, groups=4), ["num_experts=6 is not divisible by groups=4"]),
        (lambda: SigmoidGate(8, 8, 2, groups=4, top_groups=5), ["top_groups=5"]),
        (lambda: SigmoidGate(8, 8, 3, groups=4, top_groups=1, bias_rate=-1), ["top_k=3", "bias_rate=-1"]),
        (
            lambda: HierarchicalGate(8, 2, 0, top_groups=3, top_experts=2, load=-1.0, capacity=0),
            ["experts_per_group=0", "top_groups=3", "top_experts=2", "load=-1.0", "capacity=0"],
        ),
        (
            lambda: ExpertChoiceGate(8, 4, chosen_per_token=5.0, z_loss=-1),
            ["chosen_per_token=5.0", "z_loss=-1"],
        ),
    ],
)
def test_all_errors_of_a_gate_at_once(make: Callable[[], Gate], found: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert len(error.value.errors) == len(found)
    for text in found:
        assert any(text in each for each in error.value.errors), text


@pytest.mark.parametrize(
    "gate", [SwitchGate(8, 4, capacity=1.25), ExpertChoiceGate(8, 4)], ids=lambda gate: type(gate).__name__
)
def test_what_counts_positions_needs_positions(gate: Gate) -> None:
    with pytest.raises(UserError, match=r"\[3, 8\] has none; give it \[samples, positions, width\]"):
        gate(torch.randn(3, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "gate",
    [
        SoftmaxGate(8, 4, 2),
        NoisyTopKGate(8, 4, 2),
        GShardGate(8, 4, capacity=1.0),
        SigmoidGate(8, 4, 2, groups=2, top_groups=1),
        HierarchicalGate(8, 2, 2),
        ExpertChoiceGate(8, 4),
    ],
    ids=lambda gate: type(gate).__name__,
)
def test_a_router_that_is_not_finite_shows_in_the_statistics(gate: Gate, value: float) -> None:
    """Whoever sums them refuses the step; indices stay in their range."""
    x = torch.randn(3, 5, 8)
    assert statistics_of(gate, x).isfinite().all()
    x[1, 2, 3] = value
    routing = gate(x)
    assert not statistics_of(gate, x)[gate.rows.index("entropy")].isfinite().all()
    assert int(routing.indices.min()) >= 0
    assert int(routing.indices.max()) <= 4


def test_names_of_rows_match_the_statistics() -> None:
    for gate in (GShardGate(8, 4), HierarchicalGate(8, 2, 2), ExpertChoiceGate(8, 4)):
        assert statistics_of(gate, torch.randn(1, 3, 8)).shape == (len(gate.rows), 4)
