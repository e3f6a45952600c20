"""Matrices that add to their gradients in place: the same gradients, no memory of their own, and whoever
wants to hear of a gradient does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from echelon.nn.wrapping import Wrapping, find_wrapper
from echelon.parallel.data import grad_accumulation
from echelon.parallel.data.buckets import set_gradient_dtype
from echelon.parallel.data.grad_accumulation import (
    AccumulatingLinear,
    Accumulation,
    accumulate_in_place,
    hook_gradient,
)
from tests.cases import stop

WIDTH = 512  # a square of it is just large enough

SMALLEST = grad_accumulation.SMALLEST  # as it is, where a fixture has it 0


def small(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias), nn.Tanh(), nn.Linear(3, 5, bias)).double()


def opened(model: nn.Module, wrapping: Wrapping | None = None) -> Accumulation:
    accumulation = Accumulation()
    accumulations = dict.fromkeys(model.parameters(), accumulation)
    accumulate_in_place(model, accumulations, wrapping or Wrapping())
    accumulation.is_open = True
    return accumulation


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_accumulation, "SMALLEST", 0)


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    for batch in batches:
        model(batch).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def batches(*shape: int, number: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(number)]


class Shapes(TorchDispatchMode):
    """Which operations made something of this shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.found = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and tuple(made.shape) == self.shape:
            self.found.append(func.overloadpacket.__name__)
        return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)])
