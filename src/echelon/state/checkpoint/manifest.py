"""The manifest of a checkpoint: its contents as plain data, and as JSON.

{
  "format": "echelon-checkpoint", "version": 2, "sha256": "…",
  "step": 100, "plan": "data=2 zero=1", "ranks": 2, "saved": "…", "versions": {"echelon": …, "torch": …},
  "tensors": {"blocks.0.weight": {"value": {"shape": [8, 4], "dtype": "float32", "pieces": [
      {"file": "rank-00000.safetensors", "tensor": "blocks.0.weight/value@0,0",
       "offsets": [0, 0], "sizes": [4, 4]}, …]},
    "exp_avg": …}},
  "numbers": {"begun steps": 100, "loss scale": 65536.0, …},
  "state_numbers": {"blocks.0.weight": {"step": 100}},
  "groups": [{"lr": 0.003, …, "parameters": ["blocks.0.weight", …]}],
  "extra": {…},
  "files": {"rank-00000.safetensors": {"bytes": 1234, "hash": "…"}}
}
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from echelon.errors import UserError
from echelon.state.bounded_json import paused_collector
from echelon.state.checkpoint.manifest_reader import PlacedTensor, Reader, check_pieces, inside, shown
from echelon.state.checkpoint.manifest_text import (
    FORMAT,
    MOST_BYTES,
    VERSION,
    check_version,
    from_bytes,
    to_bytes,
)

MANIFEST = "manifest.json"

Shape = tuple[int, ...]
Number = bool | int | float


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
    """What a file must be: its size, and its hash (file_hash.py)."""

    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `numbers` are the engine's own, `state_numbers` those of the optimizer's state
    that are no tensors, `groups` its options, and `extra` is the user's."""

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

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}

    def as_bytes(self) -> bytes:
        """As the file manifest.json."""
        return to_bytes(dataclasses.asdict(self))

    def as_readable_bytes(self, *, is_whole: bool = True) -> bytes:
        """As the file manifest.json, which has been read again: a UserError for what nobody could load."""
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
        """The manifest in a file, of which every byte must be as it was written. Else a UserError.

        `is_whole=False`: that of one rank's file, which has parts of tensors.
        """
        with paused_collector():
            entries = {"format": FORMAT, "version": VERSION, **from_bytes(data)}
            return cls.from_json(entries, is_whole=is_whole)

    @classmethod
    def from_json(cls, value: Any, *, is_whole: bool = True) -> "Manifest":
        """The manifest that `as_json` has made. Anything else is a UserError, without the file's name."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError(f"is not the manifest of a checkpoint: its format must be {FORMAT!r}")
        check_version(value.get("version"))
        reader = Reader()
        names = tuple(each.name for each in dataclasses.fields(cls))
        given = reader.fields(value, "the manifest", ("format", "version", *names))
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


def _tensors(reader: Reader, value: Any, entry: str) -> dict[str, dict[str, TensorRecord]]:
    def parts(each: Any, place: str) -> dict[str, TensorRecord]:
        return reader.entries(each, place, partial(_tensor, reader))

    return reader.entries(value, entry, parts)


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
