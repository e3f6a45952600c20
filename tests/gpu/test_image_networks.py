"""The published networks on a GPU: a step of each, and equality with one device."""

import dataclasses
from functools import partial

import pytest
import torch

import echelon
from echelon.models import build_image, cross_entropy, image_preset
from echelon.verify import assert_equal
from tests.cases import sgd
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
    gradients near zero. In the last layers of ResNet-50 a batch norm is over seven numbers, and a difference
    in the last bit grows tenfold with each step: two steps show as much as six."""
    steps = 2 if name == "resnet-50" else 6
    case = dataclasses.replace(image_case(name, dropout=0.3, steps=steps), make_optimizer=sgd)
    assert_equal(case, "data=1 recompute=full")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_published_size_trains_and_evaluates_in_bf16(name: str) -> None:
    """A few steps on one batch bring its loss down, whatever it began with: images of noise make the outputs
    of networks without norms large."""
    torch.manual_seed(0)
    size = image_preset(name).image_size
    model = echelon.deferred(lambda: build_image(dataclasses.replace(image_preset(name), dropout=0.0)))
    make = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    with echelon.parallelize(
        model, "precision=bf16", optimizer=make, loss=cross_entropy, clip=1.0, seed=0
    ) as engine:
        batch = (torch.randn(8, 3, size, size), torch.arange(8))
        losses = [engine.step(batch).loss for _ in range(8)]
        assert 4 < losses[0] < 40
        assert losses[-1] < 0.9 * losses[0]
        evaluation = engine.evaluate(batch, num_right)
        assert evaluation.tokens == 8
        assert evaluation.measured is not None
        assert 0 <= evaluation.measured <= 1
