"""The files of a Hugging Face folder: config.json, and safetensors in one file or in shards with an index.

`layout` knows what the tensors mean. Pickle is never read.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import UserError, raise_errors
from echelon.state.bounded_json import MOST_BYTES, parse_json
from echelon.state.weight_files.tensor_file import StoredTensor, is_text, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_SHARDS = 10_000


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"{path}: cannot be read: is not a regular file")
        if about.st_size > MOST_BYTES:
            raise UserError(f"{path}: has {about.st_size} bytes; must have {MOST_BYTES} at most")
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError:
        raise
    except ValueError as error:  # not UTF-8, not JSON, or too much of it
        raise UserError(f"{path}: is damaged, or is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


@dataclass(frozen=True)
class FolderHeaders:
    """The tensors of a folder. `unreadable` are those that the index promises in files with errors.

    `is_listed` says whether all names are known: not if the only file, or the index, has errors.
    """

    tensors: dict[str, StoredTensor]
    unreadable: set[str]
    errors: list[str]
    is_listed: bool = True

    @property
    def names(self) -> set[str]:
        return self.unreadable.union(self.tensors)


def read_headers(folder: Path) -> FolderHeaders:
    """What the files of a folder hold, and their errors. As in transformers, one file wins over an index."""
    try:
        if (folder / WEIGHTS).exists():
            return FolderHeaders(read_header(folder / WEIGHTS), set(), [])
        if (folder / INDEX).exists():
            return _read_shards(folder, _read_index(folder / INDEX))
        raise UserError(_reason_no_weights(folder))
    except UserError as error:
        return FolderHeaders({}, set(), list(error.errors or [error.title]), is_listed=False)


def _reason_no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such folder"
    return (
        f"{folder}: holds neither {WEIGHTS} nor {INDEX}; weights in other formats (pickle among them) are "
        "not read: save the model with safetensors"
    )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: must hold a 'weight_map' from tensor names to file names")
    errors = [
        f"{path}: weight_map: {ascii(file)[:200]} is not the name of a file beside it"
        for file in weight_map.values()
        if not _is_file_name(file)
    ]
    errors += [
        f"{path}: weight_map: the name {ascii(name)[:200]} has half a character; must be Unicode text"
        for name in weight_map
        if not is_text(name)
    ]
    raise_errors(str(path), errors)
    return weight_map


def _is_file_name(value: object) -> bool:
    """Whether it does not lead out of the folder."""
    return isinstance(value, str) and is_text(value) and Path(value).name == value


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> FolderHeaders:
    tensors: dict[str, StoredTensor] = {}
    unreadable: set[str] = set()
    errors: list[str] = []
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, set()).add(name)
    if len(names) > _MOST_SHARDS:
        raise UserError(f"{folder / INDEX}: lists {len(names)} files; must list {_MOST_SHARDS} at most")
    for file, listed in sorted(names.items()):
        try:
            shard = read_header(folder / file)
        except UserError as error:
            errors.append(error.title)
            unreadable |= listed
            continue
        missing, unlisted = sorted(listed - shard.keys()), sorted(shard.keys() - listed)
        errors += [f"{file}: does not hold {name}, which {INDEX} lists" for name in missing]
        errors += [f"{file}: holds {name}, which {INDEX} does not list" for name in unlisted]
        unreadable |= set(missing)
        tensors |= {name: tensor for name, tensor in shard.items() if name in listed}
    return FolderHeaders(tensors, unreadable, errors)
