"""The manifest of a checkpoint: its contents as plain data, and as JSON.

{
  "format": "echelon-checkpoint", "version": 1,
  "step": 100, "plan": "data=2 zero=1", "ranks": 2, "saved": "…", "versions": {"echelon": …, "torch": …},
  "tensors": {"blocks.0.weight": {"value": {"shape": [8, 4], "dtype": "float32", "pieces": [
      {"file": "rank-00000.safetensors", "tensor": "blocks.0.weight/value@0,0", "offsets": [0, 0],
       "sizes": [4, 4]}, …]},
    "exp_avg": …}},
  "numbers": {"begun steps": 100, "loss scale": 65536.0, …},
  "state_numbers": {"blocks.0.weight": {"step": 100}},
  "groups": [{"lr": 0.003, …, "parameters": ["blocks.0.weight", …]}],
  "extra": {…},
  "files": {"rank-00000.safetensors": {"bytes": 1234, "sha256": "…"}}
}
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from echelon.errors import UserError

FORMAT, VERSION = "echelon-checkpoint", 1
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
    bytes: int
    sha256: str


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

    @classmethod
    def from_json(cls, value: Any) -> "Manifest":
        """The manifest that `as_json` has made. Anything else is a UserError."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError(f"is not the manifest of a checkpoint: its format must be {FORMAT!r}")
        given = {name: entry for name, entry in value.items() if name not in ("format", "version")}
        given["tensors"] = {
            name: {part: _tensor(entry) for part, entry in parts.items()}
            for name, parts in given["tensors"].items()
        }
        given["files"] = {name: FileRecord(**entry) for name, entry in given["files"].items()}
        return cls(**given)


def _tensor(entry: dict[str, Any]) -> TensorRecord:
    pieces = tuple(
        PieceRecord(p["file"], p["tensor"], tuple(p["offsets"]), tuple(p["sizes"])) for p in entry["pieces"]
    )
    return TensorRecord(tuple(entry["shape"]), entry["dtype"], pieces)
