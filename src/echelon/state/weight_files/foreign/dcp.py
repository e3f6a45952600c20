"""A folder of torch.distributed.checkpoint (DCP), as FSDP2, torchtitan and others write it.

    .metadata       a pickle file: shape, type and chunks of each tensor, and where the bytes of a chunk are
    __0_0.distcp    the chunks of rank 0, one behind the other, each as torch.save writes a tensor

A tensor is put together from its chunks, whatever ranks wrote them.
"""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError, raise_errors
from echelon.state.weight_files.foreign.restricted_pickle import Inert, load_pickle, load_torch
from echelon.state.weight_files.foreign.tensors import ForeignTensors

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint."
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
    return ForeignTensors("torch DCP", shapes, lambda name: _read(folder, name, stored[name]), tuple(skipped))


def _read_entry(folder: Path, name: str, about: Inert, where: Mapping[Any, Any]) -> _Stored:
    dtype, shape = about.properties.state[0], _numbers(about.size)  # type: ignore[attr-defined]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of a tensor")
    chunks = []
    for chunk in about.chunks:  # type: ignore[attr-defined]
        offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
        place = where[name, offsets]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"its bytes are changed by {place.transform_descriptors}")
        file = str(place.relative_path)
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"the file {file!a} is not in the folder")
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


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values or ())
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{values!r} are no sizes")
    return numbers


def _read(folder: Path, name: str, stored: _Stored) -> Tensor:
    out = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.begin)
            data = io.BytesIO(file.read(chunk.length))
        subject = f"{folder / chunk.file} ({name})"
        part = load_torch(data, subject)
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.sizes or part.dtype != stored.dtype:
            raise UserError(f"{subject}: is not the chunk of {list(chunk.sizes)} that {METADATA} names")
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        out[box] = part.detach()
    return out
