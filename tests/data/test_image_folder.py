import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from echelon.data import image_folder
from echelon.data.image_folder import (
    ImageFile,
    ImageFolder,
    Split,
    check_image,
    decode_image,
    open_image_folder,
)
from echelon.errors import UserError
from tests.data.image_files import RED, halves, save_colour, two_classes


def errors_of(root: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_image_folder(root)
    return str(caught.value)


def test_classes_and_files_are_sorted_and_files_lie_at_any_depth(tmp_path: Path) -> None:
    for path in ("b/2.png", "a/more/1.png", "a/0.png"):
        save_colour(tmp_path / path)
    folder = open_image_folder(tmp_path)
    assert folder.class_names == ("a", "b")
    assert folder.files == (ImageFile("a/0.png", 0), ImageFile("a/more/1.png", 0), ImageFile("b/2.png", 1))


def test_hidden_files_and_links_that_lead_out_are_left_out(tmp_path: Path) -> None:
    root = two_classes(tmp_path / "images", 1)
    outside = save_colour(tmp_path / "outside" / "x.png")
    save_colour(root / "a" / ".hidden.png")
    save_colour(root / "a" / ".thumbnails" / "x.png")
    save_colour(root / ".git" / "x.png")
    (root / "a" / "out.png").symlink_to(outside)
    (root / "c").symlink_to(outside.parent)
    (root / "a" / "again.png").symlink_to(root / "b" / "0.png")
    (root / "a" / "loop").symlink_to(root)
    folder = open_image_folder(root)
    assert folder.class_names == ("a", "b")
    assert [file.path for file in folder.files] == ["a/0.png", "a/again.png", "b/0.png"]


def test_all_that_is_wrong_with_a_folder_is_listed(tmp_path: Path) -> None:
    save_colour(tmp_path / "loose.png")
    (tmp_path / "empty").mkdir()
    text = errors_of(tmp_path)
    assert "class 'empty' has no image" in text
    assert "it has one class only, 'empty'" in text
    assert "1 files are in no class (loose.png)" in text
    assert "there is no such folder" in errors_of(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    assert "it has no folder inside" in errors_of(tmp_path / "none")


def test_the_split_follows_from_names_alone(tmp_path: Path) -> None:
    folder = open_image_folder(two_classes(tmp_path, 60))
    parts = {split: folder.split(split, 0.3, 8) for split in ("train", "validation")}
    assert len(parts["train"]) + len(parts["validation"]) == 120
    assert 20 <= len(parts["validation"]) <= 55
    before = paths(folder, "validation", 0.3)
    save_colour(tmp_path / "a" / "new.png")
    after = paths(open_image_folder(tmp_path), "validation", 0.3)
    assert after - {"a/new.png"} == before
    assert len(folder.split("validation", 0.0, 8)) == 0


def paths(folder: ImageFolder, split: Split, fraction: float) -> set[str]:
    return {file.path for file in folder.split(split, fraction, 8)._files}


@pytest.mark.parametrize("fraction", [0.5, 0.999999])
def test_every_class_has_an_image_to_train_on(fraction: float, tmp_path: Path) -> None:
    """A model never saw a class all of whose hashes fell into validation."""
    for index in range(20):
        for number in range(1 + index % 3):
            save_colour(tmp_path / f"class{index}" / f"{number}.png")
    folder = open_image_folder(tmp_path)
    training, validation = paths(folder, "train", fraction), paths(folder, "validation", fraction)
    assert {path.split("/")[0] for path in training} == set(folder.class_names)
    assert training | validation == {file.path for file in folder.files}
    assert not training & validation
    assert validation


def test_an_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = open_image_folder(two_classes(tmp_path, 2)).split("train", 0.0, 8)
    first = images.pixels([0, 3])

    def fail(*arguments: object) -> None:
        raise AssertionError("decoded a second time")

    monkeypatch.setattr(image_folder, "decode_image", fail)
    assert (images.pixels([3, 0]) == first[::-1]).all()
    assert images.pixels([]).shape == (0, 3, 8, 8)


def test_all_broken_images_are_named_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_classes(tmp_path, 2)
    for name in ("a/x.png", "a/y.png", "b/z.png"):
        (tmp_path / name).write_text("no image")
    images = open_image_folder(tmp_path).split("train", 0.0, 8)
    errors = images.errors()
    assert len(errors) == 3
    assert all(name in error for name, error in zip(("a/x.png", "a/y.png", "b/z.png"), errors, strict=True))
    monkeypatch.setattr(image_folder, "MOST_ERRORS", 1)
    assert images.errors()[1:] == ["2 more images cannot be used either"]


def test_every_file_of_a_large_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_classes(tmp_path, 5)
    broken = ["a/1.png", "a/3.png", "b/2.png"]
    for name in broken:
        (tmp_path / name).write_text("no image")
    images = open_image_folder(tmp_path).split("train", 0.0, 8)
    monkeypatch.setattr(image_folder, "MOST_CHECKED", 2)
    assert [name for name in broken if any(name in error for error in images.errors())] == broken
    assert len(images._kept) == 2


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
