"""Products in 8 bits against the same, written out; which matrices have them; what is refused."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.errors import UserError
from echelon.experts import Experts, MixtureOfExperts, SoftmaxGate
from echelon.nn import float8
from echelon.nn.float8 import Float8Linear, check_float8, check_parts, multiply_in_float8
from echelon.nn.wrapping import Wrapping, find_wrapper, is_wrapped
from echelon.plan import Plan

tools = pytest.importorskip("tests.float8", reason="torchao is not installed")

FP8 = Plan.parse("precision=fp8")
BF16_ROUNDING = 2.0**-8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with tools.emulated():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wrapped(module: nn.Module) -> nn.Module:
    multiply_in_float8(module, FP8, Wrapping())
    return module


def linear(inputs: int, outputs: int, **options: Any) -> nn.Module:
    torch.manual_seed(inputs)
    return wrapped(nn.Linear(inputs, outputs, dtype=torch.bfloat16, **options))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of a tensor in 8 bits, at the scale of its largest number."""
    scale = 2.0 ** (torch.finfo(dtype).max / x.abs().max().double()).log2().floor()
    return (x.double() * scale).to(dtype).double() / scale


def product_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    few, fewer = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight8, gradient8 = rounded(x, few), rounded(weight, few), rounded(gradient, fewer)
    product = x8 @ weight8.T if bias is None else (x8 @ weight8.T).bfloat16().double() + bias.double()
    return product, gradient8 @ weight8, gradient8.T @ x8


@pytest.mark.parametrize("rows", [32, 7])  # cuBLAS sums over multiples of 16
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_gradients_are_those_of_rounded_numbers(rows: int, bias: bool) -> None:
    module: Any = linear(48, 64, bias=bias)
    x, gradient = draw(rows, 48).requires_grad_(), draw(rows, 64, seed=1)
    output = module(x)
    output.backward(gradient)
    wanted = product_and_gradients(x.detach(), module.weight.detach(), module.bias, gradient)
    for got, exact in zip((output, x.grad, module.weight.grad), wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - exact).abs().max() <= BF16_ROUNDING * exact.abs().max()
        coarse = (got.double() - exact).norm() / exact.norm()
        assert coarse < BF16_ROUNDING  # and so not the product of numbers that were rounded otherwise:
    exact = F.linear(
        x.double(), module.weight.double(), None if module.bias is None else module.bias.double()
    )
    assert 2 * BF16_ROUNDING < (output.double() - exact).norm() / exact.norm() < 0.1
    if bias:
        assert torch.equal(module.bias.grad, gradient.sum(0))


def test_any_number_of_dims() -> None:
    module = linear(16, 32)
    x = draw(2, 3, 16)
    assert torch.equal(module(x), module(x.view(6, 16)).view(2, 3, 32))
    assert torch.equal(module(x[0, 0]), module(x[:1, 0])[0])
    assert module(x[:0]).shape == (0, 3, 32)


