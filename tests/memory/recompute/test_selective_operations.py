"""Which operations run again, what writes, and what a product costs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.memory.recompute.selective_operations import (
    WAYS,
    Kind,
    Way,
    drops_nothing,
    is_autocast,
    kind_of,
    passes_product,
    product_cost,
    repeatable,
    returns_new_memory,
    without_autocast,
    writes,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (aten.mul.Tensor, Kind.CHEAP),
        (aten.native_layer_norm.default, Kind.CHEAP),
        (aten.native_batch_norm.default, Kind.CHEAP),
        (aten.mul_.Tensor, Kind.WRITES),
        (aten.add.out, Kind.WRITES),
        (aten.mm.default, Kind.OTHER),
        (aten.view.default, Kind.OTHER),
        (aten.bernoulli.default, Kind.OTHER),
    ],
)
def test_kinds_of_operations(operation: Any, kind: Kind) -> None:
    assert kind_of(operation) is kind


def test_a_norm_runs_again_without_its_statistics() -> None:
    given = ("x", "w", "b", "mean", "var", True, 0.1, 1e-5)
    assert repeatable(aten.native_batch_norm.default, given) == ("x", "w", "b", None, None, True, 0.1, 1e-5)
    evaluating = (*given[:5], False, *given[6:])
    assert repeatable(aten.native_batch_norm.default, evaluating) is evaluating
    assert repeatable(aten.mul.Tensor, given) is given


@pytest.mark.parametrize(
    ("function", "kwargs", "does_write"),
    [
        (Tensor.mul_, {}, True),
        (Tensor.__setitem__, {}, True),
        (Tensor.__add__, {}, False),
        (torch.add, {}, False),
        (torch.add, {"out": None}, True),
        (F.relu, {"inplace": True}, True),
        (F.relu, {"inplace": False}, False),
    ],
)
def test_what_changes_its_arguments(function: Any, kwargs: dict[str, Any], does_write: bool) -> None:
    assert writes(function, kwargs) is does_write


def test_dropouts_that_return_their_argument() -> None:
    assert drops_nothing(F.dropout, {"p": 0})
    assert drops_nothing(F.dropout, {"p": 0.5, "training": False})
    assert not drops_nothing(F.dropout, {"p": 0.5, "training": True})
    assert not drops_nothing(F.dropout, {})
    assert not drops_nothing(F.relu, {"p": 0})


def test_a_product_runs_again_for_a_sum_alone() -> None:
    (dropout,) = [each for each in WAYS if getattr(each, "__name__", "") == "drop"]
    assert passes_product(torch.add, in_sum=False)
    assert passes_product(Tensor.add, in_sum=True)
    assert (passes_product(dropout, in_sum=True), passes_product(dropout, in_sum=False)) == (True, False)
    assert not passes_product(torch.mul, in_sum=True)


def test_new_memory_or_that_of_the_argument() -> None:
    x = torch.ones(4)
    assert returns_new_memory(x * 2, (x,))
    assert not returns_new_memory(x.view(2, 2), (x,))
    assert returns_new_memory(x, (2.0,))
    assert returns_new_memory(x, (x.to_sparse(),))
    assert not returns_new_memory(x.to_sparse(), (x,))
    assert not returns_new_memory([x], (x,))


def test_what_a_product_costs() -> None:
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    single = torch.ones(3, 7)
    assert product_cost(F.linear, (x, weight), single) == pytest.approx(2 * 21 * 5 / 10)
    assert product_cost(torch.addmm, (torch.ones(7), x, weight.t()), single) == pytest.approx(2 * 21 * 5 / 10)
    assert product_cost(torch.addmm, (x,), single) == pytest.approx(2 * 21 * 5 / 10)
    assert product_cost(F.linear, (x, weight), single.bfloat16()) == pytest.approx(2 * 21 * 5 / 10)
    for num_bytes, per_flop in ((4, 1 / 12), (2, 1 / 150)):
        output: Any = SimpleNamespace(
            element_size=lambda size=num_bytes: size, numel=lambda: 21, device=torch.device("cuda")
        )
        assert product_cost(F.linear, (x, weight), output) == pytest.approx(2 * 21 * 5 * per_flop)
    meta = torch.ones(3, 7, device="meta")
    assert product_cost(F.linear, (x, weight), meta) == 2 * 21 * 5


def test_autocast_is_off_inside_and_as_it_was_afterwards() -> None:
    assert not is_autocast()
    with without_autocast():
        assert not is_autocast()
    assert not is_autocast()
    with torch.autocast("cpu"):
        assert is_autocast()
        with without_autocast():
            assert not is_autocast()
        assert is_autocast()


def test_how_functions_are_watched() -> None:
    assert WAYS[F.linear] is WAYS[torch.addmm] is Way.PRODUCT
    assert WAYS[Tensor.add] is WAYS[F.gelu] is Way.NEW
    assert WAYS[Tensor.to] is WAYS[F.silu] is Way.MAYBE_NEW
    assert WAYS[Tensor.view] is WAYS[torch.matmul] is Way.STRAIGHT
    assert F.relu not in WAYS
