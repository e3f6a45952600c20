"""A loss is given float32, whatever the model computes in."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon import parallelize
from echelon.models import cross_entropy
from echelon.nn.losses import total_and_count
from echelon.parallel.own_loss import in_float32
from tests.cases import sgd

HALF = torch.float16


def test_outputs_below_float32_are_converted_in_any_structure() -> None:
    seen: list[Any] = []

    def loss(output: Any, _: Any) -> Tensor:
        seen.append(output)
        return torch.zeros(())

    output = {"logits": torch.ones(2, dtype=HALF), "ids": (torch.ones(2, dtype=torch.int64),), "name": "x"}
    in_float32(loss, HALF)(output, None)
    (given,) = seen
    assert (given["logits"].dtype, given["ids"][0].dtype, given["name"]) == (torch.float32, torch.int64, "x")
    assert in_float32(loss, torch.float32) is loss
    assert in_float32(cross_entropy, HALF) is cross_entropy, "which converts in parts"


@dataclass(frozen=True)
class Prediction:
    """An output of the user's own, which torch takes for one leaf."""

    logits: Tensor
    parts: list[Any]
    name: str = "x"


def test_fields_of_dataclasses_are_converted_too() -> None:
    seen: list[Any] = []
    half = torch.ones(2, dtype=HALF, requires_grad=True)
    output = Prediction(half, [Prediction(half, []), 3])
    in_float32(lambda given, _: seen.append(given), HALF)((output,), None)
    ((given,),) = seen
    assert isinstance(given, Prediction)
    assert (given.logits.dtype, given.parts[0].logits.dtype) == (torch.float32, torch.float32)
    assert (given.parts[1], given.name) == (3, "x")
    assert given.logits.grad_fn is not None
    assert output.logits is half, "the model's own is left as it is"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_total_of_many_samples_is_not_infinite(precision: str) -> None:
    """20,000 samples, of which each loses about 8: in fp16 their sum is infinite."""

    def total(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output, target, reduction="sum"), len(target)

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    scale = 1024 if precision == "fp16" else None
    with parallelize(model, f"precision={precision}", optimizer=sgd, loss=total, loss_scale=scale) as engine:
        metrics = engine.step((torch.zeros(20_000, 2), torch.full((20_000, 1), 3.0)))
        assert not metrics.skipped
        assert metrics.loss == pytest.approx(9.0, rel=0.5)
        assert metrics.loss == pytest.approx(float((3.0 - model_bias()).square()), rel=1e-2)


def model_bias() -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(2, 1).bias.detach()


def test_a_mean_in_fp16_is_a_total_in_float32() -> None:
    total, count = total_and_count(torch.tensor(8.0, dtype=HALF), 20_000)
    assert (total.dtype, total.item(), count) == (torch.float32, 160_000.0, 20_000)
    total, count = total_and_count((torch.tensor(8.0, dtype=HALF), 3), 20_000)
    assert (total.dtype, total.item(), count) == (torch.float32, 8.0, 3)
    assert total_and_count(torch.tensor(8.0, dtype=torch.float64), 2)[0].dtype == torch.float64
