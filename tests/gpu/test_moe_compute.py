"""Experts on a CUDA device give what they give on the CPU in float64, and wait for nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.nn.experts import Experts, MixtureOfExperts, SoftmaxGate, grouped_experts
from echelon.nn.experts.compute import Activation, routed_experts
from echelon.nn.experts.routing import largest, router_logits, top_softmax
from echelon.nn.experts.rows import is_native, multiply, outer, sort_slots, tma_kernels_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXPERTS = 8
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}
# Width and hidden: the third are not for torch's grouped product; the last, with many rows, for TMA.
SIZES = [(64, 96), (200, 136), (33, 20), (256, 192)]


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (70, 5, 2), (3000, 64, 6), (33, 1000, 16)])
def test_gates_choose_and_count_as_on_the_cpu(tokens: int, experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (tokens, experts), generator=generator) / 2  # many are equal
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40])
    place = torch.randint(40, scores.shape, generator=generator)
    scores = torch.where(place < len(special), special[place.clamp(max=len(special) - 1)], scores)
    assert torch.equal(largest(scores.cuda(), k).cpu(), largest(scores, k))
    logits = 3 * torch.randn(tokens, experts, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for shape in ((tokens, experts), (tokens, k))]
    results = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device, copy=True).requires_grad_()
        probabilities, indices, weights = top_softmax(leaf, k, normalize=True)
        total = (probabilities * gradients[0].to(device)).sum() + (weights * gradients[1].to(device)).sum()
        total.backward()
        results.append([each.detach().cpu() for each in (probabilities, indices, weights, leaf.grad)])  # type: ignore[union-attr]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:
        return None


def test_a_choice_that_no_gradient_comes_to_has_none() -> None:
    logits = torch.randn(20, 8, device="cuda", requires_grad=True)
    cut: Any = Cut.apply
    cut(top_softmax(logits, 2, normalize=True)[2]).sum().backward()
    assert logits.grad is None


def routings() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "spread": torch.randint(EXPERTS, (300, 3), generator=generator),
        "dropped": torch.randint(EXPERTS + 1, (300, 3), generator=generator),
        "many": torch.randint(EXPERTS + 1, (500, 3), generator=generator),
        "all dropped": torch.full((20, 2), EXPERTS),
        "one expert": torch.full((130, 1), 5),
        "empty experts": torch.randint(2, 4, (77, 2), generator=generator),
        "one token": torch.tensor([[6, 1]]),
        "no token": torch.zeros(0, 2, dtype=torch.int64),
    }


def draw(indices: Tensor, width: int, hidden: int, activation: Activation) -> list[Tensor]:
    torch.manual_seed(2)
    inner = hidden if activation == "gelu" else 2 * hidden
    shapes = [(len(indices), width), indices.shape, (EXPERTS, inner, width), (EXPERTS, width, hidden)]
    x, weights, first, down = (torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes)
    return [x, weights.masked_fill(indices == EXPERTS, 0), first, down]


def outputs(
    tensors: list[Tensor], indices: Tensor, activation: Activation, device: str, dtype: torch.dtype
) -> list[Tensor]:
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    x, weights, first, down = leaves
    output = routed_experts(x, indices.to(device), weights, first, down, activation)
    torch.manual_seed(3)
    gradient = torch.randn(output.shape, dtype=torch.float64).to(device, dtype)
    return [each.detach() for each in (output, *torch.autograd.grad(output, leaves, gradient))]


def error(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    assert found.isfinite().all()
    distance = (found.detach().cpu().double() - expected.detach()).norm()
    return float(distance / expected.detach().norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", torch.tanh])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("routing", routings())
def test_as_on_the_cpu(
    routing: str, size: tuple[int, int], activation: Activation, dtype: torch.dtype
) -> None:
    indices = routings()[routing]
    tensors = [tensor.to(dtype).double() for tensor in draw(indices, *size, activation)]
    expected = outputs(tensors, indices, activation, "cpu", torch.float64)
    found = outputs(tensors, indices, activation, "cuda", dtype)
    names = ("output", "x", "weights", "first", "down")
    errors = {name: error(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    assert max(errors.values()) < TOLERANCES[dtype], errors


def test_torch_multiplies_bfloat16_of_aligned_sizes() -> None:
    """On the devices for which it is fast; else the tests above would test nothing of it."""
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        pytest.skip("torch has no grouped product for this device")
    matrices = torch.zeros(4, 64, 32, device="cuda", dtype=torch.bfloat16)
    rows = torch.zeros(5, 32, device="cuda", dtype=torch.bfloat16)
    assert is_native(rows, matrices.transpose(1, 2))
    assert is_native(rows, rows)
    assert not is_native(rows[:, :31], matrices[:, :31])
    assert not is_native(rows.float(), matrices.float())


def test_many_rows_are_multiplied_by_tma_on_hopper() -> None:
    """Else the tests above would test nothing of it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    rows = torch.zeros(1500, 256, device="cuda", dtype=torch.bfloat16)
    matrices = torch.zeros(EXPERTS, 256, 192, device="cuda", dtype=torch.bfloat16)
    ends = torch.zeros(EXPERTS, device="cuda", dtype=torch.int32)
    for operand in (matrices, matrices.mT, rows):
        assert tma_kernels_for(rows, operand, ends) is not None
    assert tma_kernels_for(rows[:1000], matrices, ends) is None, "few rows"
    assert tma_kernels_for(rows, matrices[:, :200], ends) is None, "a tile of it has parts of two matrices"
    assert tma_kernels_for(rows.float(), matrices.float(), ends) is None


