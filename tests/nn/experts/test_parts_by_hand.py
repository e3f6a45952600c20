"""The small parts of gates and experts, in numbers that one can check by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.experts import Gate, SoftmaxGate
from echelon.nn.experts.activation import activate, activation_gradients
from echelon.nn.experts.backend import kernels_for, sum_dtype
from echelon.nn.experts.capacity import capacity_of, over_capacity
from echelon.nn.experts.gates import gate_checks
from echelon.nn.experts.gates.choice import largest
from echelon.nn.experts.gates.noisy_choice import choose_noisily
from echelon.nn.experts.grouped import _is_aligned, multiply, outer
from echelon.nn.experts.losses import cv_squared, no_row, switch_balance, z_row
from echelon.nn.experts.positions import WHOLE, Positions, as_samples, router_dtype
from echelon.nn.experts.recording import (
    after_step,
    auxiliary_loss,
    current_recorder,
    gates_of,
    record,
    recording,
)


def test_balancing_losses() -> None:
    assert cv_squared(torch.tensor([3.0, 3.0, 3.0])) == 0
    assert cv_squared(torch.tensor([1.0, 3.0])).item() == pytest.approx(1 / 4)  # Var 1, Mean 2
    assert cv_squared(torch.zeros(4)) == 0
    uniform = torch.full((4,), 2.0)
    assert switch_balance(uniform, torch.full((4,), 2.0), torch.tensor(8.0)).item() == pytest.approx(1)
    one = torch.tensor([8.0, 0.0, 0.0, 0.0])
    assert switch_balance(one, one, torch.tensor(8.0)).item() == pytest.approx(4)
    row = z_row(torch.zeros(2, 3, 4))
    assert row.shape == (2, 3, 4)
    assert row.sum(-1)[0, 0].item() == pytest.approx(math.log(4) ** 2)
    assert (no_row(torch.ones(2, 3, 4)).shape, no_row(torch.ones(2, 4)).any().item()) == ((2, 3, 4), False)


def test_capacities() -> None:
    assert (capacity_of(1.0, 8, 2, 4), capacity_of(1.25, 8, 2, 4), capacity_of(1.0, 7, 2, 4)) == (4, 5, 4)
    first = torch.tensor([[[0, 1], [0, 1], [0, 2], [1, 2]]])
    assert over_capacity(first, 2).tolist() == [
        [[False, False], [False, True], [True, False], [False, False]]
    ]
    assert not over_capacity(first, 3).any()
    assert over_capacity(first, 0).all()


def test_of_equal_scores_the_first_is_chosen() -> None:
    assert largest(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert largest(torch.zeros(2, 4), 2).tolist() == [[0, 1], [0, 1]]


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
    assert [sum_dtype(dtype) for dtype in types] == [*[torch.float32] * 3, torch.float64]
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
    found = getattr(gate_checks, errors)
    assert [list(found(*given)) for given in right] == [[] for _ in right]
    assert [len(list(found(*given))) for given in wrong] == [1 for _ in wrong]


def test_numbers_and_weights_of_losses() -> None:
    assert list(gate_checks.size_errors(a=1, b=10)) == []
    assert [e.partition("=")[0] for e in gate_checks.size_errors(a=0, b=1.0, c=True)] == ["a", "b", "c"]  # type: ignore[arg-type]
    assert list(gate_checks.weight_errors(a=0.0, b=2.5)) == []
    wrong = {"a": -0.1, "b": math.inf, "c": math.nan}
    assert [e.partition("=")[0] for e in gate_checks.weight_errors(**wrong)] == ["a", "b", "c"]


def test_a_noisy_choice_by_hand() -> None:
    clean, spread = torch.tensor([[1.0, 3.0, 2.0]]).double(), torch.zeros(1, 3).double()
    plain = choose_noisily(clean, spread, None, 2)
    assert (plain.indices.tolist(), plain.load.tolist()) == ([[1, 2]], [[0, 1, 1]])
    assert plain.weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    noisy = choose_noisily(clean, spread, torch.tensor([[4.0, 0.0, 0.0]]), 1)
    deviation = math.log(2)
    assert noisy.indices.tolist() == [[0]]
    second, first = 3.0, 1 + 4 * deviation
    expected = [(1 - second) / deviation, (3 - first) / deviation, (2 - first) / deviation]
    assert noisy.load[0].tolist() == pytest.approx([(1 + math.erf(x / 2**0.5)) / 2 for x in expected])
    everything = choose_noisily(clean, spread, torch.zeros(1, 3), 3)
    assert everything.load.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("function", ["swiglu", "gelu", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_activations_have_the_gradients_of_autograd(function: Any, weighted: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True) if weighted else None
    if function == "swiglu":
        hidden = nn.functional.silu(rows[:, :3]) * rows[:, 3:]
    else:
        hidden = nn.functional.gelu(rows) if function == "gelu" else rows * 1
    hidden = hidden if weights is None else hidden * weights[:, None]
    gradient = torch.randn_like(hidden)
    leaves = [rows] if weights is None else [rows, weights]
    expected = torch.autograd.grad(hidden, leaves, gradient)
    plain = [None if each is None else each.detach() for each in (rows, weights)]
    before = rows.detach().clone()
    assert torch.allclose(activate(plain[0], plain[1], function), hidden, atol=1e-14)  # type: ignore[arg-type]
    for with_hidden in (False, True):
        found = activation_gradients(gradient, plain[0], plain[1], function, with_hidden=with_hidden)  # type: ignore[arg-type]
        assert torch.allclose(found.rows, expected[0], atol=1e-14)
        assert (found.weights is None) is not weighted
        if found.weights is not None:
            assert torch.allclose(found.weights, expected[1], atol=1e-14)
        assert (found.hidden is None) is not with_hidden
        if found.hidden is not None:
            assert torch.allclose(found.hidden, hidden, atol=1e-14)
    assert torch.equal(rows, before), "the rows are needed again"


def test_products_by_expert() -> None:
    rows, matrices = torch.arange(10.0).view(5, 2), torch.arange(12.0).view(3, 2, 2)
    ends = torch.tensor([2, 2, 4], dtype=torch.int32)
    product = multiply(rows, matrices, ends)
    assert torch.equal(product[:2], rows[:2] @ matrices[0])
    assert torch.equal(product[2:4], rows[2:4] @ matrices[2])
    assert not product[4:].any()
    sums = outer(rows, rows + 1, ends)
    assert torch.equal(sums[0], rows[:2].T @ (rows[:2] + 1))
    assert not sums[1].any()
    assert torch.equal(sums[2], rows[2:4].T @ (rows[2:4] + 1))
    assert multiply(rows[:0], matrices, ends * 0).shape == (0, 2)
    assert (outer(rows[:0], rows[:0], ends * 0).shape, outer(rows[:0], rows[:0], ends * 0).any().item()) == (
        (3, 2, 2),
        False,
    )


def test_what_the_grouped_product_of_torch_takes() -> None:
    memory = torch.zeros(4 * 64 + 8, dtype=torch.bfloat16)
    begin = -memory.data_ptr() % 16 // 2
    rows = memory[begin : begin + 4 * 64].view(4, 64)
    assert _is_aligned(rows)
    assert _is_aligned(rows.view(4, 8, 8).transpose(1, 2))
    assert not _is_aligned(rows.float())
    assert not _is_aligned(rows[:, :4])
    assert not _is_aligned(rows[:, 1:9]), "it begins between"
    assert not _is_aligned(rows[:, ::2])
    assert not _is_aligned(memory[begin : begin + 4 * 63].view(4, 63))


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
