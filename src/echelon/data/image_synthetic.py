"""Images that are drawn and not stored: four shapes in two kinds of colour, for a job without data.

Every image is a function of its number. Place, size, angle, shades and noise are random, and the background
has both kinds of colour, so that neither the mean of an image nor a single pixel tells its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.data.image_decoding import Pixels
from echelon.data.sampler import Split

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
    """Draw images of these numbers and classes."""
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
