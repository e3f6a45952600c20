from pathlib import Path

import pytest

from echelon.data import open_images
from echelon.data.image_synthetic import CLASS_NAMES
from echelon.errors import UserError
from tests.data.image_files import two_classes


def test_classes_are_those_of_the_folder(tmp_path: Path) -> None:
    data = open_images(str(two_classes(tmp_path / "ab", 4)), 8, validation_fraction=0.5)
    assert (data.name, data.class_names) == ("ab", ("a", "b"))
    assert len(data.training) + len(data.validation) == 8
    assert data.training.side == 9
    assert data.errors() == []


def test_labels_follow_the_class_names_of_weights(tmp_path: Path) -> None:
    root = str(two_classes(tmp_path, 3))
    plain = open_images(root, 8, validation_fraction=0.0)
    data = open_images(root, 8, validation_fraction=0.0, known=("b", "x", "a"))
    assert plain.training.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.training.labels.tolist() == [2, 2, 2, 0, 0, 0]
    assert data.class_names == ("b", "x", "a")


def test_a_class_that_weights_do_not_know_is_refused(tmp_path: Path) -> None:
    root = str(two_classes(tmp_path, 1))
    with pytest.raises(UserError, match="class 'b' is not a class of the weights; known: a, cat"):
        open_images(root, 8, validation_fraction=0.0, known=("a", "cat"))
    with pytest.raises(UserError, match="class 'warm disc' is not a class of the weights"):
        open_images("synthetic", 8, validation_fraction=0.0, known=CLASS_NAMES[1:])
