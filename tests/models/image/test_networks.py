"""The networks have the layers, parameters and work that were published."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from echelon.errors import UserError
from echelon.models import ImageConfig, build_image, image_preset, image_presets
from tests.models.image_cases import NETWORKS

# Parameters, and multiplications of a forward of one image.
PUBLISHED = {
    "alexnet": (61_100_840, 0.71e9),  # torchvision.models.alexnet
    "nin": (7_595_176, 0.97e9),  # 7.6 M: Caffe model zoo, NIN-Imagenet (whose images are 227 × 227: 1.1e9)
    "overfeat": (145_920_872, 2.81e9),  # table 1 of the paper: 145 M parameters, 2,810 M connections
    "vgg16": (138_357_544, 15.47e9),  # torchvision.models.vgg16
    "inception-v1": (6_998_552, 1.58e9),  # bvlc_googlenet of Caffe without its auxiliary classifiers
    "resnet-50": (25_557_032, 4.09e9),  # torchvision.models.resnet50
}


@pytest.mark.slow_cases("nin", "overfeat", "resnet-50")
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_work_are_as_published(name: str) -> None:
    with torch.device("meta"):
        model = build_image(name)
        images = torch.empty(1, 3, model.config.image_size, model.config.image_size)
    with FlopCounterMode(display=False) as counter:
        assert model(images).shape == (1, 1000)
    parameters, products = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert counter.get_total_flops() / 2 == pytest.approx(products, rel=0.01)


def test_every_preset_has_a_checked_size_and_a_small_one() -> None:
    assert set(image_presets()) == {*PUBLISHED, *(f"{name}-tiny" for name in PUBLISHED)}


@pytest.mark.slow_cases("nin", "overfeat", "resnet-50")
@pytest.mark.parametrize("name", PUBLISHED)
def test_small_networks_have_the_layers_of_the_large_ones(name: str) -> None:
    small, large = (image_preset(each) for each in (f"{name}-tiny", name))
    assert small.family == large.family
    with torch.device("meta"):
        model = build_image(f"{name}-tiny")
        assert len(model.layers()) == len(build_image(name).layers())
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 8)


@pytest.mark.slow_cases("resnet-50")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_loss_is_that_of_chance_and_signals_neither_die_nor_grow(name: str) -> None:
    torch.manual_seed(0)
    model = build_image(f"{name}-tiny")
    output = model(torch.randn(16, 3, 32, 32))
    loss = torch.nn.functional.cross_entropy(output, torch.arange(16) % 8)
    assert loss.item() == pytest.approx(2.08, abs=0.7)  # ln 8
    loss.backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]
    assert len(norms) == len(list(model.parameters()))
    assert all(norm > 0 for norm in norms[-2:])


def test_images_that_a_network_shrinks_away_are_refused() -> None:
    with pytest.raises(UserError, match="image_size=32 stem='published': too small for alexnet"):
        build_image(ImageConfig("alexnet", image_size=32))
