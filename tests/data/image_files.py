"""Small folders of images to read."""

from pathlib import Path

import numpy as np
from PIL import Image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def save_colour(path: Path, colour: tuple[int, ...] = RED, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def two_classes(root: Path, number: int = 12) -> Path:
    """`number` red images in class "a", and as many blue ones in class "b"."""
    for index in range(number):
        save_colour(root / "a" / f"{index}.png", RED)
        save_colour(root / "b" / f"{index}.png", BLUE)
    return root


def halves(left: int, right: int, dtype: type = np.uint8, size: int = 8) -> np.ndarray:
    """A grey image whose left half has one value and whose right half another."""
    values = np.full((size, size), left, dtype)
    values[:, size // 2 :] = right
    return values
