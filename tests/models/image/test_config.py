"""None"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from echelon.errors import UserError
from echelon.models import ImageConfig, build_image, image_preset, image_presets
from echelon.models.image.config import config_from_json, config_to_json


def test_all_errors_of_a_config_are_listed() -> None:
    with pytest.raises(UserError) as refusal:
        ImageConfig("vgg17", classes=0, image_size=2.5, divisor=True, stem="tiny", dropout=1.0)  # type: ignore[arg-type]
    text = str(refusal.value)
    for part in (
        "family='vgg17': is not known (did you mean 'vgg16'?)",
        "classes=0: must be an integer, at least 1",
        "image_size=2.5",
        "divisor=True",
        "stem='tiny'",
        "dropout=1.0: must be a number from 0 to below 1",
    ):
        assert part in text


def test_each_class_has_one_name() -> None:
    with pytest.raises(UserError, match="has 1 names; give one for each class"):
        ImageConfig("nin", classes=2, class_names=("cat",))
    with pytest.raises(UserError, match="cat is there twice"):
        ImageConfig("nin", classes=2, class_names=("cat", "cat"))


def test_channels_are_divided_but_never_gone() -> None:
    config = ImageConfig("vgg16", divisor=16)
    assert [config.channels(each) for each in (512, 24, 8)] == [32, 1, 1]


CONFIG = ImageConfig("vgg16", classes=2, image_size=64, divisor=8, dropout=0.1, class_names=("dog", "cat"))


def test_a_config_survives_its_file_with_the_order_of_its_classes() -> None:
    raw = config_to_json(CONFIG, "float32")
    assert raw["id2label"] == {"0": "dog", "1": "cat"}
    assert config_from_json(raw) == CONFIG


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "resnet"}, "must be 'echelon-image'"),
        ({"id2label": {"0": "dog", "2": "cat"}}, "id2label must name classes 0, 1, 2, …"),
        ({"id2label": ["dog", "cat"]}, "id2label must name classes"),
        ({"classes": 3}, "has 2 names"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        config_from_json({**config_to_json(CONFIG, "float32"), **change})


def test_a_missing_key_is_named() -> None:
    raw = config_to_json(CONFIG, "float32")
    del raw["stem"]
    with pytest.raises(UserError, match="stem is missing"):
        config_from_json(raw)


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


def test_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'resnet50' is not an image preset \(did you mean 'resnet-50'\?\)"):
        image_preset("resnet50")
