"""A checkpoint that exists: any box of any of its tensors can be read, whatever the plan that saved it.

SavedState       all of it; `open_whole` opens it on all ranks, with its hashes compared
SavedParameter   one parameter, as a rank that updates a part of it needs it
numbers_of       the counters of an engine, for another kind of training too
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.agreement import check_on_every_rank, decide_on_rank_0
from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.file_checks import (
    check_hash,
    check_size,
    checked_header,
    no_links,
    read_regular,
    share_files,
)
from echelon.state.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    Manifest,
    Number,
    OtherVersionError,
)
from echelon.state.checkpoint.manifest_reader import DTYPE_NAMES
from echelon.state.checkpoint.storage import CheckpointFiles, files_at, report_read_errors
from echelon.state.ownership import AVERAGE, MASTER, VALUE, OwnedSlice, Slice
from echelon.state.weight_files.layout import Piece, Window, read_pieces, whole
from echelon.state.weight_files.tensor_file import StoredTensor, read_box


class SavedTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@final
class SavedState:
    """The contents of a checkpoint's folder. Tensors are read when they are asked for, by boxes."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest, fingerprint: str = "") -> None:
        self._files, self.manifest, self.fingerprint = files, manifest, fingerprint
        self.path = files.path
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    @classmethod
    def open(cls, path: str | Path) -> "SavedState":
        """Read the manifest, and compare the sizes of files (hashes: `verify`). Errors name the file."""
        files = files_at(path)
        saved = cls(files, *_read_manifest(files.file(MANIFEST, MOST_BYTES)))
        for name, record in saved.manifest.files.items():
            files.check_size(name, record)
        return saved

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare the hashes and headers of files with the manifest; of several ranks, each has its share."""
        sizes = {name: record.bytes for name, record in self.manifest.files.items()}
        for name in share_files(sizes, ranks)[rank]:
            check_hash(self._file(name), self.manifest.files[name])
            self._header(name)

    def _file(self, name: str) -> Path:
        """Return a file of the size in the manifest, on this machine."""
        record = self.manifest.files[name]
        path = self._files.file(name, record.bytes)
        check_size(path, record)
        return path

    def parts(self, name: str) -> dict[str, SavedTensor]:
        """Describe what there is of a tensor: its value, its master, the optimizer's state."""
        records = self.manifest.tensors.get(name, {})
        return {part: SavedTensor(each.shape, DTYPE_NAMES[each.dtype]) for part, each in records.items()}

    def value_part(self, name: str, dtype: torch.dtype) -> str:
        """Return from which part a weight of this type is read: its value, or else the float32 master."""
        parts = self.parts(name)
        return MASTER if MASTER in parts and parts[VALUE].dtype != dtype else VALUE

    def read(self, box: Slice, out: Tensor) -> None:
        """Fill `out`, on any device and of any type, with the box of a tensor."""
        record = self.manifest.tensors[box.name][box.part]
        pieces = [
            Piece("", p.offsets, p.sizes, f"{p.file}/{p.tensor}", (0,) * len(p.sizes)) for p in record.pieces
        ]
        dtype = DTYPE_NAMES[record.dtype]
        is_read_in_place = out.is_cpu and out.dtype == dtype  # else one box in host memory, then a copy
        values = out if is_read_in_place else torch.empty(box.sizes, dtype=dtype)
        read_pieces(pieces, box, values, self._read_stored)
        if not is_read_in_place:
            out.copy_(values)

    def _read_stored(self, stored: str, window: Window, out: Tensor) -> None:
        file, _, name = stored.partition("/")
        with report_read_errors(str(self._files.path / file)):
            read_box(self._header(file)[name], window, out, opener=no_links)

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._headers:
            path = self._file(file)
            self._headers[file] = checked_header(path, self._expected.get(file, {}))
        return self._headers[file]

    @cached_property
    def _expected(self) -> dict[str, dict[str, SavedTensor]]:
        expected: dict[str, dict[str, SavedTensor]] = {}
        for parts in self.manifest.tensors.values():
            for record in parts.values():
                for piece in record.pieces:
                    described = SavedTensor(piece.sizes, DTYPE_NAMES[record.dtype])
                    expected.setdefault(piece.file, {})[piece.tensor] = described
        return expected


def _read_manifest(path: Path) -> tuple[Manifest, str]:
    data = read_regular(path, MOST_BYTES)
    try:
        return Manifest.from_bytes(data), hashlib.sha256(data).hexdigest()
    except UserError as error:
        kind = UserError if isinstance(error, OtherVersionError) else DamagedError
        raise kind(f"{path}: {error.title}", error.errors) from error


@final
class SavedParameter:
    """A parameter in a checkpoint, for a rank that updates a part of it, or all.

    `boxes(tensor)`: a tensor like the local parameter, as boxes of the whole. `state`: the optimizer's too.
    """

    def __init__(
        self,
        saved: SavedState,
        name: str,
        boxes: Callable[[Tensor], Sequence[OwnedSlice]],
        *,
        state: bool = True,
    ) -> None:
        self._saved, self.name, self._boxes = saved, name, boxes
        parts = saved.parts(name)
        self.parts = {part: each for part, each in parts.items() if state or part in KINDS}
        self.numbers = saved.manifest.state_numbers.get(name, {}) if state else {}

    @property
    def state_parts(self) -> list[str]:
        return sorted(self.parts.keys() - KINDS.keys())

    def is_by_element(self, part: str) -> bool:
        """Return whether it has one number for each element of the parameter, or belongs to all of it."""
        return self.parts[part].shape == self.parts[VALUE].shape

    def fill(self, part: str, out: Tensor) -> None:
        """Fill a tensor like the local parameter with this rank's elements of a part; padding is zeros."""
        boxes = self._boxes(out)
        if sum(each.slice.numel for each in boxes) != out.numel():
            out.zero_()
        for each in boxes:
            self._saved.read(each.slice._replace(part=part), each.tensor)

    def whole(self, part: str) -> Tensor:
        saved = self.parts[part]
        out = torch.empty(saved.shape, dtype=saved.dtype)
        origin, sizes = whole(saved.shape)
        self._saved.read(Slice(self.name, part, saved.shape, origin, sizes), out)
        return out

    def has_finer(self, dtype: torch.dtype) -> bool:
        """Return whether a weight of this type lacks bits that are here."""
        return self.parts[self.finest].dtype != dtype

    @property
    def finest(self) -> str:
        """The part with all bits of the weight: its float32 master, if there is one."""
        return MASTER if MASTER in self.parts else VALUE


