"""The published networks on a GPU: a step of each, and equality with one device."""

import dataclasses

import pytest
import torch

import echelon
from echelon.models import build_image, cross_entropy, image_preset
from echelon.verify import assert_equal
from tests.cases import adamw, sgd
from tests.models.image_cases import NETWORKS, image_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def num_right(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=-1) == labels).sum()


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks_are_equal_to_plain_torch(name: str) -> None:
    """With SGD: kernels of a GPU add in any order, and AdamW makes large what differs in the last bits of
    gradients near zero."""
    case = dataclasses.replace(image_case(name, dropout=0.3), make_optimizer=sgd)
    assert_equal(case, "data=1 recompute=full")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_published_size_trains_and_evaluates_in_bf16(name: str) -> None:
    size = image_preset(name).image_size
    model = echelon.deferred(lambda: build_image(name))
    with echelon.parallelize(model, "precision=bf16", optimizer=adamw, loss=cross_entropy, seed=0) as engine:
        batch = (torch.randn(8, 3, size, size), torch.arange(8))
        assert 4 < engine.step(batch).loss < 12  # ln 1000 = 6.9
        evaluation = engine.evaluate(batch, num_right)
        assert evaluation.tokens == 8
        assert evaluation.measured is not None
        assert 0 <= evaluation.measured <= 1
