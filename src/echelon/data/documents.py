"""The documents of a source, one after the other, in one order on all machines.

    a text file, each text file of a folder    one document
    a line of a .jsonl or .ndjson file         an object whose text is under `field`, or a text
    a row of a .parquet file                   the text in the column `field`
    a row of an Arrow folder                   what `Dataset.save_to_disk` of `datasets` writes: likewise
    each .py file of the standard library      one document

Large files are read in pieces, so a source may be larger than memory.
"""

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import UserError, raise_errors
from echelon.state.weight_files.tensor_file import is_text
from echelon.state.weight_files.weight_folder import read_json

TEXT_FIELD = "text"
JSON_LINES, PARQUET, ARROW = (".jsonl", ".ndjson"), ".parquet", ".arrow"
NUL = b"\0"  # in a file that is no text
HEAD_BYTES = 1 << 16  # of a large file that are checked for being text

_PIECE_BYTES = 1 << 20
_MOST_ERRORS = 20  # of lines and rows, in one message
_ARROW_STATE, _ARROW_SPLITS = "state.json", "dataset_dict.json"
_ROWS = 1024  # of a Parquet file that are in memory at once

# Tests, tables and installed packages: not program text as people write it.
_STDLIB_SKIPS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    | {"idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
)
# Generated when Python is built: they contain paths of that machine, so machines would differ.
_STDLIB_GENERATED = ("_sysconfigdata", "python-config")


class Piece(NamedTuple):
    """A part of a document; `ends`: it is the last one."""

    text: str
    ends: bool


class Source(NamedTuple):
    """The files of a source in their order, and a name for people."""

    name: str
    files: tuple[Path, ...]
    is_arrow: bool = False  # a folder of `datasets`

    @property
    def has_rows(self) -> bool:
        """True if some file has many documents, and not only text."""
        return self.is_arrow or any(path.suffix in (*JSON_LINES, PARQUET) for path in self.files)


def find_source(path: Path) -> Source:
    """List the files of a folder or file; hidden ones are left out. Raises one UserError with all errors."""
    name = path.resolve().name
    if path.is_file():
        return Source(name, (path,))
    if (path / _ARROW_SPLITS).is_file():
        splits = [each.name for each in sorted(path.iterdir()) if (each / _ARROW_STATE).is_file()]
        names = " or ".join(str(path / split) for split in splits)
        raise UserError(f"'{path}' is a DatasetDict, with a folder for each split: name one, like {names}")
    if (path / _ARROW_STATE).is_file():
        return Source(name, tuple(_arrow_files(path)), is_arrow=True)
    files, errors = files_below(path)
    raise_errors(f"corpus '{path}'", errors)
    return Source(name, tuple(files))


def stdlib_source() -> Source:
    files, errors = files_below(Path(sysconfig.get_paths()["stdlib"]), _STDLIB_SKIPS)
    raise_errors("the standard library", errors)
    named = (each for each in files if each.suffix == ".py" and not each.name.startswith(_STDLIB_GENERATED))
    return Source("stdlib", tuple(named))


def read_documents(source: Source, field: str | None = None) -> Iterator[Piece]:
    """Read every document in pieces. Rows that have no text are collected, and raised at the end."""
    reader = _Reader(field or TEXT_FIELD)
    for path in source.files:
        try:
            yield from reader.read(path, is_arrow=source.is_arrow)
        except OSError as error:
            reader.errors.append(unreadable(path, error))
    raise_errors(f"corpus '{source.name}'", reader.errors)


