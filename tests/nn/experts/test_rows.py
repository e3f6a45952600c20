"""Rows are sorted by expert in the order of tokens, multiplied by their matrices, and added up again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.nn.experts import (
    compute,
    rows,
)
from echelon.nn.experts.rows import (
    _is_aligned,
    ends_of,
    gather_rows,
    multiply,
    outer,
    sort_slots,
    sort_weights,
    sum_slots,
)


def test_the_picture_of_the_module() -> None:
    slots = sort_slots(torch.tensor([[2, 0], [0, 1]]), 3)
    assert slots.order.tolist() == [1, 2, 3, 0]
    assert slots.ends.tolist() == [2, 3, 4]
    assert slots.inverse.tolist() == [[3, 0], [1, 2]]
    assert slots.ends.dtype == torch.int32


def test_dropped_slots_lie_behind_all_experts() -> None:
    slots = sort_slots(torch.tensor([[3, 1], [3, 3], [1, 0]]), 3)
    assert slots.order.tolist() == [5, 1, 4, 0, 2, 3]
    assert slots.ends.tolist() == [1, 3, 3]


def test_no_slots() -> None:
    slots = sort_slots(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert slots.ends.tolist() == [0, 0, 0]
    assert gather_rows(torch.zeros(0, 4), slots).shape == (0, 4)
    assert sum_slots(torch.zeros(0, 4), slots).shape == (0, 4)


def test_ends_of_counts() -> None:
    ends = ends_of(torch.tensor([2, 0, 3]))
    assert ends.tolist() == [2, 2, 5]
    assert ends.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_go_to_experts_and_back(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(5, (7, 3), generator=generator)
    x = torch.randn(7, 4, generator=generator).to(dtype)
    slots = sort_slots(indices, 5)
    rows = gather_rows(x, slots)
    experts = indices.flatten()[slots.order]
    assert torch.equal(experts, experts.sort().values)
    assert torch.equal(rows, x[slots.order // 3])
    assert torch.equal(sum_slots(rows, slots), (3 * x.to(torch.float64)).to(dtype))


def test_a_sum_of_slots_is_rounded_once() -> None:
    """1 + 2⁻⁸ + 2⁻⁸ in bfloat16 is 1 if each sum is rounded."""
    slots = sort_slots(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    assert sum_slots(rows, slots).item() == 1 + 2**-7


def test_weights_follow_their_slots_and_gradients_come_back() -> None:
    indices = torch.tensor([[2, 0], [0, 1], [3, 2]])
    weights = torch.arange(6.0).view(3, 2).requires_grad_()
    slots = sort_slots(indices, 3)
    ordered = sort_weights(weights, slots)
    assert ordered.tolist() == [1.0, 2.0, 3.0, 0.0, 5.0, 4.0]
    gradient: Tensor = torch.autograd.grad(ordered, weights, torch.arange(6.0) * 10)[0]
    assert gradient.tolist() == [[30.0, 0.0], [10.0, 20.0], [50.0, 40.0]]


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
    for module in (compute, rows):
        monkeypatch.setattr(module, "kernels_for", lambda *_, **__: made)
    return made


def test_a_device_runs_kernels(kernels: Kernels) -> None:
    x, slots = torch.ones(4, 2), rows.sort_slots(torch.tensor([[0, 1], [1, 0]]), 2)
    weights = torch.ones(4)
    found: list[Any] = [
        compute.activate(x, weights, "gelu"),
        compute.activation_gradients(x, x, weights, "gelu", with_hidden=True).rows,
        rows.gather_rows(x, slots),
        rows.sum_slots(x, slots),
    ]
    assert found == ["activate", "activation_gradients", "gather_rows", "sum_slots"]
    assert [call[0] for call in kernels.calls] == found
    assert kernels.calls[1][-1] is True
    assert kernels.calls[2][-1] == 4, "rows"


@pytest.mark.parametrize("num_experts", [1000, 1001])
def test_torch_s_grouped_product_takes_a_thousand_experts(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, num_experts: int
) -> None:
    native = Kernels()
    monkeypatch.setattr(rows, "is_native", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *_, offs: native.product(offs))
    ends = torch.zeros(num_experts, dtype=torch.int32)
    x, matrices = torch.ones(2, 2), torch.ones(num_experts, 2, 3)
    products: list[Any] = [rows.multiply(x, matrices, ends), rows.outer(x, x, ends)]
    calls = [(call[0], isinstance(call[1], Tensor) or call[1]) for call in kernels.calls]
    if num_experts == 1000:
        assert (products, len(native.calls)) == (["product", "product"], 2)
        assert calls == [("clear_tail", "product"), ("clear_empty", "product")]
    else:
        assert (products, native.calls) == (["multiply", "outer"], [])
        assert calls == [("multiply", True), ("clear_tail", "multiply"), ("outer", True)]


@pytest.mark.parametrize(
    ("capability", "is_there"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_devices_with_a_grouped_product(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_there: bool
) -> None:
    monkeypatch.setattr(rows, "_capability", lambda _: capability)
    operand: Any = SimpleNamespace(device="cuda:0")
    monkeypatch.setattr(rows, "_is_aligned", lambda each: each is operand)
    assert rows.is_native(operand, operand) is is_there
    assert not rows.is_native(operand, None)  # type: ignore[arg-type]
