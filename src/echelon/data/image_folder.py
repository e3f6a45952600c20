"""A folder of images: one folder for each class, and in it, at any depth, the images of the class.

    flowers/daisy/1.jpg          hidden files and folders (.name) are skipped
    flowers/daisy/more/2.png     links that lead out of the folder are not followed
    flowers/tulip/3.webp

Which images are for validation is decided by the hash of their names: the same on every machine, and an image
stays where it is when others are added. Where the hashes leave no image of a class to train on, the one with
the largest hash is trained on.

Pillow decodes. What it would convert wrongly in silence is converted here: 16-bit images are scaled and not
clipped, transparent pixels become white, and the rotation that a camera noted (EXIF) is applied. An image is
resized so that its shorter edge is `side`, and its middle is taken.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echelon.data.documents import unreadable
from echelon.data.sampler import Split
from echelon.errors import UserError, raise_errors

if TYPE_CHECKING:
    from PIL.Image import Image


Pixels = npt.NDArray[np.uint8]

MOST_STRETCHED = 20  # the longer edge of an image, in shorter edges: the middle of a strip shows nothing
_JPEG_END, _TAIL = b"\xff\xd9", 2**16  # the marker of its end, and how many last bytes have it


def decode_image(path: Path, side: int) -> Pixels:
    """Decode the image of a file to uint8 [3, side, side]. Raises a UserError that names the file."""
    with _opened(path) as image:
        image.load()
        return _square(_to_rgb(image), side)


def check_image(path: Path, side: int) -> None:
    """Raise as `decode_image` does. Files of the usual kinds are not decoded: their headers, the checksums of
    a PNG and the end of a JPEG tell."""
    with _opened(path) as image:
        _check_mode(image)
        _check_shape(image)
        tells = image.format == "PNG" or (image.format == "JPEG" and _JPEG_END in _tail(path))
        image.verify()
    if not tells:
        decode_image(path, side)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read()


@contextmanager
def _opened(path: Path) -> Iterator["Image"]:
    """Open the image of a file; what is raised inside names the file."""
    image_module = pillow()
    try:
        with image_module.open(path) as image:
            # What Pillow itself warns of; it refuses what is twice as large.
            (width, height), most = image.size, image_module.MAX_IMAGE_PIXELS
            if most is not None and width * height > most:
                raise UserError(
                    f"is {width} × {height}, more than {most} pixels, which could be a decompression bomb; "
                    "make it smaller or remove it"
                )
            yield image
    except UserError as refusal:
        raise UserError(f"{path}: {refusal.title}") from None
    # Pillow's plugins raise almost anything for a broken file; a warning of a bomb may be an error.
    except Exception as error:
        reason = " ".join(str(error).replace(repr(str(path)), "it").split()) or type(error).__name__
        raise UserError(f"{path}: cannot be read as an image ({reason}); repair or remove it") from None


def pillow() -> Any:
    """Import Pillow's module of images, or raise an error with the fix."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading images needs Pillow, which is not installed: pip install pillow") from None
    return Image


