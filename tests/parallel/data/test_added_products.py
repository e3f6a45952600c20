"""Compiled layers add to the gradients of matrices in place: the same gradients, where autograd gets none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from echelon.launching import Ranks
from echelon.parallel.data import added_products
from echelon.parallel.data.added_products import accumulate_compiled, add_products
from echelon.parallel.data.grad_accumulation import Accumulation, hook_before
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.contract import judge
from tests.cases import adamw, mean_loss
from tests.engine.test_compiling import backend
from tests.engine.test_compiling import train as train_compiled
from tests.parallel.data.test_grad_accumulation import batches, small
from tests.parallel.data.test_grad_accumulation_training import Cut, Wide, count_sums, vectors


class Transposed(nn.Module):
    """A matrix of [inputs, outputs], and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = (nn.Parameter(torch.randn(4, size).double()) for size in (3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.twice) @ self.twice @ self.once


@pytest.fixture(autouse=True)
def every_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_products, "SMALLEST", 0)


def compiled(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def divide(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        add_products(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, *args, **options)

    torch._dynamo.reset()
    compilers = dict.fromkeys(("fw_compiler", "bw_compiler"), boxed_nop)
    backend = aot_autograd(**compilers, partition_fn=divide, decompositions=select_decomp_table())
    run: Callable[[Tensor], Tensor] = torch.compile(layer, backend=backend)
    return run


def opened(layer: nn.Module) -> Accumulation:
    accumulation = Accumulation()
    accumulate_compiled(dict.fromkeys(layer.parameters(), accumulation))
    accumulation.is_open = True
    return accumulation


def seen_by_autograd(layer: nn.Module) -> dict[str, list[bool]]:
    """For each parameter, whether autograd got a gradient in each backward pass."""
    seen: dict[str, list[bool]] = {}
    for name, parameter in layer.named_parameters():
        got = seen[name] = []
        hook_before(parameter, lambda gradient, got=got: got.append(gradient is not None))
    return seen


def train(run: Callable[[Tensor], Tensor], number: int = 3) -> None:
    for batch in batches(2, 4, number=number):
        run(batch).square().sum().backward()


def assert_same(layer: nn.Module, other: nn.Module) -> None:
    train(other)
    for parameter, expected in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_autograd_gets_the_first_gradient_of_a_matrix_alone(bias: bool) -> None:
    layer = small(bias=bias)
    other, seen = copy.deepcopy(layer), seen_by_autograd(layer)
    opened(layer)
    train(compiled(layer))
    for name, got in seen.items():
        assert got == ([True, False, False] if "weight" in name else [True] * 3)
    assert_same(layer, other)


def test_a_transposed_matrix_is_added_to_and_one_of_two_products_is_not() -> None:
    layer = Transposed()
    other, seen = copy.deepcopy(layer), seen_by_autograd(layer)
    opened(layer)
    train(compiled(layer))
    assert seen == {"once": [True, False, False], "twice": [True] * 3}
    assert_same(layer, other)


def test_who_waits_for_a_gradient_gets_it() -> None:
    """A reduction, in the last backward pass; a hook of the user, in all."""
    layer = small()
    other, seen = copy.deepcopy(layer), seen_by_autograd(layer)
    accumulation = opened(layer)
    heard: list[Tensor] = []
    layer[0].weight.register_hook(heard.append)
    run = compiled(layer)
    train(run)
    accumulation.is_open = False
    train(run)
    assert len(heard) == 6
    assert seen["2.weight"] == [True, False, False, True, True, True]
    train(other)
    assert_same(layer, other)


def test_a_gradient_that_the_caller_asks_for_is_returned() -> None:
    layer = small()
    opened(layer)
    run = compiled(layer)
    train(run)
    (batch,) = batches(2, 4, number=1)
    before = layer[0].weight.grad.clone()
    (gradient,) = torch.autograd.grad(run(batch).square().sum(), layer[0].weight)
    (expected,) = torch.autograd.grad(layer(batch).square().sum(), layer[0].weight)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(layer[0].weight.grad, before)


# Trainings, with matrices that are just large enough.


def count_compiled(plan: str) -> tuple[int, int]:
    with backend("aot_eager"):
        return count_sums(f"{plan} compile=true", Wide)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        ("microbatches=4", (6, 8)),  # as many as are not compiled
        ("data=2 microbatches=4", (4, 8)),
        ("data=2 microbatches=4 zero=2", (0, 0)),
    ],
)
def test_sums_are_made_in_place_where_no_one_waits(
    plan: str, asked: tuple[int, int], warm_ranks: Callable[[int], Ranks]
) -> None:
    ranks = Plan.parse(plan).ranks
    assert warm_ranks(ranks).run(count_compiled, plan) == [asked] * ranks


@pytest.mark.slow_cases(
    "Wide-data=2 microbatches=4 zero=1",
    "Wide-data=2 microbatches=4 zero=3",
    "Wide-microbatches=4 recompute=full",
    "Wide-microbatches=4 recompute=selective",
    "Cut-pipeline=2 schedule=1f1b microbatches=4",
)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Wide, "data=2 microbatches=4"),
        (Wide, "data=2 microbatches=4 zero=1"),
        (Wide, "data=2 microbatches=4 zero=3"),
        (Wide, "microbatches=4 recompute=full"),
        (Wide, "microbatches=4 recompute=selective"),
        (Cut, "pipeline=2 schedule=1f1b microbatches=4"),
    ],
)
def test_trainings_are_equal_to_one_device(
    model: type[nn.Module], plan: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    case = Case(model, vectors, mean_loss, adamw, steps=3)
    ranks = warm_ranks(Plan.parse(plan).ranks)
    verdict = judge(case, ranks.run(train_compiled, case, f"{plan} compile=true", "aot_eager"))
    assert verdict.equal, str(verdict)
