"""Labelled images by name, and the global batches of them: which images, how cut, as which numbers.

A batch depends only on (seed, step, row), so every layout sees the same batches. A job without data has drawn
images: four shapes in two kinds of colour. Every one is a function of its number. Place, size, angle, shades
and noise are random, and the background has both kinds of colour, so that neither the mean of an image nor a
single pixel tells its class.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.data.image_folder import FolderImages, Pixels, open_image_folder
from echelon.data.sampler import SPLITS, Split, order_samples, rows_of_part
from echelon.errors import did_you_mean, raise_errors
from echelon.nn.losses import IGNORED_TARGET

SHAPES = ("disc", "square", "triangle", "cross")
COLOURS = ("warm", "cold")
CLASS_NAMES = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)
NUM_IMAGES: dict[Split, int] = {"train": 8192, "validation": 512}

_NOISE = 0.06
_BACKGROUND = 0.6  # how far its colours are from grey, as a part of those of shapes
_RANDOMS = 16  # random numbers of one image


@dataclass(frozen=True)
class SyntheticImages:
    """The drawn images of a split; image i shows class i mod 8. Labels count the classes as `class_names`."""

    split: Split
    side: int
    class_names: tuple[str, ...] = CLASS_NAMES

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        numbers = np.array([self.class_names.index(name) for name in CLASS_NAMES], dtype=np.int64)
        return numbers[np.arange(len(self)) % len(CLASS_NAMES)]

    def __len__(self) -> int:
        return NUM_IMAGES[self.split]

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Draw images by number, uint8 [len(indices), 3, side, side]."""
        kinds = np.array(indices, dtype=np.int64) % len(CLASS_NAMES)
        return draw(indices, kinds, self.split == "validation", self.side)


def draw(indices: Sequence[int], labels: npt.NDArray[np.int64], is_validation: bool, side: int) -> Pixels:
    if not len(indices):
        return np.empty((0, 3, side, side), np.uint8)
    streams = [np.random.default_rng([int(is_validation), index]) for index in indices]
    uniform = torch.from_numpy(np.stack([stream.random(_RANDOMS) for stream in streams])).float()
    noise = torch.from_numpy(np.stack([stream.standard_normal((3, side, side)) for stream in streams]))
    kinds = torch.from_numpy(labels)
    inside = _shapes(uniform, side)[torch.arange(len(kinds)), kinds // len(COLOURS)][:, None]
    front = _colours(uniform[:, 6:9], (kinds % len(COLOURS)).bool())
    back = _background(uniform[:, 9:], side)
    image = torch.where(inside, front[:, :, None, None], back) + _NOISE * noise.float()
    pixels: Pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return pixels


def _shapes(uniform: Tensor, side: int) -> Tensor:
    """Return the pixels of each of the four shapes, [images, shapes, side, side]: all have about as many."""
    line = (torch.arange(side) + 0.5) / side
    centre_x, centre_y = (0.3 + 0.4 * uniform[:, each, None, None] for each in (0, 1))
    size = 0.2 + 0.12 * uniform[:, 2, None, None]
    angle = 2 * pi * uniform[:, 3, None, None]
    x, y = line[None, None, :] - centre_x, line[None, :, None] - centre_y
    u, v = (x * angle.cos() + y * angle.sin()) / size, (y * angle.cos() - x * angle.sin()) / size
    disc = u**2 + v**2 < 1
    square = torch.maximum(u.abs(), v.abs()) < 0.89
    triangle = (v > -0.78) & (v + 3**0.5 * u.abs() < 1.55)
    cross = (torch.minimum(u.abs(), v.abs()) < 0.38) & (torch.maximum(u.abs(), v.abs()) < 1.2)
    return torch.stack([disc, square, triangle, cross], dim=1)


def _colours(uniform: Tensor, is_cold: Tensor) -> Tensor:
    """Draw warm colours, which have more red than blue, or cold ones, [images, 3]."""
    high, low, middle = 0.6 + 0.4 * uniform[:, 0], 0.4 * uniform[:, 1], 0.2 + 0.6 * uniform[:, 2]
    return torch.stack([torch.where(is_cold, low, high), middle, torch.where(is_cold, high, low)], dim=1)


def _background(uniform: Tensor, side: int) -> Tensor:
    """Shade from a warm colour at one edge to a cold one at the other, [images, 3, side, side]."""
    first, second = (_colours(uniform[:, :3], torch.full((len(uniform),), cold)) for cold in (False, True))
    line = torch.linspace(-1, 1, side)
    angle = 2 * pi * uniform[:, 3, None, None]
    across = (line[None, None, :] * angle.cos() + line[None, :, None] * angle.sin()) / 2**0.5
    share = ((1 + across) / 2)[:, None]
    colours = share * first[:, :, None, None] + (1 - share) * second[:, :, None, None]
    return 0.5 + _BACKGROUND * (colours - 0.5)


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
    start = (square.shape[-1] - size) // 2
    return square[..., start : start + size, start : start + size]


def to_numbers(pixels: Pixels) -> Tensor:
    return (torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255 - MEAN) / SPREAD


class ImageData(NamedTuple):
    """Images to train on and to validate on, and what their labels mean."""

    name: str
    class_names: tuple[str, ...]
    training: Images
    validation: Images

    def errors(self) -> list[str]:
        splits = (self.training, self.validation)
        return [error for of in splits if isinstance(of, FolderImages) for error in of.errors()]


def open_images(
    source: str, image_size: int, *, validation_fraction: float, known: Sequence[str] = ()
) -> ImageData:
    """Open "synthetic", or a folder with one folder for each class.

    Args:
        source: the name or the folder.
        image_size: the height and width of the images.
        validation_fraction: of a folder: about this part is for validation. Synthetic images have their own.
        known: class names of weights: labels count classes as these do, and others are refused.
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
