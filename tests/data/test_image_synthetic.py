import numpy as np

from echelon.data.image_synthetic import CLASS_NAMES, SyntheticImages


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
