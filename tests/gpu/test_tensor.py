"""Tensor, sequence and context parallelism on a GPU: ranks that share one, over Gloo."""

import pytest
import torch

from echelon.verify import assert_equal
from tests.parallel.tensor.models import language_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS = [
    "tensor=2",
    "tensor=2 sequence=true",
    "context=2",
    "context=2 attention=all-to-all",
    "tensor=2 context=2 sequence=true",
    "data=2 tensor=2 zero=3",
    "data=2 tensor=2 pipeline=2 zero=1 microbatches=2",
    "tensor=2 pipeline=2 schedule=zero-bubble microbatches=2",
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["gpt", "llama", "dropping"])
def test_split_layers_are_equal_to_one_device(model: str, plan: str) -> None:
    assert_equal(language_case(model), plan)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "tensor=2"),
        ("dropping", "tensor=2"),
        ("dropping", "data=2"),
        ("dropping", "tensor=2 sequence=true"),
    ],
)
def test_compiled_layers_are_equal_to_one_device(model: str, plan: str) -> None:
    assert_equal(language_case(model, steps=4), f"{plan} compile=true")
