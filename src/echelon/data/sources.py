"""Where tokens come from: the standard library, text files, token files.

Each reader returns the token array of one kind of source, the same on every rank, or raises one UserError
with every error.
"""

import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.errors import UserError, raise_errors

Tokens = npt.NDArray[np.unsignedinteger[Any]]

# Files are joined by a newline, so that the last word of one does not run into the next.
SEPARATOR = b"\n"

# Tests, tables and installed packages: not program text as people write it.
_STDLIB_SKIPS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    | {"idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
)
# Generated when Python is built: they contain paths of that machine, so machines would differ.
_STDLIB_GENERATED = ("_sysconfigdata", "python-config")

# How much of a large file is checked for being text.
_HEAD_BYTES = 1 << 16


def read_stdlib() -> Tokens:
    """The bytes of the Python sources of the standard library, in order of their paths."""
    paths, errors = _files_below(Path(sysconfig.get_paths()["stdlib"]), _STDLIB_SKIPS)
    sources = [path for path in paths if path.suffix == ".py" and not path.name.startswith(_STDLIB_GENERATED)]
    texts, more_errors = _read_texts(sources)
    raise_errors("the standard library", errors + more_errors)
    return _join(texts)


def read_folder(folder: Path) -> Tokens:
    """The bytes of every text file below `folder`, in order of their paths.

    Any extension counts. Hidden names (`.git`) and binary files (with a NUL byte) are left out.
    """
    paths, errors = _files_below(folder)
    texts, more_errors = _read_texts(paths)
    errors += more_errors
    if not texts and not errors:
        errors = [f"'{folder}' contains no text files: name a folder that has some"]
    raise_errors(f"corpus '{folder}'", errors)
    return _join(texts)


def map_text(path: Path) -> Tokens:
    """The bytes of one text file, memory-mapped: a file of any size opens at once."""
    tokens = _map(path, np.dtype(np.uint8))
    if _is_binary(tokens[:_HEAD_BYTES].tobytes()):
        error = "it has a NUL byte, so it is not text: name a text file, or a token file that ends in .bin"
        raise_errors(f"corpus '{path}'", [error])
    return tokens


def map_token_file(path: Path, dtype: str) -> Tokens:
    """The token ids of a `.bin` file: little-endian integers and nothing else, memory-mapped."""
    return _map(path, np.dtype(dtype).newbyteorder("<"))


def _map(path: Path, dtype: np.dtype[Any]) -> Tokens:
    try:
        # Before the mapping: an empty file cannot be mapped.
        raise_errors(f"corpus '{path}'", _size_errors(path.stat().st_size, dtype))
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UserError(f"1 error in corpus '{path}':", [unreadable(path, error)]) from error


def _size_errors(size: int, dtype: np.dtype[Any]) -> list[str]:
    if size == 0:
        return ["the file is empty: name a file with text or tokens in it"]
    if size % dtype.itemsize:
        return [
            f"{size} bytes are not a multiple of {dtype.itemsize}, the size of one {dtype.name} token: "
            "give the dtype that the file was written with, or write the file again"
        ]
    return []


def _files_below(folder: Path, skip: frozenset[str] = frozenset()) -> tuple[list[Path], list[str]]:
    """Every file below `folder`, in the same order on all machines, and the errors of reading folders."""
    paths: list[Path] = []
    refused: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=refused.append):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    errors = [unreadable(Path(error.filename), error) for error in refused]
    return sorted(path for path in paths if path.is_file()), errors


def _read_texts(paths: list[Path]) -> tuple[list[bytes], list[str]]:
    """The contents of the text files among `paths`, and an error for each file that cannot be read."""
    texts: list[bytes] = []
    errors: list[str] = []
    for path in paths:
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            errors.append(unreadable(path, error))
    return [text for text in texts if text and not _is_binary(text)], errors


def _join(texts: list[bytes]) -> Tokens:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)


def _is_binary(data: bytes) -> bool:
    return b"\0" in data


def unreadable(path: Path, error: OSError) -> str:
    """The error of a path that cannot be read."""
    return f"'{path}' cannot be read ({error.strerror or error}): give this user the right to read it"
