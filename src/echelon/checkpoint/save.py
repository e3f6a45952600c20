"""Save: every rank writes its part, then rank 0 the manifest, and the folder gets its name.

    .step-100.part/    rank-00000.safetensors, rank-00001.safetensors, …      all ranks, at the same time
                       manifest.json                                          rank 0, when all are done
    step-100/          the same folder, renamed

So a folder with a final name is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.assembly import exchange_slices
from echelon.checkpoint.manifest import MANIFEST, FileRecord, Manifest, Number, PieceRecord, TensorRecord
from echelon.checkpoint.part import share_out
from echelon.collectives import Group
from echelon.launching.byte_collectives import all_gather_bytes
from echelon.launching.group import check_on_every_rank
from echelon.ownership import ENGINE, OwnedSlice, Slice
from echelon.weight_files.tensor_file_writer import TensorEntry, report_os_errors, write_tensor_file


class RankPart(NamedTuple):
    """What one rank has written: entries for the manifest."""

    pieces: list[tuple[Slice, str, PieceRecord]]  # with the type
    numbers: dict[str, Number]
    files: dict[str, FileRecord]


def save(
    path: Path, owned: Sequence[OwnedSlice], about: Manifest, group: Group, device: torch.device
) -> None:
    """Write a checkpoint of what all ranks of the group own; all of them must call this.

    `about` has everything but tensors, engine numbers and files.
    """
    written = share_out(exchange_slices(owned, group, device))[group.rank]
    temporary = path.with_name(f".{path.name}.part")
    parts: list[RankPart] = []
    check_on_every_rank(lambda: _make_folder(temporary) if group.rank == 0 else None)
    check_on_every_rank(lambda: parts.append(_write_part(temporary, owned, written, group.rank)))
    reports = _gather(parts[0], group.size)
    check_on_every_rank(
        lambda: _finish(temporary, path, _joined(about, reports)) if group.rank == 0 else None
    )


def _make_folder(folder: Path) -> None:
    with report_os_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _write_part(folder: Path, owned: Sequence[OwnedSlice], written: Sequence[Slice], rank: int) -> RankPart:
    held = {each.slice: each.tensor.detach() for each in owned}
    numbers = {box.part: held[box].item() for box in written if box.name == ENGINE}
    boxes = [box for box in written if box.name != ENGINE]
    name = f"rank-{rank:05d}.safetensors"
    entries = [TensorEntry(_stored_name(box), box.sizes, held[box].dtype) for box in boxes]
    if not entries:
        return RankPart([], numbers, {})
    write_tensor_file(folder / name, entries, (held[box].cpu() for box in boxes))
    data = (folder / name).read_bytes()
    pieces = [
        (
            box,
            str(held[box].dtype).removeprefix("torch."),
            PieceRecord(name, entry.name, box.offsets, box.sizes),
        )
        for box, entry in zip(boxes, entries, strict=True)
    ]
    return RankPart(pieces, numbers, {name: FileRecord(len(data), hashlib.sha256(data).hexdigest())})


def _stored_name(box: Slice) -> str:
    place = "" if box.is_whole else "@" + ",".join(map(str, box.offsets))
    return f"{box.name}/{box.part}{place}"


def _gather(part: RankPart, ranks: int) -> list[RankPart]:
    """The parts of all ranks, in rank order."""
    plain = {
        "pieces": [(*box, dtype, asdict(record)) for box, dtype, record in part.pieces],
        "numbers": part.numbers,
        "files": {name: asdict(record) for name, record in part.files.items()},
    }
    data = json.dumps(plain).encode()
    return [_read(json.loads(each)) for each in (all_gather_bytes(data) if ranks > 1 else [data])]


def _read(plain: dict[str, Any]) -> RankPart:
    pieces = [
        (
            Slice(name, part, tuple(shape), tuple(offsets), tuple(sizes)),
            dtype,
            PieceRecord(record["file"], record["tensor"], tuple(record["offsets"]), tuple(record["sizes"])),
        )
        for name, part, shape, offsets, sizes, dtype, record in plain["pieces"]
    ]
    files = {name: FileRecord(**record) for name, record in plain["files"].items()}
    return RankPart(pieces, plain["numbers"], files)


def _joined(about: Manifest, parts: Sequence[RankPart]) -> Manifest:
    tensors: dict[str, dict[str, TensorRecord]] = {}
    numbers: dict[str, Number] = {}
    files: dict[str, FileRecord] = {}
    for part in parts:
        numbers |= part.numbers
        files |= part.files
        for box, dtype, record in part.pieces:
            of_name = tensors.setdefault(box.name, {})
            known = of_name.get(box.part, TensorRecord(box.shape, dtype, ()))
            of_name[box.part] = replace(known, pieces=(*known.pieces, record))
    return replace(about, tensors=tensors, numbers=numbers, files=files)


def _finish(temporary: Path, path: Path, manifest: Manifest) -> None:
    with report_os_errors(path):
        with (temporary / MANIFEST).open("xb") as file:
            file.write(manifest.as_bytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
