"""Documents of every kind of source, in order; what cannot be read is refused, all at once."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from echelon.data import documents
from echelon.data.documents import Piece, find_source, read_documents, stdlib_source
from echelon.errors import UserError

arrow: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")

TEXTS = ["The cat sat.", "A dog.", "grün"]


def texts_of(path: Path, field: str | None = None) -> list[str]:
    """The documents of a source, each whole."""
    found, parts = [], ""
    for piece in read_documents(find_source(path), field):
        parts += piece.text
        if piece.ends:
            found.append(parts)
            parts = ""
    assert not parts
    return found


def errors_of(path: Path, field: str | None = None) -> tuple[str, ...]:
    with pytest.raises(UserError) as refusal:
        texts_of(path, field)
    return refusal.value.errors or (refusal.value.title,)


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_dataset(folder: Path, column: str = "text") -> Path:
    """The files that `Dataset.save_to_disk` of `datasets` writes: streams of Arrow, named by state.json."""
    folder.mkdir(parents=True)
    for number, part in enumerate((TEXTS[:2], TEXTS[2:])):
        table = arrow.table({column: part, "number": list(range(len(part)))})
        path = str(folder / f"data-{number:05}-of-00002.arrow")
        with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    names = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in (0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_text_files_are_documents_in_order_of_their_paths(tmp_path: Path) -> None:
    for name, text in {"b/2.md": "two", "a.txt": "one", ".git/x": "hidden", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.dat").write_bytes(b"a\0b")
    assert texts_of(tmp_path) == ["one", "two"]
    assert texts_of(tmp_path / "a.txt") == ["one"]


def test_a_large_text_is_read_in_pieces_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_PIECE_BYTES", 3)
    path = tmp_path / "t.txt"
    path.write_bytes(b"one\r\ntwo\nthree\n")
    pieces = list(read_documents(find_source(path)))
    assert pieces == [Piece("one\r\n", False), Piece("two\n", False), Piece("three\n", True)]


def test_json_lines_parquet_and_arrow_have_a_document_in_each_row(tmp_path: Path) -> None:
    rows = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    assert texts_of(write_lines(tmp_path / "a.jsonl", rows)) == TEXTS
    assert texts_of(write_lines(tmp_path / "plain.ndjson", list(TEXTS))) == TEXTS
    parquet.write_table(arrow.table({"body": TEXTS}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", "body") == TEXTS
    assert texts_of(write_dataset(tmp_path / "saved")) == TEXTS


def test_files_of_several_kinds_may_lie_in_one_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "b.txt").write_text("two")
    assert texts_of(tmp_path) == ["one", "two"]
    assert find_source(tmp_path).has_rows


def test_rows_without_text_are_listed_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "x"}\nnot json\n{"text": "\\ud800"}\n3\n')
    errors = errors_of(path)
    assert len(errors) == 4
    assert "line 2 of" in errors[0]
    assert "(its keys: body): set data.field" in errors[0]
    assert "line 3 of" in errors[1]
    assert "is not JSON" in errors[1]


def test_only_the_first_errors_of_a_file_are_shown(tmp_path: Path) -> None:
    assert len(errors_of(write_lines(tmp_path / "a.jsonl", [3] * 1000))) == 20


def test_a_column_must_be_there_and_have_text(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "saved", column="body")
    (error, _) = errors_of(folder)
    assert "has no column 'text': set data.field to one of body, number" in error
    assert "has a int in 'number', no text" in errors_of(folder, "number")[0]
    parquet.write_table(arrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    assert "row 2 of" in errors_of(tmp_path / "a.parquet")[0]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    assert "cannot be read as Parquet" in errors_of(tmp_path / "a.parquet")[0]
    folder = write_dataset(tmp_path / "saved")
    (folder / "data-00001-of-00002.arrow").write_bytes(b"nothing")
    assert "cannot be read as Arrow" in errors_of(folder)[0]
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1"))
    assert "is not UTF-8 text (byte 2)" in errors_of(tmp_path / "latin.txt")[0]


@pytest.mark.parametrize("name", ["../outside.arrow", "missing.arrow", 3])
def test_a_dataset_names_files_of_its_own_folder_alone(tmp_path: Path, name: object) -> None:
    folder = write_dataset(tmp_path / "saved")
    (tmp_path / "outside.arrow").write_bytes(b"")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "which is not in the folder" in errors_of(folder)[0]


def test_a_dict_of_datasets_is_refused_with_its_splits(tmp_path: Path) -> None:
    write_dataset(tmp_path / "train")
    write_dataset(tmp_path / "test")
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert f"name one, like {tmp_path / 'test'} or {tmp_path / 'train'}" in errors_of(tmp_path)[0]


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    folder = write_dataset(tmp_path / "saved")
    monkeypatch.setattr(documents, "import_module", missing)
    assert 'pip install "echelon[data]"' in errors_of(folder)[0]


def test_the_standard_library_is_one_document_for_each_file() -> None:
    source = stdlib_source()
    assert (source.name, source.has_rows) == ("stdlib", False)
    assert len(source.files) > 200
