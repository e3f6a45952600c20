"""A corpus: one long row of token ids, from the standard library, text files or token files.

Every rank opens the corpus itself, so opening is quick and gives the same tokens everywhere, or one UserError
with every error. sampler.py says which tokens are in which batch.
"""

import difflib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.data.documents import (
    HEAD_BYTES,
    NUL,
    Source,
    files_below,
    find_source,
    stdlib_source,
    unreadable,
)
from echelon.data.packing import BYTE_VOCAB, open_store
from echelon.data.tokenizer import TextTokenizer
from echelon.errors import UserError, did_you_mean, raise_errors

Tokens = npt.NDArray[np.unsignedinteger[Any]]

STDLIB = "stdlib"
TOKEN_FILE_SUFFIX = ".bin"
DTYPES = ("uint8", "uint16", "uint32")
_SOURCES = (
    f"a folder of text files, a text file, a .jsonl or .parquet file, an Arrow folder of datasets, a "
    f"{TOKEN_FILE_SUFFIX} token file, or '{STDLIB}'"
)

# Opening checks this many blocks, spread over the corpus, for ids that are too large.
_PROBE_BLOCKS = 64
_PROBE_TOKENS = 1024

# Files are joined by a newline, so that the last word of one does not run into the next.
SEPARATOR = b"\n"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids below `vocab`, in memory or memory-mapped.

    Of `corpus = open_corpus("stdlib", vocab=256)`, the text `corpus.decode(corpus.tokens[:16])`.
    """

    tokens: Tokens
    vocab: int
    name: str
    decode: Callable[[npt.NDArray[Any]], str] | None = None
    starts: npt.NDArray[np.int64] | None = None  # where documents begin; None: it is one text
    tokenizer: TextTokenizer | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.name not in DTYPES:
            error = (
                f"tokens are {self.tokens.dtype.name} of shape {self.tokens.shape}: must be one row of "
                f"{', '.join(DTYPES)}; call tokens.ravel().astype(numpy.uint32)"
            )
            raise_errors(f"corpus '{self.name}'", [error])

    def __len__(self) -> int:
        return len(self.tokens)

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return the `length` tokens from each of `starts`, [len(starts), length]; ids are checked."""
        indices = starts[:, None] + np.arange(length)
        ids: npt.NDArray[np.int64] = self.tokens[indices].astype(np.int64)
        raise_errors(f"corpus '{self.name}'", self._id_errors(ids))
        return ids

    def probe(self) -> list[str]:
        """List the errors of the ids in a few blocks from the first to the last token: cheap at any size."""
        last = max(0, len(self) - _PROBE_TOKENS)
        starts = np.linspace(0, last, _PROBE_BLOCKS).astype(np.int64)
        blocks = [self.tokens[start : start + _PROBE_TOKENS] for start in np.unique(starts)]
        return self._id_errors(np.concatenate(blocks))

    def _id_errors(self, ids: npt.NDArray[Any]) -> list[str]:
        largest = int(ids.max(initial=0))
        if largest < self.vocab:
            return []
        return [
            f"token id {largest} is not below vocab={self.vocab}: set vocab to at least {largest + 1}, "
            f"or check that the tokens are {self.tokens.dtype.name} and from the tokenizer of this model"
        ]


def open_corpus(
    source: str,
    *,
    vocab: int,
    dtype: str | None = None,
    tokenizer: TextTokenizer | None = None,
    field: str | None = None,
    cache: str | None = None,
) -> Corpus:
    """Open a corpus by name.

    Args:
        source: "stdlib", the sources of Python's own standard library (on every machine);
            a text file, or a folder of text files;
            a .jsonl or .parquet file, an Arrow folder of `datasets`, or a folder of such files;
            a token file `.bin` of little-endian integers, memory-mapped.
        vocab: token ids are below it; bytes need at least 256.
        dtype: of a token file: uint8, uint16 or uint32. None: uint16 where vocab fits it, else uint32.
        tokenizer: makes ids of each document (`load_tokenizer`). Without one, ids are the bytes of text.
        field: the key or column of a document's text; "text" if left out.
        cache: the folder in which the tokens of documents are kept.
    """
    subject = f"corpus '{source}'"
    raise_errors(subject, corpus_errors(source, vocab=vocab, dtype=dtype, tokenizer=tokenizer))
    path = _path(source)
    decode = decode_bytes if tokenizer is None else decode_with(tokenizer)
    if _is_token_file(path):
        narrowest = "uint16" if vocab <= 1 << 16 else "uint32"
        tokens = map_token_file(path, dtype or narrowest)
        corpus = Corpus(tokens, vocab, path.name, decode if tokenizer else None, None, tokenizer)
    else:
        documents = _documents(source, path, tokenizer)
        if documents is not None:
            store = open_store(documents, tokenizer, field, cache)
            corpus = Corpus(store.tokens, vocab, documents.name, decode, store.starts, tokenizer)
        elif source == STDLIB:
            corpus = Corpus(read_stdlib(), vocab, STDLIB, decode)
        else:
            text = read_folder(path) if path.is_dir() else map_text(path)
            corpus = Corpus(text, vocab, path.resolve().name, decode)
    raise_errors(subject, corpus.probe())
    return corpus


def _documents(source: str, path: Path, tokenizer: TextTokenizer | None) -> Source | None:
    """The documents of a source; None where its text is read as one row of bytes."""
    if source == STDLIB:
        return None if tokenizer is None else stdlib_source()
    found = find_source(path)
    return found if tokenizer is not None or found.has_rows else None