def test_gradients_are_the_same(shape: tuple[int, ...], bias: bool) -> None:
    plain, added = small(bias=bias), small(bias=bias)
    opened(added)
    for one, other in zip(train(plain, batches(*shape)), train(added, batches(*shape)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_so_are_those_of_inputs_and_of_shared_weights() -> None:
    plain, added = small(), small()
    for model in (plain, added):
        model.append(nn.Linear(5, 4, bias=False).double())
        nn.init.ones_(model[3].weight)
        model.append(model[0])  # used twice
    opened(added)
    given = [batches(7, 4)[0].requires_grad_() for _ in range(2)]
    for model, x in zip((plain, added), given, strict=True):
        train(model, [x, x])
    for one, other in zip([*plain.parameters(), given[0]], [*added.parameters(), given[1]], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)


def test_a_sum_takes_no_memory_of_its_own() -> None:
    model = small()
    accumulation = opened(model)
    shape = (3, 4)
    first, *others = batches(7, 4)
    train(model, [first])
    with Shapes(shape) as seen:
        train(model, others)
    assert [name for name in seen.found if name != "t"] == ["addmm_"] * len(others)
    accumulation.is_open = False
    with Shapes(shape) as seen:
        train(model, others)
    assert "mm" in seen.found
    assert "addmm_" not in seen.found


def test_the_first_gradient_is_taken_as_it_comes() -> None:
    model = small()
    opened(model)
    with Shapes((3, 4)) as seen:
        train(model, batches(7, 4, number=1))
    assert [name for name in seen.found if name not in ("t", "detach")] == ["mm"]


@pytest.mark.parametrize("listen", [nn.Parameter.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_who_listens_hears_of_every_gradient(listen: Callable[..., Any]) -> None:
    model, heard = small(), list[bool]()
    opened(model)
    listen(model[0].weight, lambda tensor: heard.append(tensor is not None))
    train(model, batches(7, 4))
    assert heard == [True] * 4, "and is given it"


def test_unless_it_need_not_hear_of_sums() -> None:
    model = small()
    opened(model)
    hook_gradient(model[0].weight, lambda _: None)
    train(model, batches(7, 4, number=1))
    with Shapes((3, 4)) as seen:
        train(model, batches(7, 4, number=1))
    assert "addmm_" in seen.found


def test_gradients_for_others_are_theirs_alone() -> None:
    model = small()
    opened(model)
    before = [gradient.clone() for gradient in train(model, batches(7, 4))]
    x = batches(7, 4)[0].requires_grad_()
    weight = model[0].weight
    found = torch.autograd.grad(model(x).sum(), [x, weight])
    wanted = torch.autograd.grad(small()(x).sum(), x)
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1].shape == weight.shape
    model(x).sum().backward(inputs=[x])
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other.grad)


def test_gradients_of_gradients_are_the_same() -> None:
    plain, added = small(), small()
    opened(added)
    for model in (plain, added):
        train(model, batches(7, 4))  # so that there is something to add to
        x = batches(7, 4)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    for one, other in zip(plain.parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own way to dual numbers
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_more_than_a_product_is_left_to_torch() -> None:
    model = small().float()
    opened(model)
    x = torch.randn(7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x[0]).shape == (5,)
    assert model[0](input=x).shape == (7, 3)
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slopes = torch.func.grad(lambda parameters: torch.func.functional_call(model, parameters, x).sum())(
        weights
    )
    assert set(slopes) == set(weights)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent is not None
    nested = torch.nested.nested_tensor([x, x[:3]])
    assert [len(part) for part in model[0](nested).unbind()] == [7, 3]


def test_several_gradients_at_once_are_the_same() -> None:
    """As vectorize=True asks for them."""
    x = batches(7, 4)[0].requires_grad_()
    found = []
    for model in (small(), small()):
        if found:
            opened(model)
        y = model(x)
        directions = torch.eye(y.numel(), dtype=torch.float64).view(-1, *y.shape)
        found.append(torch.autograd.grad(y, x, directions, is_grads_batched=True)[0])
    torch.testing.assert_close(found[0], found[1])


def test_where_no_gradient_comes_there_is_none() -> None:
    model = small()
    opened(model)
    for x in batches(7, 4):
        (stop(model(x)).sum() + 0 * x.requires_grad_().sum()).backward()
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_gradients_that_no_one_wants_are_not_computed() -> None:
    model = small()
    opened(model)
    x = batches(7, 4)[0].requires_grad_()
    y = model(x).sum()
    with Shapes((3, 4)) as seen:
        torch.autograd.grad(y, x)
    assert "mm" not in seen.found


def test_a_matrix_that_is_frozen_meanwhile_gets_no_more() -> None:
    model = small()
    opened(model)
    (before,) = [gradient.clone() for gradient in train(model, batches(7, 4))[:1]]
    y = model(batches(7, 4)[0]).sum()
    model[0].weight.requires_grad_(False)
    y.backward()
    assert torch.equal(model[0].weight.grad, before)


def test_the_weight_of_a_first_layer_may_change_before_its_backward() -> None:
    model = small()[:1]
    opened(model)
    y = model(batches(7, 4)[0]).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    y.backward()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
def test_layers_that_the_user_compiles_share_their_code() -> None:
    """Each was compiled again, until torch gave up."""
    torch._dynamo.reset()
    frames = CompileCounter()
    blocks = nn.Sequential(*(Block() for _ in range(6)))
    opened(blocks)
    for block in blocks:
        block.compile(backend=frames)
    for _ in range(2):
        blocks(torch.randn(7, 4)).sum().backward()
    assert frames.frame_count <= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_changes_in_place_work(reentrant: bool) -> None:
    plain, added = small(), small()
    opened(added)
    for model in (plain, added):
        for x in batches(7, 4):
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=reentrant)
            model[2](hidden.relu_()).sum().backward()
    for one, other in zip(plain.parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=1e-14)


def test_a_frozen_matrix_stays_so() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    opened(model)
    train(model, batches(7, 4))
    assert model[0].weight.grad is None


def test_a_copy_has_weights_of_its_own() -> None:
    model = small()
    opened(model)
    other = copy.deepcopy(model)
    train(other, batches(7, 4))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_it_can_be_undone() -> None:
    model = small()
    opened(model)
    wrapping = Wrapping()
    again = opened(model, wrapping)
    wrapper = find_wrapper(model[0], AccumulatingLinear)
    assert wrapper is not None
    assert wrapper.accumulation is again  # the engine before was not closed: the last one has the model
    wrapping.remove()
    assert all("forward" not in vars(module) for module in model)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_only_plain_matrices_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(Own(4, 4), normed, nn.LazyLinear(4), nn.Linear(4, 4), nn.Linear(4, 40))
    monkeypatch.setattr(grad_accumulation, "SMALLEST", 160)
    accumulate_in_place(model, dict.fromkeys(model.parameters(), Accumulation()), Wrapping())
    assert ["forward" in vars(module) for module in model] == [False, False, False, False, True]


def test_matrices_of_bf16_with_float32_gradients_are_left_to_autograd() -> None:
    model, wrapping = nn.Linear(4, 4, bias=False).bfloat16(), Wrapping()
    set_gradient_dtype(model.weight, in_float32=True)
    accumulation = opened(model, wrapping)
    assert find_wrapper(model, AccumulatingLinear) is None
    for factor in (1.0, 2.0**-9):
        model(torch.full((1, 4), factor, dtype=torch.bfloat16)).sum().backward()
        with torch.no_grad():
            assert not accumulation.may_add(model.weight)
    assert model.weight.grad is not None
    assert model.weight.grad.unique().tolist() == [1 + 2.0**-9]


def test_a_matrix_of_2_to_the_18_elements_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_accumulation, "SMALLEST", SMALLEST)
    assert grad_accumulation._is_large_linear(nn.Linear(2**9, 2**9))
    assert not grad_accumulation._is_large_linear(nn.Linear(2**9, 2**9 - 1))


def test_a_product_of_16_bits_is_added_to_a_float32_sum_without_being_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an operation that torch has on CUDA devices alone; see tests/gpu."""

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total
        assert out_dtype == out.dtype
        return out.add_(left.to(out_dtype) @ right.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    total, left, right = torch.ones(2, 2), torch.full((2, 1), 1 + 2.0**-7), torch.full((1, 2), 1 + 2.0**-7)
    grad_accumulation.add_product(total, left.bfloat16(), right.bfloat16())
    assert torch.equal(total, torch.full((2, 2), 1 + (1 + 2.0**-7) ** 2))


def test_on_a_cpu_matrices_of_16_bits_with_float32_sums_are_left_to_autograd() -> None:
    """Which adds the product itself, where it keeps products."""
    model = nn.Linear(4, 4).bfloat16()
    set_gradient_dtype(model.weight, in_float32=True)
    opened(model)
    assert find_wrapper(model, AccumulatingLinear) is None
