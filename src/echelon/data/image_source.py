"""Labelled images by name: those of a folder, or the synthetic ones."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.data.image_batches import Images, side_to_cut_from
from echelon.data.image_folder import FolderImages, ImageFolder, open_image_folder
from echelon.data.image_synthetic import CLASS_NAMES, SyntheticImages
from echelon.errors import did_you_mean, raise_errors

SYNTHETIC = "synthetic"


class ImageData(NamedTuple):
    """Images to train on and to validate on, and what their labels mean."""

    name: str
    class_names: tuple[str, ...]
    training: Images
    validation: Images

    def errors(self) -> list[str]:
        """What is wrong with single images: decodes them."""
        return [
            error
            for images in (self.training, self.validation)
            if isinstance(images, FolderImages)
            for error in images.errors()
        ]


def open_images(
    source: str, image_size: int, *, validation_fraction: float, known: Sequence[str] = ()
) -> ImageData:
    """Open "synthetic", or a folder with one folder for each class.

    validation_fraction  of a folder: about this part is for validation. The synthetic images have their own.
    known                class names of weights: labels count classes as these do, and others are refused.
    """
    side, classes = side_to_cut_from(image_size), tuple(known)
    if source == SYNTHETIC:
        raise_errors(f"images '{source}'", _unknown(CLASS_NAMES, classes))
        classes = classes or CLASS_NAMES
        training, validation = (SyntheticImages(split, side, classes) for split in ("train", "validation"))
        return ImageData(SYNTHETIC, classes, training, validation)
    folder = open_image_folder(Path(os.path.expanduser(source)))
    raise_errors(f"image folder '{source}'", _unknown(folder.class_names, classes))
    numbered = folder.numbered_as(classes) if classes else folder
    return ImageData(folder.name, numbered.class_names, *_splits(numbered, validation_fraction, side))


def _splits(folder: ImageFolder, fraction: float, side: int) -> tuple[Images, Images]:
    return folder.split("train", fraction, side), folder.split("validation", fraction, side)


def _unknown(names: Sequence[str], known: Sequence[str]) -> list[str]:
    if not known:
        return []
    return [
        f"class '{name}' is not a class of the weights{did_you_mean(name, known)}"
        for name in names
        if name not in known
    ]
