"""None"""

import pytest

from echelon.errors import UserError
from echelon.models import ImageConfig, image_preset
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


def test_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'resnet50' is not an image preset \(did you mean 'resnet-50'\?\)"):
        image_preset("resnet50")
