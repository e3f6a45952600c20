"""The files of a Hugging Face folder: config.json, and safetensors in one file or in shards with an index.

`hf_state` knows what the tensors mean, `hf_config` what config.json says. Pickle is never read.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echelon.errors import UserError, raise_errors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{path}: is damaged, or is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder. The single file wins over an index, as in transformers."""
    if (folder / WEIGHTS).exists():
        return _read_shard(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _read_shards(folder, _read_index(folder / INDEX))
    raise UserError(
        f"{folder}: holds neither {WEIGHTS} nor {INDEX}; weights in other formats (pickle among them) are "
        "not read: save the model with safetensors"
    )


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Write one file, or, above `shard_bytes`, shards and their index; remove weights of an earlier save."""
    shards = _cut(tensors, shard_bytes)
    if len(shards) == 1:
        files = {WEIGHTS: shards[0]}
    else:
        files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}
    for name, shard in files.items():
        _write_whole(folder / name, partial(save_file, shard, metadata={"format": "pt"}))
    if len(files) > 1:
        write_json(folder / INDEX, _index(files))
    _remove_stale(folder, {*files, INDEX} if len(files) > 1 else files)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    _write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors (cut short, or damaged?): {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: must hold a 'weight_map' from tensor names to file names")
    # A file name in the index must not lead out of the folder.
    bad = [f for f in weight_map.values() if not isinstance(f, str) or Path(f).name != f]
    raise_errors(str(path), [f"weight_map: {name!r} is not the name of a file beside it" for name in bad])
    return weight_map


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    errors: list[str] = []
    for file in sorted(set(weight_map.values())):
        try:
            shard = _read_shard(folder / file)
        except UserError as error:
            errors.append(error.title)
            continue
        listed = {name for name, place in weight_map.items() if place == file}
        errors += [
            f"{file}: does not hold {name}, which {INDEX} lists" for name in sorted(listed - set(shard))
        ]
        errors += [
            f"{file}: holds {name}, which {INDEX} does not list" for name in sorted(set(shard) - listed)
        ]
        tensors.update(shard)
    raise_errors(f"the shards of {folder}", errors)
    return tensors


def _cut(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Fill shards in order; a tensor larger than a shard has one to itself."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _index(files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(t.nbytes for shard in files.values() for t in shard.values())},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name first: a file with its final name is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _remove_stale(folder: Path, written: Iterable[str]) -> None:
    weight_files = (p for p in folder.iterdir() if p.name in (WEIGHTS, INDEX) or _SHARD.fullmatch(p.name))
    for path in weight_files:
        if path.name not in written:
            path.unlink()
