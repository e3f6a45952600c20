"""A folder of torch.distributed.checkpoint (DCP): read as FSDP2, torchtitan and others write it; written.

    .metadata       a pickle file: shape, type and chunks of each tensor, and where the bytes of a chunk are
    __0_0.distcp    the chunks of rank 0, one behind the other, each as torch.save writes a tensor

A tensor is put together from its chunks, whatever ranks wrote them. Of an optimizer whose state is by names
(torch's get_state_dict) there are

    optimizer.state.NAME.exp_avg             a tensor
    optimizer.param_groups.0.lr              plain values, as torch.save writes them; .params lists names
    optimizer.param_groups.NAME.lr           with flatten_optimizer_state_dict

`write_dcp` writes one for other programs, which torch.distributed.checkpoint.load reads.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.errors import UserError, raise_errors
from echelon.state.weight_files.foreign.restricted_pickle import Inert, load_pickle, load_torch
from echelon.state.weight_files.foreign.tensors import (
    PARAMETERS,
    STEP,
    ForeignOptimizer,
    ForeignTensors,
    as_step,
    plain_options,
)
from echelon.state.weight_files.tensor_file import TensorEntry, report_os_errors

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint."
_STATE = re.compile(r"((?:\w+\.)?optim\w*\.|)state\.(.+)\.(\w+)")
_OPTION = re.compile(r"((?:\w+\.)?optim\w*\.|)param_groups\.(.+)\.(\w+)")
_TENSOR, _BYTES = f"{_CLASSES}metadata.TensorStorageMetadata", f"{_CLASSES}metadata.BytesStorageMetadata"


class _Chunk(NamedTuple):
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


def open_dcp(folder: Path) -> ForeignTensors:
    """Read what a folder holds; no tensor yet. Raises one UserError with all errors."""
    metadata = load_pickle(folder / METADATA)
    described = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise UserError(f"{folder / METADATA}: is not the metadata of torch.distributed.checkpoint")
    where = {(key.fqn, _numbers(getattr(key, "offset", ()))): value for key, value in places.items()}
    stored, errors, skipped = {}, list[str](), list[str]()
    for name, about in described.items():
        kind = type(about).name if isinstance(about, Inert) else ""
        if kind == _BYTES:
            skipped.append(str(name))
        elif kind == _TENSOR:
            try:
                stored[str(name)] = _read_entry(folder, str(name), about, where)
            except (AttributeError, TypeError, ValueError, KeyError) as error:
                errors.append(f"{name}: is described wrongly: {error}")
    raise_errors(str(folder), errors)
    shapes = {name: (each.shape, each.dtype) for name, each in stored.items()}
    foreign = ForeignTensors(
        "torch DCP", shapes, lambda name: _read(folder, name, stored[name]), tuple(skipped)
    )
    return foreign._replace(
        optimizer=lambda: _optimizer(foreign, lambda name: _read_plain(folder, name, where))
    )


def _optimizer(foreign: ForeignTensors, read_plain: Callable[[str], Any]) -> ForeignOptimizer:
    found = filter(None, map(_STATE.fullmatch, (*foreign.shapes, *foreign.skipped)))
    stored = {
        (match[2], match[3]): match[0]
        for match in found
        if match[0] in foreign.shapes or match[3] == STEP  # a step may be a plain number
    }
    shapes = {key: foreign.shapes.get(name, ((), torch.float32)) for key, name in stored.items()}

    def read(name: str, part: str) -> Tensor:
        entry = stored[name, part]
        value = foreign.read(entry) if entry in foreign.shapes else read_plain(entry)
        return as_step(value) if part == STEP else value

    groups: dict[str, dict[str, Any]] = {}
    for match in filter(None, map(_OPTION.fullmatch, foreign.skipped)):
        groups.setdefault(match[2], {})[match[3]] = read_plain(match[0])
    return ForeignOptimizer(
        shapes,
        read,
        [
            {**dict(plain_options(group)), PARAMETERS: sorted(map(str, group.get("params", [name])))}
            for name, group in groups.items()
        ],
    )


def _read_plain(folder: Path, name: str, where: Mapping[Any, Any]) -> Any:
    try:
        place = where[name, ()]
        file = _file_of(folder, place)
        data = _bytes_of(file, *_numbers((place.offset, place.length)))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: {name}: is described wrongly: {error}") from None
    return load_torch(data, f"{file} ({name})")


def _read_entry(folder: Path, name: str, about: Inert, where: Mapping[Any, Any]) -> _Stored:
    dtype, shape = about.properties.state[0], _numbers(about.size)  # type: ignore[attr-defined]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of a tensor")
    chunks = []
    for chunk in about.chunks:  # type: ignore[attr-defined]
        offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        place = where[name, offsets]
        file = _file_of(folder, place).name
        begin, length = _numbers((place.offset, place.length))
        chunks.append(_Chunk(offsets, sizes, file, begin, length))
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(shape)
        and all(o + s <= whole for o, s, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        for chunk in chunks
    )
    if not inside or covered != math.prod(shape):
        raise ValueError(f"its {len(chunks)} chunks have {covered} of {math.prod(shape)} values")
    return _Stored(shape, dtype, tuple(chunks))


def _file_of(folder: Path, place: Any) -> Path:
    name = str(place.relative_path)
    if Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"the file {name!a} is not in the folder")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"its bytes are changed by {place.transform_descriptors}")
    return folder / name


def _bytes_of(file: Path, begin: int, length: int) -> io.BytesIO:
    with file.open("rb") as stream:
        stream.seek(begin)
        return io.BytesIO(stream.read(length))


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values or ())
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{values!r} are no sizes")
    return numbers


def _read(folder: Path, name: str, stored: _Stored) -> Tensor:
    out = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        data = _bytes_of(folder / chunk.file, chunk.begin, chunk.length)
        subject = f"{folder / chunk.file} ({name})"
        part = load_torch(data, subject)
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes or part.dtype != stored.dtype:
            raise UserError(f"{subject}: is not the chunk of {list(chunk.sizes)} that {METADATA} names")
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        out[box] = part.detach()
    return out


def write_dcp(folder: str | Path, entries: Sequence[TensorEntry], fetch: Callable[[str], Tensor]) -> None:
    """Write the tensors of entries; `fetch(name)` is called for each in order, and few are in memory."""
    state = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    # A file for each tensor, one after the other: torch keeps those of one file in memory together.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
    with report_os_errors(Path(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        try:
            save(state, storage_writer=writer, planner=_FetchingPlanner(fetch), no_dist=True)
        except CheckpointException as error:  # which hides that of the disk, or of `fetch`
            ((cause, _),) = error.failures.values()
            raise cause from error


@final
class _FetchingPlanner(DefaultSavePlanner):
    """Plans with tensors of the meta device, and fetches each when it is written."""

    def __init__(self, fetch: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._fetch = fetch

    def lookup_object(self, index: Any) -> Tensor:
        return self._fetch(index.fqn)
