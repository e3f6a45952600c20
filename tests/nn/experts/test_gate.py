"""The options that gates refuse, the inputs that they cannot route, and what they are by default."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.engine.step.balance import load_of
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.dropout.training_position import CountedSamples, scope
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
from echelon.nn.experts import gate as gate_module
from echelon.nn.experts.gate import WHOLE, Positions, as_samples, router_dtype
from echelon.nn.experts.rows import kernels_for
from tests.nn.experts.all_gates import GATES
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
    with scope(seed=0, step=0, first_sample=0), CountedSamples(2):
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


def test_positions_of_whole_samples() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert (WHOLE.numbers(3), WHOLE.is_true(3), WHOLE.whole_length(3)) == (None, None, 3)
    assert WHOLE.gather(x) is x
    assert WHOLE.here(x, 3) is x

    class Last(Positions):
        def numbers(self, length: int) -> Tensor:
            return torch.arange(3)[-length:]

    assert torch.equal(Last().here(x, 2), x[:, 1:])
    assert as_samples(torch.ones(2, 4)).shape == (2, 1, 4)
    assert as_samples(x) is not None
    assert as_samples(x).shape == (2, 3, 4)
    assert as_samples(torch.ones(2, 5, 6, 4)).shape == (2, 30, 4)
    with pytest.raises(UserError, match=r"cannot tell samples in an input \[4\]"):
        as_samples(torch.ones(4))
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [router_dtype(torch.ones(1, dtype=dtype)) for dtype in types] == [*[torch.float32] * 3, types[3]]
    assert kernels_for(torch.ones(2, 2)) is None


@pytest.mark.parametrize(
    ("errors", "right", "wrong"),
    [
        ("gate_errors", [(1, 1, None), (4, 4, 0.1), (4, 1, 1.25)], [(4, 5, None), (4, 0, None), (4, 2, 0.0)]),
        (
            "gate_errors",
            [],
            [(0, 1, None), (True, 1, None), (4, 2, math.inf), (4, 2, math.nan), (4, 2.0, 1.0)],
        ),
        (
            "group_errors",
            [(8, 4, 1, 2), (8, 4, 4, 8), (8, 1, 1, 8)],
            [(8, 3, 1, 1), (8, 0, 1, 1), (8, 4, 0, 1)],
        ),
        ("group_errors", [], [(8, 4, 5, 1), (8, 4, 1, 3)]),
        ("normalize_errors", [(1, False), (2, True)], [(1, True)]),
    ],
)
def test_the_limits_of_what_a_gate_is_made_with(errors: str, right: list[Any], wrong: list[Any]) -> None:
    found = getattr(gate_module, errors)
    assert [list(found(*given)) for given in right] == [[] for _ in right]
    assert [len(list(found(*given))) for given in wrong] == [1 for _ in wrong]


def test_numbers_and_weights_of_losses() -> None:
    assert list(gate_module.size_errors(a=1, b=10)) == []
    assert [e.partition("=")[0] for e in gate_module.size_errors(a=0, b=1.0, c=True)] == ["a", "b", "c"]  # type: ignore[arg-type]
    assert list(gate_module.weight_errors(a=0.0, b=2.5)) == []
    wrong = {"a": -0.1, "b": math.inf, "c": math.nan}
    assert [e.partition("=")[0] for e in gate_module.weight_errors(**wrong)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("gate", "options"),
    [
        (SoftmaxGate(8, 4, 2), {"normalize": True, "balance": 0, "z_loss": 0, "capacity": None, "top_k": 2}),
        (SwitchGate(8, 4), {"normalize": False, "balance": 0.01, "z_loss": 0, "capacity": None, "top_k": 1}),
        (GShardGate(8, 4), {"balance": 0.01, "z_loss": 0, "capacity": None, "top_k": 2}),
        (
            SigmoidGate(8, 4, 2),
            {"groups": 1, "top_groups": 1, "normalize": True, "scale": 1, "bias_rate": 0.001},
        ),
        (NoisyTopKGate(8, 4, 2), {"importance": 0.1, "load": 0.1, "z_loss": 0, "capacity": None}),
        (
            HierarchicalGate(8, 3, 2),
            {"top_groups": 2, "top_experts": 2, "importance": 0.1, "load": 0.1, "num_experts": 6, "top_k": 4},
        ),
        (ExpertChoiceGate(8, 4), {"chosen_per_token": 2, "z_loss": 0, "capacity": None, "top_k": 4}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_told(gate: Gate, options: dict[str, Any]) -> None:
    assert {name: getattr(gate, name) for name in options} == options
    assert (gate.pending, gate.seen, gate.ran_in_backward, gate.skips_padding) == ([], None, False, True)


def test_no_gate_draws_at_random_unless_it_is_told() -> None:
    assert SwitchGate(8, 4).noise is SoftmaxGate(8, 4, 2).noise is SigmoidGate(8, 4, 2).noise is None
    gates: list[Gate] = [SwitchGate(8, 4, jitter=0.1), GShardGate(8, 4), NoisyTopKGate(8, 4, 2)]
    assert all(gate.noise is not None for gate in gates)


@pytest.mark.parametrize(
    ("make", "names", "balance"),
    [
        (lambda **given: SoftmaxGate(8, 4, 2, **given), ("balance", "z_loss"), False),
        (lambda **given: GShardGate(8, 4, **{"balance": 0.0, **given}), ("balance", "z_loss"), False),
        (
            lambda **given: NoisyTopKGate(8, 4, 2, **{"importance": 0.0, "load": 0.0, **given}),
            ("importance", "load", "z_loss"),
            False,
        ),
        (
            lambda **given: HierarchicalGate(8, 2, 2, **{"importance": 0.0, "load": 0.0, **given}),
            ("importance", "load"),
            False,
        ),
        (lambda **given: ExpertChoiceGate(8, 4, **given), ("z_loss",), False),
        (lambda **given: SigmoidGate(8, 4, 2, **given), (), True),
    ],
)
def test_any_weight_above_0_makes_a_loss(
    make: Callable[..., Gate], names: tuple[str, ...], balance: bool
) -> None:
    assert (make().has_loss, make().balances_itself) == (False, balance)
    for name in names:
        assert make(**{name: 0.5}).has_loss, name


def test_weights_start_small() -> None:
    torch.manual_seed(0)
    for gate in (
        SoftmaxGate(256, 64, 2),
        SigmoidGate(256, 64, 2),
        ExpertChoiceGate(256, 64),
        GShardGate(256, 64),
    ):
        assert gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
        gate.weight.data.zero_()
        gate.reset_parameters()
        assert gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not SigmoidGate(8, 4, 2).e_score_correction_bias.any()
    for gate in (NoisyTopKGate(8, 4, 2), HierarchicalGate(8, 2, 2)):
        assert not any(parameter.any() for parameter in gate.parameters())
    experts = Experts(8, 64, 32)
    assert [p.std().item() for p in experts.parameters()] == [pytest.approx(0.02, rel=0.05)] * 2
    large = Experts(8, 64, 32, std=0.5)
    assert large.down_proj.std().item() == pytest.approx(0.5, rel=0.05)


def test_a_gate_of_one_s_own_says_how_it_routes() -> None:
    class Own(Gate):
        def forward(self, x: Tensor) -> Any:
            return x

    class Silent(Gate):
        """Routes nothing."""

    assert not Own(4, 1).skips_padding
    with pytest.raises(NotImplementedError):
        Silent(4, 1)(torch.ones(2, 3, 8))


def test_a_copy_has_no_part_in_passes_of_the_original() -> None:
    gate = SigmoidGate(8, 4, 2)
    gate.pending, gate.seen, gate.ran_in_backward = [torch.ones(1)], torch.ones(1), True
    other = copy.deepcopy(gate)
    assert (other.pending, other.seen, other.ran_in_backward) == ([], None, False)


@pytest.mark.parametrize("name", GATES)
def test_entropy_is_a_mean_over_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    seen: list[Tensor] = []
    entr = torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda p: seen.append(entr(p)) or seen[-1])
    statistics = statistics_of(gate, torch.randn(3, 5, WIDTH, dtype=torch.float64))
    (entropies,) = seen
    assert float(gate.num_tokens(statistics)) == pytest.approx(15)
    assert load_of(gate, statistics).entropy == pytest.approx(float(entropies.sum(-1).mean()))
