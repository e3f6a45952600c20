"""A small checkpoint without ranks: two files as two ranks would have written them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.state.checkpoint.file_checks import FileHash
from echelon.state.checkpoint.manifest import MANIFEST, FileRecord, Manifest, PieceRecord, TensorRecord
from echelon.state.weight_files.tensor_file import TensorEntry, write_tensor_file

WEIGHT = torch.arange(12.0).reshape(3, 4)
BIAS = torch.arange(3.0)
FILES = ("rank-00000.safetensors", "rank-00001.safetensors")


def hash_bytes(data: bytes | bytearray) -> str:
    found = FileHash()
    found.update(memoryview(data))
    return found.hexdigest()


def small_manifest(files: dict[str, FileRecord], **changes: Any) -> Manifest:
    """What the files of `write_small` hold, as a manifest says it."""
    first, second = FILES
    weight = (
        PieceRecord(first, "weight/value@0,0", (0, 0), (1, 4)),
        PieceRecord(second, "weight/value@1,0", (1, 0), (2, 4)),
    )
    bias = (PieceRecord(second, "bias/value", (0,), (3,)),)
    entries: dict[str, Any] = {
        "step": 3,
        "plan": "data=2 zero=1",
        "ranks": 2,
        "saved": "2026-11-17T04:00:00+00:00",
        "versions": {"echelon": "0", "torch": "2"},
        "tensors": {
            "weight": {"value": TensorRecord((3, 4), "float32", weight)},
            "bias": {"value": TensorRecord((3,), "float32", bias)},
        },
        "numbers": {"begun steps": 3, "loss scale": 65536.0},
        "state_numbers": {"weight": {"step": 3}},
        "groups": [{"lr": 0.003, "betas": [0.9, 0.95], "fused": None}],
        "extra": {"at": [1, 2]},
        "files": files,
    }
    return Manifest(**{**entries, **changes})


def write_small(folder: Path, step: int = 3, add: float = 0.0) -> Manifest:
    """A checkpoint in a new folder; `add` makes other values."""
    folder.mkdir(parents=True)
    parts: tuple[dict[str, Tensor], ...] = (
        {"weight/value@0,0": WEIGHT[:1] + add},
        {"weight/value@1,0": WEIGHT[1:] + add, "bias/value": BIAS + add},
    )
    for name, tensors in zip(FILES, parts, strict=True):
        entries = [TensorEntry(key, tuple(t.shape), t.dtype) for key, t in tensors.items()]
        write_tensor_file(folder / name, entries, iter(tensors.values()))
    files = {name: record_of(folder / name) for name in FILES}
    manifest = small_manifest(files, step=step)
    (folder / MANIFEST).write_bytes(manifest.as_bytes())
    return manifest


def record_of(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(len(data), hash_bytes(data))
