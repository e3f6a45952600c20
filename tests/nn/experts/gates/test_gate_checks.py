"""Gates that cannot be, and inputs that they cannot route: one clear error."""

from collections.abc import Callable

import pytest
import torch

import echelon
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.dropout import counted_samples, scope
from echelon.nn.experts import (
    ExpertChoiceGate,
    Experts,
    Gate,
    GShardGate,
    HierarchicalGate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
)
from tests.nn.experts.models import EXPERTS, SEQUENCE, VOCAB, WIDTH, make_model
from tests.nn.experts.statistics import statistics_of


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: SoftmaxGate(8, 4, 5), ["top_k=5 is above num_experts=4"]),
        (lambda: SoftmaxGate(8, 4, 1, z_loss=-1), ["top_k=1 normalize=True", "z_loss=-1"]),
        (lambda: SoftmaxGate(8, 4, 2.0), ["top_k=2.0: must be an integer"]),  # type: ignore[arg-type]
        (lambda: SoftmaxGate(0, 4, True, normalize=False), ["width=0", "top_k=True"]),
        (lambda: NoisyTopKGate(0, 4.0, 2), ["width=0", "num_experts=4.0: must be an integer"]),  # type: ignore[arg-type]
        (lambda: SoftmaxGate(8, 4.0, "2"), ["num_experts=4.0", "top_k='2': must be an integer"]),  # type: ignore[arg-type]
        (lambda: GShardGate(8.0, 4), ["width=8.0"]),  # type: ignore[arg-type]
        (lambda: SigmoidGate(-1, 4, 2), ["width=-1"]),
        (lambda: HierarchicalGate(0, 2.0, 2), ["width=0", "groups=2.0"]),  # type: ignore[arg-type]
        (lambda: ExpertChoiceGate(0, 4), ["width=0"]),
        (lambda: Experts(0, 8, 5), ["num_experts=0"]),
        (
            lambda: Experts(4, 0, 2.5, activation="relu", std=-1.0),  # type: ignore[arg-type]
            ["width=0", "hidden=2.5", "activation='relu': must be one of swiglu, gelu", "std=-1.0"],
        ),
        (lambda: SigmoidGate(8, 4, 1), ["set normalize=False"]),
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


def test_an_input_of_the_wrong_form_is_refused() -> None:
    for gate in (SoftmaxGate(8, 4, 2, jitter=0.1), NoisyTopKGate(8, 4, 2), HierarchicalGate(8, 2, 2)):
        with pytest.raises(UserError, match=r"an input \[8\]: give it \[samples, positions, width\]"):
            gate(torch.randn(8))
        with pytest.raises(UserError, match=r"made for width=8, .* are 6 wide: make the gate with width=6"):
            gate(torch.randn(2, 3, 6))


@pytest.mark.parametrize("number", [2, 8])
def test_a_gate_and_experts_of_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(UserError, match=f"gate has num_experts={number}, the experts num_experts=4"):
        MixtureOfExperts(SoftmaxGate(8, number, 2), Experts(4, 8, 5))
    MixtureOfExperts(SoftmaxGate(8, 4, 2), Experts(4, 8, 5))


def test_names_of_rows_match_the_statistics() -> None:
    for gate in (GShardGate(8, 4), HierarchicalGate(8, 2, 2), ExpertChoiceGate(8, 4)):
        assert statistics_of(gate, torch.randn(1, 3, 8)).shape == (len(gate.rows), 4)


@pytest.mark.parametrize(
    ("gate", "shape"),
    [
        (NoisyTopKGate(8, 4, 2), (6, 8)),
        (SoftmaxGate(8, 4, 2, jitter=0.1), (6, 8)),
        (GShardGate(8, 4), (1, 6, 8)),
        (HierarchicalGate(8, 2, 2), (3, 2, 8)),
        (SoftmaxGate(8, 4, 2, capacity=1.0), (1, 6, 8)),
        (ExpertChoiceGate(8, 4), (1, 6, 8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Gate) else str(value),
)
def test_what_is_counted_by_sample_needs_samples(gate: Gate, shape: tuple[int, ...]) -> None:
    """Of a pass of two samples. Outside of a pass nothing is known of them."""
    if gate.noise is not None:
        gate.noise.name = "gate"
    gate(torch.randn(shape))
    with scope(seed=0, step=0, first_sample=0), counted_samples(2):
        gate(torch.randn(2, 3, 8))
        with pytest.raises(UserError, match=r"this pass has 2: give the gate \[samples, positions, width\]"):
            gate(torch.randn(shape))
        SoftmaxGate(8, 4, 2)(torch.randn(shape))  # each token by itself


class Flat(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flattened: torch.Tensor = self.inner(x.flatten(0, 1)).view_as(x)
        return flattened


def test_an_engine_knows_the_samples_of_a_microbatch() -> None:
    model = make_model(lambda: NoisyTopKGate(WIDTH, EXPERTS, 2), layers=1)
    model.blocks[0].mlp = Flat(model.blocks[0].mlp)
    tokens = torch.randint(VOCAB, (4, SEQUENCE))
    with echelon.parallelize(
        model, "data=1 microbatches=2", optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=cross_entropy
    ) as engine:
        before = model.blocks[0].mlp.inner.experts.down_proj.detach().clone()
        with pytest.raises(UserError, match=r"noise of blocks.0.mlp.inner.gate .* which this pass has 2"):
            engine.step((tokens, tokens))
        assert torch.equal(model.blocks[0].mlp.inner.experts.down_proj, before)
