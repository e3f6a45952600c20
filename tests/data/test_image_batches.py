from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.data import TrainingImages, ValidationImages, open_images
from echelon.data.image_batches import CLASS_NAMES, SyntheticImages
from echelon.errors import UserError
from tests.data.image_files import two_classes


@dataclass(frozen=True)
class Numbered:
    """Images whose pixels all differ, and begin with their number."""

    number: int
    side: int = 9

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.number) % 3

    def __len__(self) -> int:
        return self.number

    def pixels(self, indices: Sequence[int]) -> np.ndarray:
        base = np.arange(3 * self.side**2).reshape(3, self.side, self.side) % 200
        return np.stack([base + index for index in indices]).astype(np.uint8)


BATCHES = TrainingImages(Numbered(7), batch=5, image_size=8, seed=1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_global_batch_is_the_same_for_any_number_of_replicas(replicas: int) -> None:
    for step in range(4):
        images, labels = BATCHES.at(step)
        parts = [BATCHES.at(step, (replica, replicas)) for replica in range(replicas)]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_every_image_comes_once_in_an_epoch() -> None:
    plain = replace(BATCHES, batch=7, augment=False)
    first, second = ([image[0, 0, 0].item() for image in plain.at(step)[0]] for step in range(2))
    assert len(set(first)) == len(set(second)) == 7
    assert set(first) == set(second)
    assert first != second


def test_images_are_cut_and_mirrored_as_seed_step_and_row_say() -> None:
    many = TrainingImages(Numbered(1), batch=1, image_size=8, seed=0)
    looks = {tuple(many.at(step)[0][0, 0, 0, :2].tolist()) for step in range(60)}
    assert len(looks) == 8, "2 × 2 places, each mirrored or not"
    assert torch.equal(many.at(3)[0], many.at(3)[0])
    other = replace(many, seed=1)
    assert any(not torch.equal(many.at(step)[0], other.at(step)[0]) for step in range(8))


def test_numbers_have_about_mean_0_and_variance_1() -> None:
    class Black(Numbered):
        def pixels(self, indices: Sequence[int]) -> np.ndarray:
            return np.zeros((len(indices), 3, 9, 9), np.uint8)

    assert TrainingImages(Black(2), 2, 8, 0).at(0)[0].unique().tolist() == [-2.0]


def test_a_validation_has_every_image_once_and_fills_up_with_what_does_not_count() -> None:
    validation = ValidationImages(Numbered(7), batch=4, image_size=8)
    assert validation.num_batches == 2
    labels = torch.cat([validation.at(index, (part, 2))[1] for index in range(2) for part in range(2)])
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0, -100]
    assert validation.at(1, (1, 2))[0].shape == (2, 3, 8, 8)


def test_too_few_images_for_a_batch_are_refused() -> None:
    with pytest.raises(UserError, match="batch=8: there are 7 images to train on; lower the batch to 7"):
        TrainingImages(Numbered(7), 8, 8, 0)


def test_squares_are_larger_than_what_is_cut() -> None:
    data = [open_images("synthetic", size, validation_fraction=0.1) for size in (4, 32, 224)]
    assert [each.training.side for each in data] == [5, 36, 252]


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


def test_an_image_follows_from_its_number_alone() -> None:
    images = SyntheticImages("train", 20)
    together = images.pixels([3, 11, 3000])
    assert together.dtype == np.uint8
    assert together.shape == (3, 3, 20, 20)
    assert (images.pixels([3000])[0] == together[2]).all()
    assert (together[0] != together[1]).any(), "of one class, but not the same"
    assert images.pixels([]).shape == (0, 3, 20, 20)


def test_validation_images_are_others() -> None:
    training, validation = (SyntheticImages(split, 20) for split in ("train", "validation"))
    assert (training.pixels([5]) != validation.pixels([5])).mean() > 0.5


def test_labels_count_classes_as_they_are_given() -> None:
    assert SyntheticImages("train", 20).labels[:9].tolist() == [*range(8), 0]
    turned = SyntheticImages("train", 20, CLASS_NAMES[::-1])
    assert turned.labels[:9].tolist() == [*range(7, -1, -1), 7]
    assert (turned.pixels([2]) == SyntheticImages("train", 20).pixels([2])).all()


def test_neither_brightness_nor_mean_colour_tells_the_shape() -> None:
    images = SyntheticImages("train", 36)
    pixels = images.pixels(range(400)).reshape(50, 8, 3, -1).mean(-1)
    by_class = pixels.mean(0)
    shapes = by_class.reshape(4, 2, 3)
    assert np.ptp(shapes, axis=0).max() < 0.6 * pixels.std(0).mean()
