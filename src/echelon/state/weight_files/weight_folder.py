"""A Hugging Face folder: the source of a model's weights, any box of any tensor; written file by file.

It has config.json, and safetensors in one file or in shards with an index. Pickle is never read. To write,
config.json is removed first and written last: a folder that has one is complete. The index of an earlier save
is removed first too: it would lead to a mixture of old and new shards.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from echelon.collectives.buffer_layout import portions
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.state.bounded_json import MOST_BYTES, parse_json
from echelon.state.weight_files.layout import Box, WeightLayout, read_pieces
from echelon.state.weight_files.tensor_file import (
    StoredTensor,
    TensorEntry,
    is_text,
    nbytes,
    read_box,
    read_header,
    report_os_errors,
    write_complete,
    write_tensor_file,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_SHARDS = 10_000


def read_json(path: Path) -> dict[str, Any]:
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
    """Read the headers of a folder's files. As in transformers, one file wins over an index."""
    try:
        if (folder / WEIGHTS).exists():
            return FolderHeaders(read_header(folder / WEIGHTS), set(), [])
        if (folder / INDEX).exists():
            return _read_shards(folder, _read_index(folder / INDEX))
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        raise UserError(
            f"{folder}: holds neither {WEIGHTS} nor {INDEX}; weights in other formats (pickle among them) "
            "are not read: save the model with safetensors"
        )
    except UserError as error:
        return FolderHeaders({}, set(), list(error.errors or [error.title]), is_listed=False)


def _read_index(path: Path) -> dict[str, str]:
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


_SAMPLED_BYTES = 2**10
_COMPARED_BYTES = 2**24  # of two tensors that must be equal, at a time


@final
class WeightFolder:
    """The weights of a model in a folder. Opening it reads the headers of its files, and no weight.

    `layout_of(names)` is the layout of the model's files if they have tensors of these names. `config_errors`
    say why the folder's config is not that of the model.
    """

    def __init__(
        self,
        folder: str | Path,
        layout_of: Callable[[Collection[str]], WeightLayout],
        config_errors: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self._config_errors = list(config_errors)
        self._headers = read_headers(self.folder)
        self._layout = layout_of(self._headers.names)

    def errors(self) -> list[str]:
        """List the errors of the files, and of their tensors for this model, from headers.

        Weights are read only where a file holds a tied tensor twice: to compare both.
        """
        headers = self._headers
        if not headers.is_listed:
            return self._config_errors + headers.errors
        errors = (
            self._config_errors + headers.errors + self._layout.errors(headers.tensors, headers.unreadable)
        )
        return errors or [
            f"{name}: differs from {original}, but the model ties them"
            for name, original in self._layout.copies.items()
            if not _is_equal(headers.tensors[name], headers.tensors[original])
        ]

    def check(self) -> None:
        raise_errors(f"Hugging Face folder '{self.folder}'", self.errors())

    def names(self) -> list[str]:
        """List the model's tensors in the files, tied ones once; `read` also takes their other names."""
        return list(self._layout.pieces)

    @property
    def ties(self) -> Collection[str]:
        return self._layout.ties.keys()

    def describe(self) -> Iterator[str]:
        """Describe each tensor of the files in a line, with a digest of how it begins and ends. Ranks compare
        these lines to see whether their copies of a folder are the same."""
        for name, tensor in sorted(self._headers.tensors.items()):
            yield f"{name} of shape {tensor.shape} and type {tensor.dtype} with values {_sample(tensor)}"

    def read(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Read boxes of one of the model's tensors to the CPU, in the type that is stored.

        Only their bytes are read, or whole rows where a box has parts of rows in the file. Nothing beyond the
        boxes is kept.
        """
        if name not in self._layout.pieces and name not in self._layout.ties:
            raise UserError(f"{name}: is not a tensor of this model{did_you_mean(name, self.names())}")
        return [self._read_box(name, box) for box in boxes]

    def _read_box(self, name: str, box: Box) -> Tensor:
        pieces = self._layout.pieces_of(name)
        out = torch.empty(box.sizes, dtype=self._headers.tensors[pieces[0].stored].dtype, device="cpu")
        tensors = self._headers.tensors
        read_pieces(pieces, box, out, lambda stored, window, part: read_box(tensors[stored], window, part))
        return out


def _sample(tensor: StoredTensor) -> str:
    """Return a digest of the first and the last bytes."""
    size, digest = nbytes(tensor.shape, tensor.dtype), hashlib.blake2b(digest_size=8)
    for begin, end in ((0, min(_SAMPLED_BYTES, size)), (max(0, size - _SAMPLED_BYTES), size)):
        digest.update(_read_bytes(tensor, begin, end).numpy().tobytes())
    return digest.hexdigest()


def _is_equal(left: StoredTensor, right: StoredTensor) -> bool:
    """Compare the bits of two tensors, rows by rows: in bounded memory."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    num_bytes = nbytes(left.shape, left.dtype)
    for begin in range(0, num_bytes, _COMPARED_BYTES):
        end = min(begin + _COMPARED_BYTES, num_bytes)
        if not torch.equal(_read_bytes(left, begin, end), _read_bytes(right, begin, end)):
            return False
    return True


def _read_bytes(tensor: StoredTensor, begin: int, end: int) -> Tensor:
    out = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
    size = nbytes(tensor.shape, tensor.dtype)
    read_box(tensor._replace(shape=(size,), dtype=torch.uint8), (slice(begin, end),), out)
    return out


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