def test_a_number_is_rounded_alike_beside_others() -> None:
    """As the parts of a batch that microbatches and replicas see."""
    module = linear(32, 16)
    x = draw(32, 32)
    x[:16] *= 1.3  # scales of 448 over the largest number would round otherwise
    assert torch.equal(module(x), torch.cat([module(x[:16]), module(x[16:])]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """So that a step with it is seen: 8 bits would be cut off at their largest number."""
    module: Any = linear(32, 48)
    x = draw(5, 32).requires_grad_()
    gradient = draw(5, 48, seed=1)
    gradient[1, 2] = value
    module(x).backward(gradient)
    assert x.grad is not None
    assert not x.grad[1].isfinite().any()
    assert not module.weight.grad[2].isfinite().any()
    with torch.no_grad():
        x[3, 4] = value
    assert not module(x)[3].isfinite().any()


def test_a_transposed_matrix_is_one_too() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    plain: Any = linear(32, 48)
    transposed = conv1d(48, 32).bfloat16()
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.T)
        transposed.bias.copy_(plain.bias)
    wrapped(transposed)
    x = draw(5, 32)
    plain(x).square().sum().backward()
    transposed(x).square().sum().backward()
    assert torch.equal(transposed(x), plain(x))
    assert torch.equal(transposed.weight.grad, plain.weight.grad.T)


def test_a_compiled_product_is_one_graph() -> None:
    module, x = linear(32, 16), draw(5, 32)
    compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


def test_what_is_not_of_one_type_is_torchs_to_refuse() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        linear(16, 16)(draw(4, 16).float())


def test_copies_multiply_in_8_bits_too() -> None:
    module, x = linear(32, 16), draw(4, 32)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert find_wrapper(made, Float8Linear) is not None
        assert torch.equal(made(x), module(x))


# Which matrices.


class Several(nn.Module):
    """All kinds of matrices; the head has as many outputs as there are words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(96, 32), nn.Embedding(64, 32)
        self.wide, self.odd, self.narrow = nn.Linear(32, 64), nn.Linear(32, 40), nn.Linear(32, 16)
        self.replaced, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.replaced.forward = lambda x: x  # type: ignore[method-assign]
        self.experts = MixtureOfExperts(SoftmaxGate(32, 32, top_k=2), Experts(32, 32, 32))
        self.attention = nn.MultiheadAttention(32, 4)
        self.head = nn.Linear(32, 96)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if find_wrapper(module, Float8Linear)]


def test_matrices_are_wide_and_learn_and_are_no_heads_or_gates() -> None:
    """Nor are they those whose weights torch's attention reads, without a call."""
    model = Several()
    with patch.object(float8, "NARROW", 16):
        assert names_of(wrapped(model)) == ["wide"]


def test_an_engine_that_was_not_closed_leaves_none() -> None:
    model = wrapped(Several())
    multiply_in_float8(model, Plan.parse("precision=bf16"), Wrapping())
    assert not is_wrapped(model.get_submodule("wide"))


def test_the_end_of_an_engine_leaves_none() -> None:
    with Wrapping() as wrapping:
        model = Several()
        multiply_in_float8(model, FP8, wrapping)
        assert names_of(model)
    assert not names_of(model)


# Refusals.


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_torchao_must_be_there() -> None:
    float8._products.cache_clear()
    missing = ModuleNotFoundError("No module named 'torchao'")
    with patch.object(float8, "import_module", side_effect=missing):
        assert refusal(lambda: check_float8(FP8, CPU)) == (
            "precision=fp8: the products are those of torchao, which cannot be imported (No module named "
            "'torchao'); pip install 'echelon[fp8]', or use precision=bf16"
        )
        check_float8(Plan.parse("precision=bf16"), CPU)


def test_a_device_must_have_such_products() -> None:
    with patch.object(float8, "EMULATES", False), ExitStack() as stack:
        assert "precision=fp8: the device cpu has no products of 8 bits" in refusal(
            lambda: check_float8(FP8, CPU)
        )
        check_float8(Plan.parse("precision=bf16"), CPU)
        stack.enter_context(patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"))
        capability = stack.enter_context(patch.object(torch.cuda, "get_device_capability"))
        capability.return_value = (8, 0)
        assert "NVIDIA A100 has no products of 8 bits, which GPUs have from compute capability 8.9 on" in (
            refusal(lambda: check_float8(FP8, torch.device("cuda")))
        )
        capability.return_value = (8, 9)
        check_float8(FP8, torch.device("cuda"))


def test_some_matrix_must_be_wide() -> None:
    with patch.object(float8, "NARROW", 1024):
        message = refusal(lambda: wrapped(nn.Linear(2048, 1024)))
        assert "more than 1024 inputs and more than 1024 outputs, both multiples of 16" in message
        wrapped(nn.Linear(2048, 1040))


def test_parts_of_tensor_ranks_must_be_multiples_of_16() -> None:
    model = wrapped(nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48)))
    check_parts(model, FP8)
    for module in model:
        module.weight = nn.Parameter(module.weight[: module.weight.shape[0] // 2])
    message = refusal(lambda: check_parts(model, Plan.parse("tensor=2 precision=fp8")))
    assert message.startswith("1 error in precision=fp8 tensor=2:")
    assert "1: the part of a rank is 24 × 32, and products of 8 bits take multiples of 16" in message
    assert "0: " not in message