def open_whole(path: str | Path, *, verify: bool = True) -> SavedState:
    """Open the checkpoint in a folder, with all hashes compared; every rank must call this.

    Each file is hashed by one rank. What any rank finds is raised on all of them. `verify=False`: sizes and
    the manifest only.
    """
    if not dist.is_initialized():
        saved = SavedState.open(path)
        if verify:
            saved.verify()
        return saved
    opened: list[SavedState] = []

    def open_first() -> str:
        opened.append(SavedState.open(path))
        return opened[0].fingerprint

    def compare(expected: str) -> None:
        if not opened:
            opened.append(SavedState.open(path))
        if opened[0].fingerprint != expected:
            raise UserError(
                f"{path}: rank {dist.get_rank()} finds another checkpoint there than rank 0; the folder must "
                "be the same for all ranks, on a shared disk"
            )
        if verify:
            opened[0].verify(dist.get_rank(), dist.get_world_size())

    # Rank 0 first: where there is no checkpoint, one rank says so, and a storage is asked once.
    fingerprint = str(decide_on_rank_0(open_first))
    check_on_every_rank(lambda: compare(fingerprint))
    return opened[0]


# Any other part is of the optimizer; of a name that is no tensor of the model, it is the engine's own.
KINDS = {VALUE: "weights", MASTER: "masters", AVERAGE: "averages"}


def summarize(saved: SavedState) -> dict[str, Any]:
    """Sum up a checkpoint: plan, step, date, versions; bytes of weights, masters and the optimizer; files."""
    manifest = saved.manifest
    sizes: dict[str, Counter[str]] = {}
    dtypes: dict[str, set[str]] = {}
    for parts in manifest.tensors.values():
        for part, record in parts.items():
            kind = KINDS.get(part, "optimizer" if VALUE in parts else "other")
            num_bytes = math.prod(record.shape) * DTYPE_NAMES[record.dtype].itemsize
            sizes.setdefault(kind, Counter()).update(tensors=1, bytes=num_bytes)
            dtypes.setdefault(kind, set()).add(record.dtype)
    return {
        "path": str(saved.path),
        "step": manifest.step,
        "plan": manifest.plan,
        "ranks": manifest.ranks,
        "saved": manifest.saved,
        "versions": manifest.versions,
        "sizes": {kind: {**sizes[kind], "types": sorted(dtypes[kind])} for kind in sizes},
        "optimizer_parts": sorted(
            {p for parts in manifest.tensors.values() if VALUE in parts for p in parts if p not in KINDS}
        ),
        "numbers": manifest.numbers,
        "extra": manifest.extra,
        "files": {name: record.bytes for name, record in manifest.files.items()},
    }


# Where all ranks step together, there is one of each number. Asynchronous workers have numbers of their own:
#
#     begun steps                     sync=all-reduce, …
#     begun steps of worker 1         sync=async, beside `version`: how many updates the server has made

_BEGUN, _STEPS, _SKIPPED, VERSION = "begun steps", "steps", "skipped steps", "version"


def numbers_of(numbers: Mapping[str, Number], worker: int | None, workers: int) -> dict[str, Number]:
    """Return the numbers of all ranks, or of one of `workers` asynchronous workers, by their plain names.

    A worker goes on where it was if there are as many as before. Otherwise all begin at one step: the number
    of updates that were made, or of steps, if that is larger.
    """
    saved = _num_workers(numbers)
    plain = {name: value for name, value in numbers.items() if " of worker " not in name}
    if not saved:
        return {**plain, VERSION: numbers[_BEGUN]}
    if worker is not None and saved == workers:
        return {**plain, **_of_worker(numbers, worker)}
    begun = max([numbers[VERSION], *(numbers[f"{_BEGUN} of worker {each}"] for each in range(saved))])
    return {**plain, **_of_worker(numbers, 0), _BEGUN: begun, _STEPS: begun, _SKIPPED: 0}


def number_errors(numbers: Mapping[str, Number]) -> list[str]:
    """List the numbers that `numbers_of`, or an engine that goes on with its result, would not find."""
    saved = _num_workers(numbers)
    whose = [f" of worker {each}" for each in range(saved)] or [""]
    needed = [f"{name}{each}" for each in whose for name in (_BEGUN, _STEPS)] + ([VERSION] if saved else [])
    needed += [
        name.replace("loss scale", "good steps", 1) for name in numbers if name.startswith("loss scale")
    ]
    return [
        f"numbers: there is no {name!r}, which every engine saves" for name in needed if name not in numbers
    ]


def _num_workers(numbers: Mapping[str, Number]) -> int:
    return sum(name.startswith(f"{_BEGUN} of worker ") for name in numbers)


def _of_worker(numbers: Mapping[str, Number], worker: int) -> dict[str, Number]:
    suffix = f" of worker {worker}"
    return {name.removesuffix(suffix): value for name, value in numbers.items() if name.endswith(suffix)}
