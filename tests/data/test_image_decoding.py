"""Every kind of image file as a person would see it, or refused by name."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from echelon.data.image_decoding import check_image, decode_image
from echelon.errors import UserError
from tests.data.image_files import RED, halves, save_colour


def corners(pixels: np.ndarray) -> list[list[int]]:
    """Of a square: top left, top right, bottom left, bottom right."""
    return [pixels[:, row, column].tolist() for row in (0, -1) for column in (0, -1)]


def test_a_camera_that_was_turned(tmp_path: Path) -> None:
    # Pillow opens it lying on its side.
    image = Image.fromarray(halves(0, 255)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    image.save(tmp_path / "a.png", exif=exif)
    dark, light = [0, 0, 0], [255, 255, 255]
    assert corners(decode_image(tmp_path / "a.png", 8)) == [dark, dark, light, light]


def test_16_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(halves(0x4000, 0xFFFF, np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(halves(0x4000, 0xFFFF, np.int32)).save(tmp_path / "b.tiff")
    for name in ("a.png", "b.tiff"):
        assert corners(decode_image(tmp_path / name, 8))[:2] == [[0x40] * 3, [0xFF] * 3]


def test_grey_palette_and_bilevel_images_become_rgb(tmp_path: Path) -> None:
    Image.fromarray(halves(10, 200)).save(tmp_path / "grey.png")
    assert corners(decode_image(tmp_path / "grey.png", 8))[:2] == [[10] * 3, [200] * 3]
    palette = Image.fromarray(halves(0, 1)).convert("P")
    palette.putpalette([*RED, 1, 2, 3])
    palette.save(tmp_path / "palette.png")
    assert corners(decode_image(tmp_path / "palette.png", 8))[:2] == [list(RED), [1, 2, 3]]
    Image.fromarray(halves(0, 255)).convert("1").save(tmp_path / "bilevel.png")
    assert corners(decode_image(tmp_path / "bilevel.png", 8))[:2] == [[0] * 3, [255] * 3]


def test_what_is_transparent_is_white_and_not_the_colour_below(tmp_path: Path) -> None:
    image = Image.new("RGBA", (8, 8), (*RED, 0))
    image.paste((*RED, 255), (4, 0, 8, 8))
    image.save(tmp_path / "rgba.png")
    assert corners(decode_image(tmp_path / "rgba.png", 8))[:2] == [[255] * 3, list(RED)]
    palette = Image.fromarray(halves(0, 1)).convert("P")
    palette.putpalette([9, 9, 9, *RED])
    palette.save(tmp_path / "palette.png", transparency=0)
    assert corners(decode_image(tmp_path / "palette.png", 8))[:2] == [[255] * 3, list(RED)]


def test_the_middle_is_resized_to_a_square(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 10), "blue")
    image.paste(RED, (15, 0, 25, 10))
    image.save(tmp_path / "a.png")
    pixels = decode_image(tmp_path / "a.png", 6)
    assert pixels.shape == (3, 6, 6)
    inner = pixels[:, :, 1:-1]  # the outermost columns blend with their neighbours
    assert (inner == np.array(RED, np.uint8)[:, None, None]).all()


def test_float_pixels_and_strips_are_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(UserError, match=r"float\.tiff: has floating point pixels \(mode F\)"):
        decode_image(tmp_path / "float.tiff", 8)
    Image.fromarray(np.full((4, 4), 70000, np.int32)).save(tmp_path / "large.tiff")
    with pytest.raises(UserError, match=r"large\.tiff: has integer pixels from 70000 to 70000"):
        decode_image(tmp_path / "large.tiff", 8)
    save_colour(tmp_path / "strip.png", size=(210, 10))
    with pytest.raises(UserError, match=r"strip\.png: is 210 × 10: one edge is more than 20 times"):
        decode_image(tmp_path / "strip.png", 8)
    assert decode_image(save_colour(tmp_path / "wide.png", size=(200, 10)), 8).shape == (3, 8, 8)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UserError, match=r"text\.png: cannot be read as an image .*repair or remove it"):
        decode_image(tmp_path / "text.png", 8)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.png")
    data = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"cut\.png: cannot be read as an image \(.*truncated"):
        decode_image(tmp_path / "cut.png", 8)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("read", [decode_image, check_image])
def test_what_could_be_a_bomb_is_refused(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow only warns of it, up to twice its limit."""
    path = save_colour(tmp_path / "a.png", size=(12, 12))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match=r"a\.png: is 12 × 12, more than 100 pixels"):
        read(path, 8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 144)
    read(path, 8)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tiff"])
def test_a_file_that_is_cut_off_is_found_without_decoding_most_files(suffix: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    check_image(path, 8)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"a\.{suffix}: cannot be read as an image"):
        check_image(path, 8)


def test_a_check_refuses_what_decoding_refuses(tmp_path: Path) -> None:
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tiff")
    (tmp_path / "text.png").write_text("no image")
    save_colour(tmp_path / "strip.png", size=(210, 10))
    for name in ("float.tiff", "text.png", "strip.png"):
        errors = []
        for read in (decode_image, check_image):
            with pytest.raises(UserError) as caught:
                read(tmp_path / name, 8)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_without_pillow_the_fix_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_pillow(name: str, *arguments: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(UserError, match=r"reading images needs Pillow, .*: pip install pillow"):
        decode_image(Path("a.png"), 8)
