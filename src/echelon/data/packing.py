"""Documents as one row of tokens on disk, and where each of them begins; and rows of it with their positions.

    documents   The cat sat.   |  A dog.               (text)
    tokens      t0 t1 t2 t3 /s |  t4 t5 t6 /s  …       one file of integers, memory-mapped
    starts      0                 5                    one file of integers
    a row of 4  t2 t3 /s t4       positions 0 1 2 0    targets t3 /s –  t5     (–: none)

Tokens are made once for each source and tokenizer, and kept in a cache. Every rank maps the same files, so a
sample is found by its number alone: whatever the plan, and after a restart. A document that a row cuts goes
on in the next one, from position 0.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from echelon.data.documents import Piece, Source, read_documents
from echelon.data.tokenizer import TextTokenizer
from echelon.errors import UserError
from echelon.nn.losses import IGNORED_TARGET

Places = npt.NDArray[np.int64]

_FORMAT = 1
_ABOUT, _TOKENS, _STARTS = "about.json", "tokens.bin", "starts.bin"
_MOST_PIECES, _MOST_CHARACTERS = 256, 1 << 22  # that are encoded together
BYTE_VOCAB = 256


class TokenStore(NamedTuple):
    """Tokens of a source, and where its documents begin, memory-mapped."""

    tokens: npt.NDArray[np.unsignedinteger[Any]]
    starts: Places


def cache_folder(given: str | None = None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "echelon" / "tokens"


def open_store(
    source: Source, tokenizer: TextTokenizer | None, field: str | None, cache: str | None = None
) -> TokenStore:
    """Open the tokens of a source; they are made first if the cache does not have them. Without a tokenizer
    they are the bytes of the text."""
    folder = cache_folder(cache) / _key(source, tokenizer, field)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not (folder / _ABOUT).is_file():
            with _locked(folder.with_suffix(".lock")):
                if not (folder / _ABOUT).is_file():
                    _make(folder, source, tokenizer, field)
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        if about["tokens"] == 0:
            raise UserError(f"corpus '{source.name}': there is no text in it: name a source that has some")
        tokens = np.memmap(folder / _TOKENS, dtype=np.dtype(about["dtype"]).newbyteorder("<"), mode="r")
        return TokenStore(tokens, np.memmap(folder / _STARTS, dtype=np.dtype("<i8"), mode="r"))
    except OSError as error:
        raise UserError(
            f"the tokens of '{source.name}' cannot be kept in {folder}: {error.strerror or error}; set "
            "data.cache to a folder with room that this user may write"
        ) from None


def _key(source: Source, tokenizer: TextTokenizer | None, field: str | None) -> str:
    """A name for what the tokens follow from. Files count by path, size and time of their last change."""
    files = [
        (str(each.absolute()), (about := each.stat()).st_size, about.st_mtime_ns) for each in source.files
    ]
    maker = "bytes" if tokenizer is None else tokenizer.fingerprint
    text = json.dumps([_FORMAT, files, maker, field])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _make(folder: Path, source: Source, tokenizer: TextTokenizer | None, field: str | None) -> None:
    """Write the files of a store into a folder beside it, which takes its name when it is whole."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    vocab = BYTE_VOCAB if tokenizer is None else tokenizer.vocab
    dtype = np.dtype("uint8" if tokenizer is None else "uint16" if vocab <= 1 << 16 else "uint32")
    print(f"reading the documents of {source.name} …", file=sys.stderr, flush=True)
    try:
        num_tokens, starts = 0, list[int]()
        with (partial / _TOKENS).open("wb") as file:
            for document in encode(read_documents(source, field), tokenizer):
                if document.begins:
                    starts.append(num_tokens)
                num_tokens += len(document.ids)
                file.write(np.asarray(document.ids, dtype.newbyteorder("<")).tobytes())
        np.asarray(starts, "<i8").tofile(partial / _STARTS)
        about = {"tokens": num_tokens, "documents": len(starts), "dtype": dtype.name, "source": source.name}
        (partial / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Encoded(NamedTuple):
    """A part of a document as ids; `begins`: it is the first one."""

    ids: list[int]
    begins: bool


def encode(pieces: Iterable[Piece], tokenizer: TextTokenizer | None) -> Iterator[Encoded]:
    """The ids of documents, with those around each: what the tokenizer adds, and its end-of-text token."""
    begins = True
    for group in _groups(pieces):
        texts = [piece.text for piece in group]
        plain = [list(text.encode()) for text in texts] if tokenizer is None else tokenizer.encode(texts)
        for piece, ids in zip(group, plain, strict=True):
            before = tokenizer.prefix if tokenizer is not None and begins else ()
            behind = _ending(tokenizer) if tokenizer is not None and piece.ends else ()
            yield Encoded([*before, *ids, *behind], begins)
            begins = piece.ends


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group, size = list[Piece](), 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if len(group) == _MOST_PIECES or size >= _MOST_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ending(tokenizer: TextTokenizer) -> tuple[int, ...]:
    is_there = tokenizer.end is None or tokenizer.suffix[-1:] == (tokenizer.end,)
    return tokenizer.suffix if is_there else (*tokenizer.suffix, int(tokenizer.end or 0))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this host at a time; the system releases the lock of one that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Rows of packed documents.


def row_positions(rows: Places, starts: Places) -> Places:
    """Return the position of each token in its document, or in the part of it that is in the row.

    rows    [rows, length]: the places of tokens in the corpus, each row without gaps
    starts  the places where documents begin, ascending
    """
    nearest = np.searchsorted(starts, rows, side="right") - 1
    begins = np.where(nearest < 0, 0, starts[np.maximum(nearest, 0)])
    return rows - np.maximum(begins, rows[:, :1])


def without_next_documents(targets: Places, positions: Places) -> Places:
    """Leave out targets that are the first token of another document. `positions`: of inputs and targets."""
    return np.where(positions[:, 1:] == 0, IGNORED_TARGET, targets)
