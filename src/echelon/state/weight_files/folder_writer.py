"""A Hugging Face folder, written file by file from tensors that come one after the other.

    write_folder("runs/a/hf", entries, tensors, config)

config.json is removed first and written last: a folder that has one is complete. The index of an earlier save
is removed first too: it would lead to a mixture of old and new shards.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from echelon.collectives.buffer_layout import portions
from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import (
    TensorEntry,
    report_os_errors,
    write_complete,
    write_tensor_file,
)
from echelon.state.weight_files.weight_folder import CONFIG, INDEX, WEIGHTS

SHARD_BYTES = 5 * 10**9

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def write_folder(
    folder: str | Path,
    entries: Sequence[TensorEntry],
    tensors: Iterable[Tensor],
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tensors, as `write_weights` does, and the config."""
    write_weights(folder, entries, tensors, shard_bytes)
    _write_json(Path(folder) / CONFIG, config)


def write_weights(
    folder: str | Path,
    entries: Sequence[TensorEntry],
    tensors: Iterable[Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tensors, one for each entry and in their order; in shards above `shard_bytes`.

    One tensor is in memory at a time, if the iterator keeps none. The config of an earlier save is removed.
    """
    folder = Path(folder)
    files = split_shards(entries, shard_bytes)
    with report_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, INDEX):
            (folder / name).unlink(missing_ok=True)
    remaining = iter(tensors)
    for name, shard in files.items():
        write_tensor_file(folder / name, shard, remaining)
    if next(remaining, None) is not None:
        raise UserError(f"{folder}: more tensors came than the {len(entries)} that were announced")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for shard in files.values() for entry in shard)},
            "weight_map": {entry.name: file for file, shard in files.items() for entry in shard},
        }
        _write_json(folder / INDEX, index)
    with report_os_errors(folder):
        for path in folder.iterdir():
            if (path.name == WEIGHTS or _SHARD.fullmatch(path.name)) and path.name not in files:
                path.unlink()  # of an earlier save


def split_shards(entries: Sequence[TensorEntry], shard_bytes: int) -> dict[str, list[TensorEntry]]:
    """Split tensors over files, filled in order; a tensor larger than a shard has one to itself."""
    shards = list(portions(entries, lambda entry: entry.nbytes, shard_bytes)) or [[]]
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"

    def write(file: BinaryIO) -> None:
        with report_os_errors(path):
            file.write(text.encode())

    write_complete(path, write)
