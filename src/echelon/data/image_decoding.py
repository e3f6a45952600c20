"""Decoding of an image file to a square of bytes, [3, side, side].

Pillow decodes. What it would convert wrongly in silence is converted here: 16-bit images are scaled and not
clipped, transparent pixels become white, and the rotation that a camera noted (EXIF) is applied. An image is
resized so that its shorter edge is `side`, and its middle is taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from echelon.errors import UserError

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
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            tells = image.format == "PNG" or (image.format == "JPEG" and _JPEG_END in file.read())
        image.verify()
    if not tells:
        decode_image(path, side)


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
