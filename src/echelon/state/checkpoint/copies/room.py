"""Whether a RAM disk holds two snapshots of all ranks of its host, and of those whose copies it keeps."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from echelon.errors import UserError
from echelon.quantities import show_bytes
from echelon.state.checkpoint.copies.folder import VARIABLE, MemoryFolder

_GENERATIONS = 2


def num_files(host: str, hosts: Sequence[str], keepers: Sequence[int | None]) -> int:
    """How many ranks have their state in the folder of a host: its own, and those whose copies it keeps."""
    copies = [keeper for keeper in keepers if keeper is not None and hosts[keeper] == host]
    return list(hosts).count(host) + len(copies)


def refuse_small_disk(folder: MemoryFolder, rank_bytes: float, files: int) -> None:
    """Raise if `files` states of at least `rank_bytes` do not fit twice; what is there already is reused."""
    needed = _GENERATIONS * files * rank_bytes
    system = os.statvfs(folder.path)
    free = system.f_bavail * system.f_frsize + _used(folder.path)
    if needed > free:
        raise UserError(
            f"keep='memory': {files} states of {show_bytes(rank_bytes)} are kept twice, which takes "
            f"{show_bytes(needed)}, and {folder.path.parent} has {show_bytes(free)} free; make that RAM disk "
            f"larger (mount -o remount,size=…), remove folders echelon-memory-* there of runs that nobody "
            f"will resume (the file `owner` names the run), set {VARIABLE} to another, or keep=2 for "
            "checkpoints on disk"
        )


def _used(folder: Path) -> int:
    used = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            used += path.lstat().st_size
    return used
