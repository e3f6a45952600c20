"""The published networks on a GPU: a step of each, and equality with one device."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import echelon
from echelon.models import build_image, cross_entropy, image_preset
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.wrapping import Wrapping
from tests.cases import sgd
from tests.models.image_cases import NETWORKS, images, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


DEVICE = "cuda"


def share_right(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=-1) == labels).float().mean()


def weights_of_torch(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """After the usual loop. Masks of dropout are those of the engine."""
    key_dropout(model, Wrapping())
    optimizer = sgd(model.parameters())
    for step in range(steps):
        inputs, labels = images(step)
        with scope(seed=0, step=step, first_sample=0):
            total, count = cross_entropy(model(inputs.to(DEVICE).double()), labels.to(DEVICE))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks_are_equal_to_plain_torch(name: str) -> None:
    """With SGD: kernels of a GPU add in any order, and AdamW makes large what differs in the last bits of
    gradients near zero. In the last layers of ResNet-50 a batch norm is over seven numbers, and a difference
    in the last bit grows tenfold with each step: two steps show as much as six."""
    steps = 2
    torch.manual_seed(0)
    model = network(name, dropout=0.3).to(DEVICE).double()
    expected = weights_of_torch(copy.deepcopy(model), steps)
    with echelon.parallelize(
        model, "precision=fp64 recompute=full", optimizer=sgd, loss=cross_entropy, seed=0
    ) as engine:
        for step in range(steps):
            inputs, labels = images(step)
            engine.step((inputs.double(), labels))
        found = engine.full_state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-8, atol=1e-10)


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
        evaluation = engine.evaluate(batch, share_right)
        assert evaluation.tokens == 8
        assert isinstance(evaluation.measured, float)
        assert 0 <= evaluation.measured <= 1