def _to_rgb(image: "Image") -> "Image":
    """Convert the image as it is to be seen to 8-bit red, green and blue."""
    from PIL import ImageOps

    upright: Image = ImageOps.exif_transpose(image)
    _check_mode(upright)
    if upright.mode == "I" or upright.mode.startswith("I;16"):
        values = np.asarray(upright).astype(np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 0xFFFF:
            raise UserError(
                f"has integer pixels from {values.min()} to {values.max()}, and 16 bits hold 0 to 65535; "
                "save it with 8 or 16 bits"
            )
        upright = pillow().fromarray((values >> 8).astype(np.uint8))
    if "A" in upright.getbands() or "transparency" in upright.info:
        seen = upright.convert("RGBA")
        white = pillow().new("RGBA", seen.size, "white")
        upright = pillow().alpha_composite(white, seen)
    return upright.convert("RGB")


def _check_mode(image: "Image") -> None:
    if image.mode == "F":
        raise UserError(
            "has floating point pixels (mode F), whose range is not known; save it with 8 or 16 bits"
        )


def _check_shape(image: "Image") -> None:
    width, height = image.size
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise UserError(
            f"is {width} × {height}: one edge is more than {MOST_STRETCHED} times the other, and training "
            "sees only the middle; cut or remove it"
        )


def _square(image: "Image", side: int) -> Pixels:
    _check_shape(image)
    width, height = image.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    fitted = image.resize(
        (side, side), pillow().Resampling.BILINEAR, box=(left, top, left + edge, top + edge)
    )
    return np.ascontiguousarray(np.asarray(fitted, dtype=np.uint8).transpose(2, 0, 1))


MOST_ERRORS = 20  # of files, in one message
MOST_CHECKED = 20_000  # images of a split that are decoded before a training; the others are opened
LARGEST_CACHE = 2**30  # bytes of decoded images that a process keeps for each split


@dataclass(frozen=True)
class ImageFile:
    """A file by its path below the folder, and the number of its class."""

    path: str
    label: int

    @property
    def hash(self) -> int:
        """Below 2⁶⁴."""
        digest = hashlib.sha256(self.path.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class ImageFolder:
    """The contents of a folder: nothing is decoded yet. Class names and files are sorted by name."""

    root: Path
    class_names: tuple[str, ...]
    files: tuple[ImageFile, ...]

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def numbered_as(self, class_names: tuple[str, ...]) -> "ImageFolder":
        """Return the same files, with their classes counted as in `class_names`, which has all of them."""
        numbers = [class_names.index(name) for name in self.class_names]
        files = tuple(ImageFile(file.path, numbers[file.label]) for file in self.files)
        return ImageFolder(self.root, class_names, files)

    def split(self, split: Split, fraction: float, side: int) -> "FolderImages":
        hashes = {file: file.hash for file in self.files}
        last: dict[int, ImageFile] = {}  # of each class
        for file in self.files:
            last[file.label] = max(last.get(file.label, file), file, key=hashes.__getitem__)
        trained = {file for file in self.files if hashes[file] >= fraction * 2**64} | set(last.values())
        chosen = [file for file in self.files if (file in trained) == (split == "train")]
        return FolderImages(self.root, chosen, side)


def open_image_folder(root: Path) -> ImageFolder:
    """List a folder. Raises one UserError with everything that is wrong with what lies where."""
    pillow()
    raise_errors(f"image folder '{root}'", [] if root.is_dir() else ["there is no such folder"])
    errors: list[str] = []
    try:
        with os.scandir(root) as listed:
            entries = sorted((e for e in listed if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(unreadable(root, error)) from None
    class_names = [entry.name for entry in entries if entry.is_dir() and _is_inside(Path(entry.path), root)]
    files: list[ImageFile] = []
    for label, name in enumerate(class_names):
        found, problems = _files_below(root, name)
        files += [ImageFile(path, label) for path in found]
        errors += problems
        if not found and not problems:
            errors.append(f"class '{name}' has no image: add some, or remove the folder")
    loose = [entry.name for entry in entries if entry.is_file()]
    if not class_names:
        errors.append("it has no folder inside: make one for each class, with its images")
    elif len(class_names) == 1:
        errors.append(f"it has one class only, '{class_names[0]}': make a folder for each class, at least 2")
    if loose:
        shown = ", ".join(loose[:3]) + (", …" if len(loose) > 3 else "")
        errors.append(f"{len(loose)} files are in no class ({shown}): move them into the folder of a class")
    raise_errors(f"image folder '{root}'", errors)
    return ImageFolder(root, tuple(class_names), tuple(files))


class FolderImages:
    """The images of a split, decoded when they are first asked for and then kept, up to a bound."""

    def __init__(self, root: Path, files: Sequence[ImageFile], side: int) -> None:
        self._root, self._files, self.side = root, files, side
        self.labels = np.array([file.label for file in files], dtype=np.int64)
        self._kept: dict[int, Pixels] = {}

    def __len__(self) -> int:
        return len(self._files)

    def pixels(self, indices: Sequence[int]) -> Pixels:
        """Return images by number, uint8 [len(indices), 3, side, side]."""
        squares = [self._decode(index) for index in indices]
        return np.stack(squares) if squares else np.empty((0, 3, self.side, self.side), np.uint8)

    def errors(self) -> list[str]:
        """List the errors of images that cannot be used. Every image is decoded; of a large folder a part,
        spread over it, and all other files are opened."""
        errors: list[str] = []
        decoded = set(np.linspace(0, len(self) - 1, min(len(self), MOST_CHECKED)).astype(int).tolist())
        for index, file in enumerate(self._files):
            try:
                if index in decoded:
                    self._decode(index)
                else:
                    check_image(self._root / file.path, self.side)
            except UserError as refusal:
                errors.append(refusal.title)
        if len(errors) > MOST_ERRORS:
            left = len(errors) - MOST_ERRORS
            return [*errors[:MOST_ERRORS], f"{left} more images cannot be used either"]
        return errors

    def _decode(self, index: int) -> Pixels:
        if index in self._kept:
            return self._kept[index]
        square = decode_image(self._root / self._files[index].path, self.side)
        if (len(self._kept) + 1) * square.nbytes <= LARGEST_CACHE:
            self._kept[index] = square
        return square


def _files_below(root: Path, class_name: str) -> tuple[list[str], list[str]]:
    files, errors = [], []

    def note(error: OSError) -> None:
        errors.append(unreadable(Path(error.filename), error))

    for folder, inner, names in os.walk(root / class_name, onerror=note):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if not name.startswith(".") and _is_inside(path, root) and path.is_file():
                files.append(str(path.relative_to(root)))
    return files, errors


def _is_inside(path: Path, root: Path) -> bool:
    """Return whether a path, with its links followed, is below the folder."""
    return not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
