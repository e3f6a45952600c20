import pytest

from echelon.errors import UserError
from echelon.models import ImageConfig
from echelon.models.image.folder_config import config_from_json, config_to_json

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