def corpus_errors(
    source: str, *, vocab: int | None, dtype: str | None, tokenizer: TextTokenizer | None = None
) -> list[str]:
    """List the errors in arguments of `open_corpus` that show without reading; vocab=None is not checked."""
    path = _path(source)
    is_tokens = _is_token_file(path)
    errors = _source_errors(source, path)
    if vocab is not None and is_tokens and vocab < 1:
        errors.append(f"vocab={vocab}: must be at least 1, the number of ids that the tokenizer has")
    if vocab is not None and tokenizer is not None and tokenizer.vocab > vocab:
        errors.append(
            f"vocab={vocab}: the tokenizer {tokenizer.source} has {tokenizer.vocab} ids; set "
            f"model.vocab={tokenizer.vocab}, or use the tokenizer that belongs to the weights"
        )
    if vocab is not None and not is_tokens and tokenizer is None and vocab < BYTE_VOCAB:
        errors.append(f"vocab={vocab}: text is read as bytes, so it must be at least {BYTE_VOCAB}")
    if dtype is not None and dtype not in DTYPES:
        errors.append(f"dtype '{dtype}' is not known{did_you_mean(dtype, DTYPES)}")
    elif dtype not in (None, "uint8") and not is_tokens:
        errors.append(
            f"dtype '{dtype}': is that of a .bin token file, and the source is text; leave it out"
            if tokenizer is not None
            else f"dtype '{dtype}': text is read as bytes (uint8); leave it out, or name a .bin token file"
        )
    return errors


def decode_with(tokenizer: TextTokenizer) -> Callable[[npt.NDArray[Any]], str]:
    return lambda tokens: tokenizer.decode(np.asarray(tokens).tolist())


def decode_bytes(tokens: npt.NDArray[Any]) -> str:
    """Decode bytes to text; a character that a window splits is shown as U+FFFD."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def _path(source: str) -> Path:
    # os.path, not Path: it does not raise for an unknown user or a missing permission.
    return Path(os.path.expanduser(source))


def _is_token_file(path: Path) -> bool:
    return path.suffix == TOKEN_FILE_SUFFIX and not os.path.isdir(path)


def _source_errors(source: str, path: Path) -> list[str]:
    if source == STDLIB:
        return []
    if not source:
        return [f"no source is given: name {_SOURCES}"]
    try:
        path.stat()
    except PermissionError as error:
        return [unreadable(path, error)]
    except (OSError, ValueError):  # ValueError: not a valid file name
        names = [STDLIB]
        with suppress(OSError, ValueError):  # no such folder, or no permission: nothing to suggest
            names = [*sorted(os.listdir(path.parent)), STDLIB]
        near = difflib.get_close_matches(path.name, names, n=1)
        fix = f"did you mean '{near[0]}'?" if near else f"name {_SOURCES}"
        return [f"there is no file or folder '{path}': {fix}"]
    if not path.is_dir() and not path.is_file():
        return [f"'{path}' is neither a file nor a folder: name {_SOURCES}"]
    return []


def read_stdlib() -> Tokens:
    """Read the Python sources of the standard library, in order of their paths."""
    texts, errors = _read_texts([*stdlib_source().files])
    raise_errors("the standard library", errors)
    return _join(texts)


def read_folder(folder: Path) -> Tokens:
    """Read every text file below `folder`, in order of their paths.

    Any extension counts. Hidden names (`.git`) and binary files (with a NUL byte) are left out.
    """
    paths, errors = files_below(folder)
    texts, more_errors = _read_texts(paths)
    errors += more_errors
    if not texts and not errors:
        errors = [f"'{folder}' contains no text files: name a folder that has some"]
    raise_errors(f"corpus '{folder}'", errors)
    return _join(texts)


def map_text(path: Path) -> Tokens:
    """Map the bytes of one text file into memory: a file of any size opens at once."""
    tokens = _map(path, np.dtype(np.uint8))
    if NUL in tokens[:HEAD_BYTES].tobytes():
        error = "it has a NUL byte, so it is not text: name a text file, or a token file that ends in .bin"
        raise_errors(f"corpus '{path}'", [error])
    return tokens


def map_token_file(path: Path, dtype: str) -> Tokens:
    """Map the token ids of a `.bin` file into memory: little-endian integers and nothing else."""
    return _map(path, np.dtype(dtype).newbyteorder("<"))


def _map(path: Path, dtype: np.dtype[Any]) -> Tokens:
    try:
        size, errors = path.stat().st_size, []
        if size == 0:  # cannot be mapped
            errors.append("the file is empty: name a file with text or tokens in it")
        elif size % dtype.itemsize:
            errors.append(
                f"{size} bytes are not a multiple of {dtype.itemsize}, the size of one {dtype.name} token: "
                "give the dtype that the file was written with, or write the file again"
            )
        raise_errors(f"corpus '{path}'", errors)
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UserError(f"1 error in corpus '{path}':", [unreadable(path, error)]) from error


def _read_texts(paths: list[Path]) -> tuple[list[bytes], list[str]]:
    """Read the text files among `paths`; and an error for each file that cannot be read."""
    texts: list[bytes] = []
    errors: list[str] = []
    for path in paths:
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            errors.append(unreadable(path, error))
    return [text for text in texts if text and NUL not in text], errors


def _join(texts: list[bytes]) -> Tokens:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)
