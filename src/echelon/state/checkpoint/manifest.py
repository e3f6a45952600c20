"""The manifest of a checkpoint: its contents as plain data, and as the bytes of manifest.json.

{"format": "echelon-checkpoint", "version": 2, "sha256": "…",
"step": 100, "plan": "data=2 zero=1", "ranks": 2, "saved": "…", "versions": {"echelon": …, "torch": …},
"tensors": {"blocks.0.weight": {"value": {"shape": [8, 4], "dtype": "float32", "pieces": [
      {"file": "rank-00000.safetensors", "tensor": "blocks.0.weight/value@0,0",
       "offsets": [0, 0], "sizes": [4, 4]}, …]},
    "exp_avg": …}},
"numbers": {"begun steps": 100, "loss scale": 65536.0, …},
"state_numbers": {"blocks.0.weight": {"step": 100}},
"groups": [{"lr": 0.003, …, "parameters": ["blocks.0.weight", …]}],
"extra": {…},
"files": {"rank-00000.safetensors": {"bytes": 1234, "hash": "…"}}}

The first line has the hash of all others, so every changed byte is found, also in the manifest itself. The
file may come from a stranger: reading it raises a UserError and nothing else, and limits its size, nesting
and numbers.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from echelon.errors import UserError
from echelon.state.bounded_json import parse_json, paused_collector
from echelon.state.checkpoint.manifest_reader import PlacedTensor, Reader, check_pieces, inside, shown

MANIFEST = "manifest.json"
FORMAT, VERSION = "echelon-checkpoint", 2  # 1: hashes of CRC-32

MOST_BYTES = 2**27
MOST_VALUES = 2**23  # some 900,000 pieces of tensors
_MOST_DIGITS = 20  # of an integer: all that 64 bits hold
_HEAD = re.compile(rb'\{"format": "([\w-]{1,40})", "version": (\d{1,9}), "sha256": "([0-9a-f]{64})",')

Shape = tuple[int, ...]
Number = bool | int | float


class OtherVersionError(UserError):
    """The manifest is of another version: the checkpoint may be whole, for another echelon."""


@dataclass(frozen=True)
class PieceRecord:
    """A box of a tensor, and the name under which a file has it."""

    file: str
    tensor: str
    offsets: Shape
    sizes: Shape


@dataclass(frozen=True)
class TensorRecord:
    """One part (value, master, or a key of the optimizer's state) of a named tensor."""

    shape: Shape
    dtype: str
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True)
class FileRecord:
    """The size and the hash (`FileHash`) that a file must have."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `numbers` are the engine's own, `state_numbers` those of the optimizer's
    state that are no tensors, `groups` its options, and `extra` is the user's."""

    step: int
    plan: str
    ranks: int
    saved: str
    versions: dict[str, str]
    tensors: dict[str, dict[str, TensorRecord]] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    state_numbers: dict[str, dict[str, Number]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        return to_bytes(dataclasses.asdict(self))

    def as_readable_bytes(self, *, is_whole: bool = True) -> bytes:
        """Return the contents of manifest.json, read back once: a UserError for what could not be loaded."""
        try:
            data = self.as_bytes()
            if len(data) > MOST_BYTES:
                raise UserError(f"has {len(data)} bytes; a manifest has {MOST_BYTES} at most")
            Manifest.from_bytes(data, is_whole=is_whole)
        except RecursionError:
            raise UserError("the checkpoint could not be loaded: `extra` has too many brackets") from None
        except UserError as error:
            raise UserError(
                f"the checkpoint could not be loaded, and is not saved: {MANIFEST}: {error.title} (`extra` "
                "must be plain data: integers of 64 bits, no key twice, at most 32 nested brackets)",
                error.errors,
            ) from error
        return data

    @classmethod
    def from_bytes(cls, data: bytes, *, is_whole: bool = True) -> "Manifest":
        """Read the contents of manifest.json. A changed byte is a UserError, which does not name the file.

        `is_whole=False`: the manifest of one rank's file, which has parts of tensors.
        """
        with paused_collector():
            return cls.from_entries(from_bytes(data), is_whole=is_whole)

    @classmethod
    def from_entries(cls, entries: dict[str, Any], *, is_whole: bool = True) -> "Manifest":
        reader = Reader()
        names = tuple(each.name for each in dataclasses.fields(cls))
        given = reader.fields(entries, "the manifest", names)
        manifest = cls(**{name: _READ[name](reader, given[name], name) for name in names})
        reader.finish()
        file_bytes = {name: file.bytes for name, file in manifest.files.items()}
        check_pieces(reader, list(manifest._placed()), file_bytes, is_whole=is_whole)
        reader.finish()
        return manifest

    def _placed(self) -> Iterator[PlacedTensor]:
        for name, parts in self.tensors.items():
            for part, record in parts.items():
                pieces = [(p.file, p.tensor, p.offsets, p.sizes) for p in record.pieces]
                yield inside(inside("tensors", name), part), record.shape, record.dtype, pieces


def to_bytes(entries: dict[str, Any]) -> bytes:
    """Write entries as JSON behind the line with their hash; a UserError for what JSON cannot hold."""
    try:
        rest = json.dumps(entries, allow_nan=False)[1:].encode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise UserError(
            f"the manifest cannot be written: {error}; give `extra` plain data with finite numbers"
        ) from error
    digest = hashlib.sha256(rest).hexdigest()
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}",\n'.encode() + rest