class _Reader:
    def __init__(self, field: str) -> None:
        self.field, self.errors = field, list[str]()

    def read(self, path: Path, *, is_arrow: bool) -> Iterator[Piece]:
        if is_arrow:
            return self._rows(path, _arrow_batches(path))
        if path.suffix in JSON_LINES:
            return self._texts(self._lines(path))
        if path.suffix == PARQUET:
            return self._rows(path, _parquet_batches(path))
        return self._text(path)

    def _text(self, path: Path) -> Iterator[Piece]:
        with path.open("rb") as file:
            if NUL in file.read(HEAD_BYTES):
                return  # a binary file
        waiting: str | None = None
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while lines := file.readlines(_PIECE_BYTES):  # whole lines
                    if waiting is not None:
                        yield Piece(waiting, ends=False)
                    waiting = "".join(lines)
        except UnicodeDecodeError as error:
            self._add(f"'{path}' is not UTF-8 text (byte {error.start}): convert it, like iconv -t utf-8")
        if waiting:
            yield Piece(waiting, ends=True)

    def _lines(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    self._add(f"line {number} of '{path}' is not JSON: {error}")
                    continue
                text = value.get(self.field) if isinstance(value, dict) else value
                if isinstance(text, str) and is_text(text):
                    yield text
                    continue
                keys = ", ".join(map(str, value)) if isinstance(value, dict) else ""
                self._add(
                    f"line {number} of '{path}' has no text under '{self.field}'"
                    + (f" (its keys: {keys}): set data.field to the one with the text" if keys else "")
                )

    def _rows(self, path: Path, batches: Iterable[Any]) -> Iterator[Piece]:
        return self._texts(self._row_texts(path, batches))

    def _row_texts(self, path: Path, batches: Iterable[Any]) -> Iterator[str]:
        row = 0
        for batch in batches:
            names = batch.schema.names
            if self.field not in names:
                self._add(
                    f"'{path}' has no column '{self.field}': set data.field to one of {', '.join(names)}"
                )
                return
            for text in batch.column(names.index(self.field)).to_pylist():
                row += 1
                if isinstance(text, str):
                    yield text
                    continue
                self._add(f"row {row} of '{path}' has a {type(text).__name__} in '{self.field}', no text")
                if not isinstance(text, type(None)):  # the column has another type: so have all rows
                    return

    def _texts(self, texts: Iterable[str]) -> Iterator[Piece]:
        return (Piece(text, ends=True) for text in texts if text)

    def _add(self, error: str) -> None:
        self.errors.append(error)
        if len(self.errors) >= _MOST_ERRORS:
            raise_errors("the documents, and maybe more", self.errors)


def _parquet_batches(path: Path) -> Iterator[Any]:
    arrow, parquet = _import_arrow(path), import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(_ROWS)
    except arrow.ArrowException as error:
        raise UserError(f"'{path}' cannot be read as Parquet: {error}") from None


def _arrow_batches(path: Path) -> Iterator[Any]:
    arrow = _import_arrow(path)
    try:
        with arrow.memory_map(str(path)) as memory, arrow.ipc.open_stream(memory) as batches:
            yield from batches
    except arrow.ArrowException as error:
        raise UserError(f"'{path}' cannot be read as Arrow: {error}") from None


def _import_arrow(path: Path) -> Any:
    try:
        return import_module("pyarrow")
    except ImportError:
        raise UserError(
            f"reading '{path}' needs pyarrow, which is not installed: pip install \"echelon[data]\""
        ) from None


def _arrow_files(folder: Path) -> Iterator[Path]:
    """List the files that a folder of `datasets` names, in its order; none lies outside of it."""
    listed = read_json(folder / _ARROW_STATE).get("_data_files")
    names = [each.get("filename") for each in listed if isinstance(each, dict)] if listed else []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"'{folder / _ARROW_STATE}' names the file {name!r}, which is not in the folder")
        yield folder / name


def files_below(folder: Path, skip: frozenset[str] = frozenset()) -> tuple[list[Path], list[str]]:
    """List every file below `folder`, in one order on all machines; and the errors of reading folders."""
    paths: list[Path] = []
    refused: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=refused.append):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    errors = [unreadable(Path(error.filename), error) for error in refused]
    return sorted(path for path in paths if path.is_file()), errors


def unreadable(path: Path, error: OSError) -> str:
    return f"'{path}' cannot be read ({error.strerror or error}): give this user the right to read it"
