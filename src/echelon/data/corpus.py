"""A corpus: one long row of token ids, and how to open one by name.

Every rank opens the corpus itself, so opening is quick and gives the same tokens everywhere. sources.py reads
the sources; sampler.py says which tokens are in which batch.
"""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.data.sources import Tokens, map_text, map_token_file, read_folder, read_stdlib, unreadable
from echelon.errors import did_you_mean, raise_errors

STDLIB = "stdlib"
TOKEN_FILE_SUFFIX = ".bin"
BYTE_VOCAB = 256
DTYPES = ("uint8", "uint16", "uint32")
_SOURCES = f"a text file, a folder of text files, a {TOKEN_FILE_SUFFIX} token file, or '{STDLIB}'"

# Opening checks this many blocks, spread over the corpus, for ids that are too large.
_PROBE_BLOCKS = 64
_PROBE_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids below `vocab`, in memory or memory-mapped.

    corpus = open_corpus("stdlib", vocab=256)
    corpus.decode(corpus.tokens[:16])
    """

    tokens: Tokens
    vocab: int
    name: str
    decode: Callable[[npt.NDArray[Any]], str] | None = None

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
        """The `length` tokens from each of `starts`, [len(starts), length]; ids are checked."""
        indices = starts[:, None] + np.arange(length)
        ids: npt.NDArray[np.int64] = self.tokens[indices].astype(np.int64)
        raise_errors(f"corpus '{self.name}'", self._id_errors(ids))
        return ids

    def probe(self) -> list[str]:
        """Errors of the ids in a few blocks between the first and the last token: cheap at any size."""
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


def open_corpus(source: str, *, vocab: int, dtype: str | None = None) -> Corpus:
    """Open a corpus by name.

    source: "stdlib", the sources of Python's own standard library as bytes (on every machine);
            a text file, or a folder of text files, as bytes;
            a token file `.bin` of little-endian integers, memory-mapped.
    vocab:  token ids are below it; bytes need at least 256.
    dtype:  of a token file: uint8, uint16 or uint32. If left out, uint16 where vocab fits it, else uint32.
    """
    raise_errors(f"corpus '{source}'", corpus_errors(source, vocab=vocab, dtype=dtype))
    path = _path(source)
    if _is_token_file(path):
        corpus = Corpus(map_token_file(path, dtype or _narrowest(vocab)), vocab, path.name)
    else:
        corpus = Corpus(_read_bytes(source, path), vocab, _name(source, path), decode_bytes)
    raise_errors(f"corpus '{source}'", corpus.probe())
    return corpus


def corpus_errors(source: str, *, vocab: int | None, dtype: str | None) -> list[str]:
    """Every error in the arguments of `open_corpus` that shows without reading; vocab=None is not checked."""
    path = _path(source)
    is_tokens = _is_token_file(path)
    return [
        *_source_errors(source, path),
        *([] if vocab is None else _vocab_errors(vocab, is_tokens)),
        *_dtype_errors(dtype, is_tokens),
    ]


def decode_bytes(tokens: npt.NDArray[Any]) -> str:
    """Bytes back to text; a character that a window splits is shown as U+FFFD."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def _path(source: str) -> Path:
    # os.path, not Path: it does not raise for an unknown user or a missing permission.
    return Path(os.path.expanduser(source))


def _is_token_file(path: Path) -> bool:
    return path.suffix == TOKEN_FILE_SUFFIX and not os.path.isdir(path)


def _read_bytes(source: str, path: Path) -> Tokens:
    if source == STDLIB:
        return read_stdlib()
    return read_folder(path) if path.is_dir() else map_text(path)


def _name(source: str, path: Path) -> str:
    return STDLIB if source == STDLIB else path.resolve().name


def _narrowest(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


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
        return [_missing(path)]
    if not path.is_dir() and not path.is_file():
        return [f"'{path}' is neither a file nor a folder: name {_SOURCES}"]
    return []


def _missing(path: Path) -> str:
    near = difflib.get_close_matches(path.name, [*_names_in(path.parent), STDLIB], n=1)
    fix = f"did you mean '{near[0]}'?" if near else f"name {_SOURCES}"
    return f"there is no file or folder '{path}': {fix}"


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(child.name for child in folder.iterdir())
    except (OSError, ValueError):  # no such folder, or no permission: nothing to suggest
        return []


def _vocab_errors(vocab: int, is_tokens: bool) -> list[str]:
    if is_tokens and vocab < 1:
        return [f"vocab={vocab}: must be at least 1, the number of ids that the tokenizer has"]
    if not is_tokens and vocab < BYTE_VOCAB:
        return [f"vocab={vocab}: text is read as bytes, so it must be at least {BYTE_VOCAB}"]
    return []


def _dtype_errors(dtype: str | None, is_tokens: bool) -> list[str]:
    if dtype is None:
        return []
    if dtype not in DTYPES:
        return [f"dtype '{dtype}' is not known{did_you_mean(dtype, DTYPES)}"]
    if not is_tokens and dtype != "uint8":
        return [f"dtype '{dtype}': text is read as bytes (uint8); leave it out, or name a .bin token file"]
    return []