def from_bytes(data: bytes) -> dict[str, Any]:
    """Read the entries of manifest.json, whose hash must be right."""
    head, _, rest = data.partition(b"\n")
    matched = _HEAD.fullmatch(head)
    if matched is None or matched[1] != FORMAT.encode():
        raise UserError(f"is damaged, or is not the manifest of a checkpoint (format {FORMAT!r})")
    version = int(matched[2])
    if version != VERSION:
        raise OtherVersionError(
            f"is of version {version}; this echelon reads version {VERSION}; use the one that saved it"
        )
    if hashlib.sha256(rest).hexdigest() != matched[3].decode():
        raise UserError("is damaged: its contents do not match the hash in its first line")
    return parse(b"{" + rest)


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object of finite numbers, in which every key stands once."""
    try:
        value = parse_json(
            data,
            most_bytes=MOST_BYTES,
            most_values=MOST_VALUES,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
            object_pairs_hook=_unique_keys,
        )
    except ValueError as error:  # not UTF-8 or JSON, or too much of it
        raise UserError(f"is not JSON that a checkpoint has: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"must hold a JSON object, holds a {type(value).__name__}")
    return value


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return value


def _tensors(reader: Reader, value: Any, entry: str) -> dict[str, dict[str, TensorRecord]]:
    return reader.entries(
        value, entry, lambda each, place: reader.entries(each, place, partial(_tensor, reader))
    )


def _tensor(reader: Reader, value: Any, entry: str) -> TensorRecord:
    given = reader.fields(value, entry, ("shape", "dtype", "pieces"))
    return TensorRecord(
        reader.shape(given["shape"], f"{entry} shape"),
        reader.dtype(given["dtype"], f"{entry} dtype"),
        tuple(reader.items(given["pieces"], f"{entry} pieces", partial(_piece, reader))),
    )


def _piece(reader: Reader, value: Any, entry: str) -> PieceRecord:
    given = reader.fields(value, entry, ("file", "tensor", "offsets", "sizes"))
    if not isinstance(given["tensor"], str):
        reader.error(entry, f"tensor must be a name, is {shown(given['tensor'])}")
    return PieceRecord(
        reader.file_name(given["file"], entry),
        str(given["tensor"]),
        reader.shape(given["offsets"], f"{entry} offsets"),
        reader.shape(given["sizes"], f"{entry} sizes"),
    )


def _file(reader: Reader, value: Any, entry: str) -> FileRecord:
    given = reader.fields(value, entry, ("bytes", "hash"))
    return FileRecord(
        reader.integer(given["bytes"], f"{entry} bytes"), reader.hash(given["hash"], f"{entry} hash")
    )


def _files(reader: Reader, value: Any, entry: str) -> dict[str, FileRecord]:
    files = reader.entries(value, entry, partial(_file, reader))
    for name in files:
        reader.file_name(name, entry)
    return files


def _state_numbers(reader: Reader, value: Any, entry: str) -> dict[str, dict[str, Number]]:
    return reader.entries(value, entry, lambda each, place: reader.entries(each, place, reader.number))


def _object(reader: Reader, value: Any, entry: str) -> dict[str, Any]:
    return reader.entries(value, entry, reader.plain)


_READ: dict[str, Callable[[Reader, Any, str], Any]] = {
    "step": Reader.integer,
    "plan": Reader.text,
    "ranks": lambda reader, value, entry: reader.integer(value, entry, least=1),
    "saved": Reader.text,
    "versions": lambda reader, value, entry: reader.entries(value, entry, reader.text),
    "tensors": _tensors,
    "numbers": lambda reader, value, entry: reader.entries(value, entry, reader.number),
    "state_numbers": _state_numbers,
    "groups": lambda reader, value, entry: reader.items(value, entry, partial(_object, reader)),
    "extra": _object,
    "files": _files,
}
