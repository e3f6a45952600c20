"""What gates and experts are unless they are told, how they start, and which options make a loss."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.nn.experts import (
    ExpertChoiceGate,
    Experts,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    activation,
    grouped,
    sorting,
)
from echelon.nn.experts.overlap import beside, run_beside


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


def test_scores_of_a_sigmoid_gate_by_hand() -> None:
    gate = SigmoidGate(2, 2, 1, normalize=False, scale=3.0)
    gate.weight.data = torch.eye(2)
    routing = gate(torch.tensor([[[0.0, 1.0]]]))
    assert routing.indices.tolist() == [[1]]
    assert routing.weights.item() == pytest.approx(3 * torch.tensor(1.0).sigmoid().item())
    gate.train()
    gate(torch.tensor([[[0.0, 1.0]]]))
    assert gate.seen is not None
    gate.after_step(gate.seen)
    assert gate.e_score_correction_bias.tolist() == pytest.approx([0.001, -0.001])
    assert gate.double().e_score_correction_bias.dtype == torch.float64
    assert gate.float().e_score_correction_bias.dtype == torch.float32
    bias = gate.e_score_correction_bias
    gate.to(torch.float32)
    assert torch.equal(gate.e_score_correction_bias, bias)


@pytest.mark.parametrize(("chosen", "is_right"), [(4.0, True), (4.1, False), (0.1, True), (0.0, False)])
def test_how_many_experts_choose_a_token(chosen: float, is_right: bool) -> None:
    if is_right:
        assert ExpertChoiceGate(8, 4, chosen_per_token=chosen).chosen_per_token == chosen
    else:
        with pytest.raises(UserError, match="chosen_per_token"):
            ExpertChoiceGate(8, 4, chosen_per_token=chosen)


class Kernels:
    """Notes what would run on a device."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.calls.append((name, *given))
            return (name, None, None) if name == "activation_gradients" else name

        return call


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    for module in (activation, sorting, grouped):
        monkeypatch.setattr(module, "kernels_for", lambda _: made)
    return made


def test_a_device_runs_kernels(kernels: Kernels) -> None:
    rows, slots = torch.ones(4, 2), sorting.sort_slots(torch.tensor([[0, 1], [1, 0]]), 2)
    weights = torch.ones(4)
    found: list[Any] = [
        activation.activate(rows, weights, "gelu"),
        activation.activation_gradients(rows, rows, weights, "gelu", with_hidden=True).rows,
        sorting.gather_rows(rows, slots),
        sorting.sum_slots(rows, slots),
    ]
    assert found == ["activate", "activation_gradients", "gather_rows", "sum_slots"]
    assert [call[0] for call in kernels.calls] == found
    assert kernels.calls[1][-1] is True
    assert kernels.calls[2][-1] == 2, "slots of a token"


@pytest.mark.parametrize("num_experts", [1000, 1001])
def test_torch_s_grouped_product_takes_a_thousand_experts(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, num_experts: int
) -> None:
    import sys

    native, own = Kernels(), Kernels()
    monkeypatch.setitem(sys.modules, "echelon.nn.experts.grouped_kernel", own)
    monkeypatch.setattr("echelon.nn.experts.grouped_kernel", own, raising=False)
    monkeypatch.setattr(grouped, "is_native", lambda *_: True)
    monkeypatch.setattr(grouped, "_grouped_product", lambda: lambda *_, offs: native.product(offs))
    ends = torch.zeros(num_experts, dtype=torch.int32)
    rows, matrices = torch.ones(2, 2), torch.ones(num_experts, 2, 3)
    products: list[Any] = [grouped.multiply(rows, matrices, ends), grouped.outer(rows, rows, ends)]
    if num_experts == 1000:
        assert products == ["product", "product"]
        assert (len(native.calls), own.calls) == (2, [])
        assert [call[:2] for call in kernels.calls] == [("clear_tail", "product"), ("clear_empty", "product")]
    else:
        assert (products, native.calls) == (["multiply", "outer"], [])
        assert [call[0] for call in own.calls] == ["multiply", "outer"]
        assert [call[:2] for call in kernels.calls] == [("clear_tail", "multiply")]


@pytest.mark.parametrize(
    ("capability", "is_there"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_devices_with_a_grouped_product(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_there: bool
) -> None:
    monkeypatch.setattr(grouped, "_capability", lambda _: capability)
    operand: Any = SimpleNamespace(device="cuda:0")
    monkeypatch.setattr(grouped, "_is_aligned", lambda each: each is operand)
    assert grouped.is_native(operand, operand) is is_there
    assert not grouped.is_native(operand, None)  # type: ignore[arg-type]


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
