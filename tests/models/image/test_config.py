import pytest

from echelon.errors import UserError
from echelon.models import ImageConfig


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
