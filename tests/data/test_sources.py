"""Where tokens come from: folders, text files and token files, and every error of reading them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.data import open_corpus
from echelon.data.sources import map_text, map_token_file, read_folder, read_stdlib
from echelon.errors import UserError
from tests.data.opening import errors_of, write_tokens


def test_folder_joins_text_files_in_order_of_path(tmp_path: Path) -> None:
    for name, data in {
        "b.md": b"second",
        "a/deep.unknown": b"first",
        "README": b"zeroth",
        "image.png": b"\x89PNG\0\0",
        "empty.txt": b"",
        ".hidden": b"hidden",
        ".git/objects": b"hidden too",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    corpus = open_corpus(str(tmp_path), vocab=256)
    assert corpus.tokens.tobytes() == b"zeroth\nfirst\nsecond"
    assert corpus.name == tmp_path.name


def test_empty_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    (tmp_path / "empty.txt").touch()
    assert "empty" in errors_of(str(tmp_path / "empty.bin"), vocab=256)[0]
    assert "empty" in errors_of(str(tmp_path / "empty.txt"), vocab=256)[0]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(b"\0")
    assert "contains no text files" in errors_of(str(tmp_path / "folder"), vocab=256)[0]


def test_size_that_is_no_multiple(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(b"12345")
    (error,) = errors_of(str(tmp_path / "t.bin"), vocab=100_000)
    assert "5 bytes are not a multiple of 4, the size of one uint32 token" in error


def test_binary_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"text\0")
    assert "NUL" in errors_of(str(tmp_path / "t.txt"), vocab=256)[0]


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError(13, "Permission denied", "secret")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, so the refusal is played.
    source = write_tokens(tmp_path / "t.bin", [0], "uint16")
    monkeypatch.setattr(np, "memmap", refuse)
    (error,) = errors_of(source, vocab=256)
    assert "cannot be read (Permission denied)" in error


def test_every_unreadable_file_of_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    errors = errors_of(str(tmp_path), vocab=256)
    assert ["a.txt" in errors[0], "b.txt" in errors[1], len(errors)] == [True, True, 2]


def test_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", refuse)
    assert "'secret' cannot be read" in errors_of(str(tmp_path), vocab=256)[0]


def test_path_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", refuse)
    assert "cannot be read (Permission denied)" in errors_of("locked/a.txt", vocab=256)[0]


def test_the_standard_library_is_source_text_without_tests_or_paths_of_this_machine() -> None:
    text = read_stdlib().tobytes()
    assert b"class OrderedDict(dict):" in text
    assert b"\0" not in text
    assert b"class TestCase(object):" in text, "unittest is library"
    assert b"class TestOrderedDict" not in text, "the tests of the library are not"


def test_each_reader_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    assert map_text(tmp_path / "a.txt").tobytes() == b"abc"
    assert read_folder(tmp_path).tobytes() == b"abc"
    np.array([1, 258], dtype="<u2").tofile(tmp_path / "t.bin")
    tokens = map_token_file(tmp_path / "t.bin", "uint16")
    assert (tokens.dtype, tokens.tolist()) == (np.dtype("<u2"), [1, 258])
    with pytest.raises(UserError, match="the file is empty"):
        map_text(Path(os.devnull))
