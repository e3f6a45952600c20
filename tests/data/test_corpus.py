"""Opening a corpus: every kind of source, and every error."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.data import Corpus, open_corpus
from echelon.data.corpus import map_text, map_token_file, read_folder, read_stdlib
from echelon.errors import UserError
from tests.data.opening import errors_of, write_tokens


def test_stdlib_is_python_text_and_the_same_each_time() -> None:
    corpus, again = open_corpus("stdlib", vocab=256), open_corpus("stdlib", vocab=256)
    assert corpus.name == "stdlib"
    assert corpus.tokens.dtype == np.uint8
    assert len(corpus) > 2_000_000
    assert np.array_equal(corpus.tokens, again.tokens)
    assert corpus.decode is not None
    text = corpus.decode(corpus.tokens)
    assert "class OrderedDict(dict):" in text
    assert sys.prefix not in text


def test_text_file_is_mapped_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("grün is green", encoding="utf-8")
    corpus = open_corpus(str(path), vocab=300)
    assert isinstance(corpus.tokens, np.memmap)
    assert (corpus.name, corpus.vocab, len(corpus)) == ("poem.txt", 300, 14)
    assert corpus.decode is not None
    assert corpus.decode(corpus.tokens) == "grün is green"
    assert corpus.decode(corpus.tokens[:3]) == "gr\ufffd"


@pytest.mark.parametrize(
    ("vocab", "dtype", "expected"),
    [
        (1000, None, "uint16"),
        (65536, None, "uint16"),
        (65537, None, "uint32"),
        (1000, "uint32", "uint32"),
        (256, "uint8", "uint8"),
    ],
)
def test_token_file_is_mapped(tmp_path: Path, vocab: int, dtype: str | None, expected: str) -> None:
    source = write_tokens(tmp_path / "t.bin", [1, 2, 255, 0, 7], expected)
    corpus = open_corpus(source, vocab=vocab, dtype=dtype)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.dtype.name == expected
    assert corpus.tokens.tolist() == [1, 2, 255, 0, 7]
    assert corpus.decode is None


def test_windows_are_int64_rows() -> None:
    corpus = Corpus(np.arange(10, dtype=np.uint16), 10, "ten")
    rows = corpus.windows(np.array([7, 0]), 3)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[7, 8, 9], [0, 1, 2]]


@pytest.mark.parametrize("place", [0, 500_000, 999_999])
def test_ids_too_large_are_found_at_open(tmp_path: Path, place: int) -> None:
    ids = np.zeros(1_000_000, dtype=np.uint16)
    ids[max(0, place - 16_000) : place + 1] = 513
    ids.tofile(tmp_path / "t.bin")
    (error,) = errors_of(str(tmp_path / "t.bin"), vocab=512)
    assert "token id 513 is not below vocab=512" in error
    assert "at least 514" in error


def test_ids_too_large_are_found_when_drawn() -> None:
    tokens = np.array([1, 2, 3, 99], dtype=np.uint16)
    corpus = Corpus(tokens, 50, "late")
    assert corpus.windows(np.array([0]), 3).tolist() == [[1, 2, 3]]
    with pytest.raises(UserError, match="token id 99 is not below vocab=50"):
        corpus.windows(np.array([0]), 4)


def test_missing_path_names_the_near_sibling(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("to be", encoding="utf-8")
    (error,) = errors_of(str(tmp_path / "shakespear.txt"), vocab=256)
    assert "did you mean 'shakespeare.txt'?" in error
    (error,) = errors_of("stdlb", vocab=256)
    assert "did you mean 'stdlib'?" in error


@pytest.mark.parametrize("source", ["no/such/folder/x.txt", "~nobody-here/x", "a\0b", "n" * 5000])
def test_missing_path_without_a_near_name_says_what_can_be_named(source: str) -> None:
    (error,) = errors_of(source, vocab=256)
    assert "there is no file or folder" in error
    assert "a folder of text files" in error


def test_errors_of_all_arguments_come_at_once(tmp_path: Path) -> None:
    errors = errors_of(str(tmp_path / "none"), vocab=100, dtype="uint61")
    assert len(errors) == 3
    assert "there is no file" in errors[0]
    assert "vocab=100: text is read as bytes, so it must be at least 256" in errors[1]
    assert "did you mean 'uint16'?" in errors[2]


def test_dtype_of_text_and_vocab_of_tokens(tmp_path: Path) -> None:
    (error,) = errors_of("stdlib", vocab=256, dtype="uint16")
    assert "text is read as bytes" in error
    source = write_tokens(tmp_path / "t.bin", [0], "uint16")
    assert "vocab=0" in errors_of(source, vocab=0)[0]


def test_no_name_does_not_mean_the_current_folder() -> None:
    assert "no source is given" in errors_of("", vocab=256)[0]


def test_device_is_no_corpus() -> None:
    assert "neither a file nor a folder" in errors_of("/dev/null", vocab=256)[0]


@pytest.mark.parametrize("tokens", [np.zeros(4, dtype=np.int64), np.zeros((2, 2), dtype=np.uint8)])
def test_corpus_takes_one_row_of_unsigned_integers(tokens: Any) -> None:
    with pytest.raises(UserError, match="must be one row of uint8, uint16, uint32"):
        Corpus(tokens, 10, "wrong")


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
