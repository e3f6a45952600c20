"""The type of gradients: float32 for weights below it, and the weights' own again after a close."""

import pytest
import torch
from torch import nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.parallel.data import ParameterSet, SingleReplica
from echelon.parallel.data.grad_dtype import (
    gradient_dtype,
    restore_gradient_dtype,
    set_gradient_dtype,
    without_gradients,
)
from tests.cases import adamw, mean_loss, vectors

BF16, FP32 = torch.bfloat16, torch.float32


def single(parameter: nn.Parameter, *, in_float32: bool = True) -> SingleReplica:
    return SingleReplica(
        ParameterSet("dense", {"w": parameter}, RecordingGroup("data"), sum_in_float32=in_float32)
    )


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (BF16, FP32),
        (torch.float16, FP32),
        (FP32, FP32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
)
def test_gradients_are_at_least_float32_unless_they_are_to_be_the_same(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    for in_float32, expected in ((True, wide), (False, dtype), (True, wide)):
        set_gradient_dtype(parameter, in_float32=in_float32)
        assert gradient_dtype(parameter) == expected
        parameter.grad = None
        (3 * parameter).abs().sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.dtype == expected


def sum_of_microbatches(*, in_float32: bool) -> float:
    """The gradients of 64 microbatches: 1 first, then 2⁻⁹, of which bf16 can add none to 1."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = single(weight, in_float32=in_float32)
    sharing.start_step()
    for factor in (1.0, *[2.0**-9] * 63):
        sharing.start_backward(last=False)
        (weight * factor).sum().backward()
        sharing.finish_backward()
    sharing.reduce()
    assert weight.grad is not None
    return float(weight.grad)


def test_microbatches_add_up_without_loss() -> None:
    assert sum_of_microbatches(in_float32=True) == 1 + 63 * 2.0**-9
    assert sum_of_microbatches(in_float32=False) == 1.0


def test_two_uses_in_one_backward_pass_add_up_without_loss() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    single(weight)
    (weight.sum() + (weight * 2.0**-9).sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad) == 1 + 2.0**-9


def test_a_closed_strategy_leaves_gradients_in_the_weights_own_type() -> None:
    model = nn.Linear(2, 2).bfloat16()
    sharing = SingleReplica(ParameterSet("dense", dict(model.named_parameters()), RecordingGroup("data")))
    model(torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == FP32
    sharing.close()
    model(torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert model.weight.grad.dtype == BF16


def test_after_the_close_a_model_may_change_its_type() -> None:
    """A gradient of the earlier type would be rounded without a word."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    SingleReplica(ParameterSet("dense", dict(model.named_parameters()), RecordingGroup("data"))).close()
    model.double()
    model(torch.full((1, 1), 1 + 2.0**-40, dtype=torch.float64)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64
    assert float(model.weight.grad) == 1 + 2.0**-40


@pytest.mark.parametrize("original", [FP32, torch.float64, None])
@pytest.mark.parametrize("in_float32", [True, False])
def test_a_type_of_the_user_s_own_comes_back(original: torch.dtype | None, in_float32: bool) -> None:
    """It was lost: gradients were of the type that they were computed in."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    weight.grad_dtype = original
    single(weight, in_float32=in_float32)  # an engine that was not closed
    sharing = single(weight, in_float32=in_float32)
    assert gradient_dtype(weight) == (FP32 if in_float32 else BF16)
    sharing.close()
    assert weight.grad_dtype == original


def test_a_gradient_of_before_does_not_keep_its_type() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    weight.sum().backward()
    sharing = single(weight)
    sharing.start_step()
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    restore_gradient_dtype(weight)
    assert weight.grad is None


def test_weights_of_float32_are_left_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    gradient = weight.grad
    single(weight)
    assert weight.grad is gradient


@pytest.mark.parametrize(("choice", "size"), [("", 4), ("gradients=same", 2)])
def test_the_memory_of_gradients_is_in_the_table(choice: str, size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))
    plan = f"precision=bf16 microbatches=2 {choice}"
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss) as engine:
        engine.step(vectors(0))
        memory = engine.memory().now
    count = sum(p.numel() for p in model.parameters())
    assert (memory["parameters"], memory["gradients"]) == (2 * count, size * count)


def test_gradients_that_were_set_aside_come_back_after_an_error_too() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first.sum().backward()
    gradient = first.grad

    def fail() -> None:
        assert first.grad is None
        raise RuntimeError("failed on purpose")

    with pytest.raises(RuntimeError, match="failed on purpose"), without_gradients([first, second]):
        fail()
    assert first.grad is gradient
    assert second.grad is None
