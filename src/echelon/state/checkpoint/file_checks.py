"""Whether the files of a checkpoint are those that its manifest lists: their sizes, hashes and headers."""

import os
from collections.abc import Mapping
from pathlib import Path

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.file_hash import hash_file
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.manifest_reader import shown
from echelon.state.checkpoint.regular_file import no_links, open_regular
from echelon.state.weight_files.layout import Described
from echelon.state.weight_files.tensor_file import StoredTensor, read_header


def check_size(path: Path, record: FileRecord) -> None:
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
    if found != record.bytes:
        raise DamagedError(f"{path}: is damaged: it has {found} bytes, and the manifest says {record.bytes}")


def check_hash(path: Path, record: FileRecord) -> None:
    with open_regular(path) as file:
        found = hash_file(file)
    if found != record.hash:
        raise DamagedError(
            f"{path}: is damaged: its hash is {found[:16]}…, and the manifest says {record.hash[:16]}…"
        )


def checked_header(path: Path, expected: Mapping[str, Described]) -> dict[str, StoredTensor]:
    """The header of a file, which must hold exactly the tensors that the manifest says, in their shapes and
    types."""
    try:
        header = read_header(path, opener=no_links)
    except UserError as error:
        kind = UserError if isinstance(error.__cause__, OSError) else DamagedError  # a disk may recover
        raise kind(error.title, error.errors) from error
    for name in {**expected, **header}:
        found, wanted = _described(header.get(name)), _described(expected.get(name))
        if found != wanted:
            raise DamagedError(f"{path}: holds {found} as {shown(name)}, and the manifest says {wanted}")
    return header


def share_files(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """By rank, the files that it verifies: every file once, and about as many bytes as the others."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = taken.index(min(taken))
        taken[rank] += sizes[name]
        shares[rank].append(name)
    return shares


def _described(tensor: Described | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