@pytest.mark.parametrize("counts", [[300, 0, 77, 128, 1], [0, 0, 900], [0, 0], [5]])
@pytest.mark.parametrize(("width", "hidden"), [(64, 64), (128, 136), (192, 520), (192, 512)])
def test_kernels_by_tma(width: int, hidden: int, counts: list[int]) -> None:
    """Of any number of rows: as in float64, and nothing of rows that belong to no expert."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for Hopper")
    from echelon.nn.experts import tma_kernels

    torch.manual_seed(0)
    own, ends = sum(counts), torch.tensor(counts, device="cuda").cumsum(0).int()
    rows, other = (torch.randn(own + 50, size, device="cuda").bfloat16() for size in (width, hidden))
    matrices = torch.randn(len(counts), width, hidden, device="cuda").bfloat16()
    rows[own:] = torch.nan
    expected = multiply(rows.double().cpu(), matrices.double().cpu(), ends.cpu())[:own]
    for stored in (matrices, matrices.mT.contiguous().mT):
        product = tma_kernels.multiply(rows, stored, ends)[:own]
        assert error(product, expected) < TOLERANCES[torch.bfloat16]
    products = outer(rows.double().cpu(), other.double().cpu(), ends.cpu())
    assert error(tma_kernels.outer(rows, other, ends), products) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_left_of_earlier_memory(dtype: torch.dtype) -> None:
    """Rows of no expert, and experts without rows, are 0 also where memory was not."""
    ends = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device="cuda")
    rows, matrices = torch.ones(200, 64, device="cuda"), torch.ones(4, 64, 32, device="cuda")
    for _ in range(3):
        filled = [torch.full((4, 64, 64), torch.nan, device="cuda", dtype=dtype) for _ in range(20)]
        del filled
        assert not multiply(rows.to(dtype), matrices.to(dtype), ends)[5:].any()
        products = outer(rows.to(dtype), rows.to(dtype), ends)
        assert not products[[0, 2]].any()
        assert (products[1] == 3).all()
        assert (products[3] == 2).all()


@contextmanager
def no_reads() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_layer_waits_for_nothing(dtype: torch.dtype) -> None:
    layer = MixtureOfExperts(SoftmaxGate(64, EXPERTS, 2), Experts(EXPERTS, 64, 96)).to("cuda", dtype)
    x = torch.randn(2, 50, 64, device="cuda", dtype=dtype, requires_grad=True)
    layer(x).sum().backward()  # kernels are compiled
    with no_reads():
        layer(x).sum().backward()


def test_sorted_rows_wait_for_nothing() -> None:
    counts = torch.tensor([3, 0, 5, 2], device="cuda")
    rows = torch.randn(12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first = torch.randn(4, 192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(4, 64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for context in (warnings.catch_warnings(), no_reads()):
        with context:
            output = grouped_experts(rows, counts, first, down, "swiglu")
            output.sum().backward()
    assert not output[10:].any()
    assert rows.grad is not None
    assert not rows.grad[10:].any()


def test_the_same_bits_in_every_run() -> None:
    indices = routings()["dropped"]
    tensors = draw(indices, 64, 96, "swiglu")
    first, second = (outputs(tensors, indices, "swiglu", "cuda", torch.bfloat16) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_slots_are_sorted_as_on_the_cpu() -> None:
    for indices in routings().values():
        for here, there in zip(
            sort_slots(indices.cuda(), EXPERTS), sort_slots(indices, EXPERTS), strict=True
        ):
            assert torch.equal(here.cpu(), there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_added_up_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(300, 2048, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(64, 2048, device="cuda", dtype=dtype, requires_grad=True)
    gradient = torch.randn(300, 64, device="cuda")
    logits = router_logits(x[None], weight)[0]
    expected = x.double() @ weight.double().T
    assert logits.dtype == torch.float32
    assert error(logits, expected.cpu()) < 1e-6
    found = torch.autograd.grad(logits, [x, weight], gradient)
    for one, other in zip(found, torch.autograd.grad(expected, [x, weight], gradient.double()), strict=True):
        assert error(one, other.double().cpu()) < TOLERANCES[dtype]
