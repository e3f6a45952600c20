from pathlib import Path

import pytest

from echelon.data import image_folder
from echelon.data.image_folder import ImageFile, ImageFolder, Split, open_image_folder
from echelon.errors import UserError
from tests.data.image_files import save_colour, two_classes


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
