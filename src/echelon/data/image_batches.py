"""Labelled images by name, and the global batches of them: which images, how cut, as which numbers.

A batch depends only on (seed, step, row), so every layout sees the same batches.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.data.image_decoding import Pixels
from echelon.data.image_folder import FolderImages, open_image_folder
from echelon.data.image_synthetic import CLASS_NAMES, SyntheticImages
from echelon.data.sampler import SPLITS, order_samples, rows_of_part
from echelon.errors import did_you_mean, raise_errors
from echelon.nn.losses import IGNORED_TARGET

SYNTHETIC = "synthetic"
MEAN, SPREAD = 0.5, 0.25  # of a pixel from 0 to 1: what the model sees has about mean 0 and variance 1


class Images(Protocol):
    """Square images by number, a little larger than those that a model sees."""

    @property
    def side(self) -> int: ...
    @property
    def labels(self) -> npt.NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def pixels(self, indices: Sequence[int]) -> Pixels: ...


@dataclass(frozen=True)
class TrainingImages:
    """The global batches to train on: images [rows, 3, size, size] and labels [rows].

    In each epoch every image comes once. `augment` cuts each at a random place, and mirrors half of them.
    """

    images: Images
    batch: int
    image_size: int
    seed: int
    augment: bool = True

    def __post_init__(self) -> None:
        fix = f"lower the batch to {len(self.images)}, or add images"
        short = f"batch={self.batch}: there are {len(self.images)} images to train on; {fix}"
        raise_errors("the training images", [short] if len(self.images) < self.batch else [])

    def at(self, step: int, part: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
        """Return (images, labels) of `step`; `part=(i, n)`: the rows of replica i of n."""
        samples = step * self.batch + rows_of_part(self.batch, *part)
        indices = order_samples(samples, len(self.images), self.seed)
        squares = self.images.pixels(indices.tolist())
        cuts = [self._cut(pixels, sample) for pixels, sample in zip(squares, samples, strict=True)]
        empty = np.empty((0, 3, self.image_size, self.image_size), np.uint8)
        return to_numbers(np.stack(cuts) if cuts else empty), torch.from_numpy(self.images.labels[indices])

    def _cut(self, square: Pixels, sample: int) -> Pixels:
        if not self.augment:
            return middle(square, self.image_size)
        random = np.random.default_rng([self.seed, int(sample)])
        top, left = random.integers(0, self.images.side - self.image_size + 1, size=2)
        cut = square[:, top : top + self.image_size, left : left + self.image_size]
        return cut[:, :, ::-1] if random.random() < 0.5 else cut


@dataclass(frozen=True)
class ValidationImages:
    """All images to validate on, in batches of one size: the last one is filled up with images whose label
    does not count, so that every replica has some."""

    images: Images
    batch: int
    image_size: int

    @property
    def num_batches(self) -> int:
        return -(-len(self.images) // self.batch)

    def at(self, index: int, part: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
        """Return (images, labels) of batch `index`; `part=(i, n)`: the rows of replica i of n."""
        places = index * self.batch + rows_of_part(self.batch, *part)
        counts = places < len(self.images)
        places = np.where(counts, places, 0)
        squares = self.images.pixels(places.tolist())
        labels = np.where(counts, self.images.labels[places], IGNORED_TARGET)
        return to_numbers(middle(squares, self.image_size)), torch.from_numpy(labels)


def middle(square: Pixels, size: int) -> Pixels:
    """Cut out the middle of images."""
    start = (square.shape[-1] - size) // 2
    return square[..., start : start + size, start : start + size]


def to_numbers(pixels: Pixels) -> Tensor:
    """Convert bytes to the numbers that a model sees."""
    return (torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255 - MEAN) / SPREAD


class ImageData(NamedTuple):
    """Images to train on and to validate on, and what their labels mean."""

    name: str
    class_names: tuple[str, ...]
    training: Images
    validation: Images

    def errors(self) -> list[str]:
        """Decode the images, and list the errors of those that cannot be used."""
        splits = (self.training, self.validation)
        return [error for of in splits if isinstance(of, FolderImages) for error in of.errors()]


def open_images(
    source: str, image_size: int, *, validation_fraction: float, known: Sequence[str] = ()
) -> ImageData:
    """Open "synthetic", or a folder with one folder for each class.

    validation_fraction  of a folder: about this part is for validation. The synthetic images have their own.
    known                class names of weights: labels count classes as these do, and others are refused.
    """
    side = image_size + max(1, image_size // 8)  # training cuts its images from squares that are larger
    classes = tuple(known)
    if source == SYNTHETIC:
        raise_errors(f"images '{source}'", _unknown(CLASS_NAMES, classes))
        classes = classes or CLASS_NAMES
        return ImageData(SYNTHETIC, classes, *(SyntheticImages(split, side, classes) for split in SPLITS))
    folder = open_image_folder(Path(os.path.expanduser(source)))
    raise_errors(f"image folder '{source}'", _unknown(folder.class_names, classes))
    numbered = folder.numbered_as(classes) if classes else folder
    training, validation = (numbered.split(split, validation_fraction, side) for split in SPLITS)
    return ImageData(folder.name, numbered.class_names, training, validation)


def _unknown(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """List the classes that weights do not know; all are known where `known` is empty."""
    return [
        f"class '{name}' is not a class of the weights{did_you_mean(name, known)}"
        for name in names
        if known and name not in known
    ]
