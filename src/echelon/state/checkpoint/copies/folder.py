"""The folder of a run's copies on one host, on a RAM disk: memory that outlives the ranks.

It belongs to the process that started them, and goes with its run. What a killed process leaves stays for
--resume, and is removed by a later run of the same user.
"""

import errno
import hashlib
import mmap
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

import torch

from echelon.errors import UserError
from echelon.quantities import show_bytes

DAYS_KEPT = 7  # after the last copy, those of a run that was killed and not resumed
VARIABLE = "ECHELON_MEMORY_FOLDER"
_RAM_DISK = "/dev/shm"
_PREFIX = "echelon-memory-"
_OWNER = "owner"
_NUM_SLOTS = 2
_MANIFEST = re.compile(r"rank-(\d{5,9})\.(\d{8,18}-[0-9a-f]{16})\.json", re.ASCII)


class Entry(NamedTuple):
    """The file of a rank, of one save, which is whole."""

    rank: int
    generation: str
    slot: int


def step_of(generation: str) -> int:
    """step_of("00000100-5d2e0c…") == 100"""
    return int(generation.partition("-")[0])


def generation_of(step: int, token: str) -> str:
    """Name one save: the same step of another attempt has another name."""
    return f"{step:08d}-{token}"


@final
class MemoryFolder:
    """The folder with the copies of a run on this host. `root` is the RAM disk, or another folder."""

    def __init__(self, run: Path, root: Path | None = None) -> None:
        self._run = os.fsencode(run.absolute())
        name = hashlib.sha256(self._run).hexdigest()[:16]
        self.path = (root or memory_root()) / f"{_PREFIX}{os.getuid()}-{name}"

    def make(self, owner: int) -> None:
        """Make it, for this user alone, or take that of an attempt before; `owner` is a process that lives
        as long as the run does on this host."""
        try:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            if not self.is_private():
                raise UserError(
                    f"keep='memory': {self.path} must be a folder of this user, which no other can read; "
                    f"remove it, or set {VARIABLE} to another place"
                )
            for slot in range(_NUM_SLOTS):
                self.slot(slot).mkdir(mode=0o700, exist_ok=True)
            write_small(self.path / _OWNER, f"{_namespace()} {owner} {began(owner)}\n".encode() + self._run)
        except OSError as error:
            raise UserError(
                f"keep='memory': cannot make {self.path}: {error.strerror or error}; set {VARIABLE} to a "
                "folder on a RAM disk (tmpfs) that this user can write to, or keep=2 for checkpoints on disk"
            ) from error

    def is_private(self) -> bool:
        found = self.path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077

    def changed(self) -> float:
        """Return when a copy was last begun or made, in seconds since 1970."""
        slots = (self.slot(slot) for slot in range(_NUM_SLOTS))
        return max((slot.stat().st_mtime for slot in slots if slot.is_dir()), default=0.0)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def slot(self, number: int) -> Path:
        return self.path / f"generation-{number}"

    def file(self, slot: int, rank: int) -> Path:
        return self.slot(slot) / file_name(rank)

    def manifest(self, entry: Entry) -> Path:
        return self.slot(entry.slot) / f"rank-{entry.rank:05d}.{entry.generation}.json"

    def entries(self) -> list[Entry]:
        """List what is whole here, by the names of manifests, which are written last."""
        found = []
        for slot in range(_NUM_SLOTS):
            with suppress(OSError):
                matches = map(_MANIFEST.fullmatch, os.listdir(self.slot(slot)))
                found += [Entry(int(match[1]), match[2], slot) for match in matches if match is not None]
        return found

    def held(self) -> dict[str, list[int]]:
        """Return by generation the ranks whose files are here."""
        held: dict[str, list[int]] = {}
        for entry in self.entries():
            held.setdefault(entry.generation, []).append(entry.rank)
        return held

    def write_manifest(self, entry: Entry, data: bytes) -> None:
        path = self.manifest(entry)
        try:
            write_small(path, data)
        except OSError as error:
            raise UserError(
                f"keep='memory': {path} cannot be written: {error.strerror or error}; keep=2 is for "
                "checkpoints on disk"
            ) from error

    def check_room(self, rank_bytes: float, files: int) -> None:
        """Raise if `files` states of at least `rank_bytes` do not fit twice; what is there is reused."""
        needed = _NUM_SLOTS * files * rank_bytes
        system = os.statvfs(self.path)
        free = system.f_bavail * system.f_frsize + _used(self.path)
        if needed > free:
            raise UserError(
                f"keep='memory': {files} states of {show_bytes(rank_bytes)} are kept twice, which takes "
                f"{show_bytes(needed)}, and {self.path.parent} has {show_bytes(free)} free; make that RAM "
                "disk larger (mount -o remount,size=…), remove folders echelon-memory-* there of runs that "
                f"you will not resume (the file `owner` names the run), set {VARIABLE} to another, or keep=2 "
                "for checkpoints on disk"
            )

    def forget(self, entry: Entry) -> None:
        """Make its file count as not whole. The memory stays, for the next save."""
        self.manifest(entry).unlink(missing_ok=True)

    def free_slot(self, rank: int, kept: str | None) -> int:
        """Return where the next file of a rank goes: not where that of the generation `kept` is."""
        used = {entry.slot for entry in self.entries() if (entry.rank, entry.generation) == (rank, kept)}
        slot = next(slot for slot in range(_NUM_SLOTS) if slot not in used)
        for entry in self.entries():
            if (entry.rank, entry.slot) == (rank, slot):
                self.forget(entry)
        return slot


def newest_step_here(folder: MemoryFolder, ranks: int) -> int:
    """Return the newest step of which a folder has the files of all ranks, or 0."""
    held = folder.held()
    return max((step_of(name) for name, found in held.items() if len(set(found)) >= ranks), default=0)


def forget_all(folder: MemoryFolder) -> None:
    for entry in folder.entries():
        folder.forget(entry)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def memory_root() -> Path:
    root = Path(os.environ.get(VARIABLE) or _RAM_DISK)
    if not root.is_dir():
        raise UserError(
            f"keep='memory': {root} is not a folder; set {VARIABLE} to one on a RAM disk (tmpfs), or keep=2 "
            "for checkpoints on disk"
        )
    return root


def host_name(folder: Path) -> str:
    """Return a text that is the same for ranks that see the same folder, and for no others."""
    # Containers of one machine may have folders of their own: device and inode tell these apart.
    found = folder.stat()
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        machine = socket.gethostname()
    return f"{machine} {found.st_dev} {found.st_ino}"


def write_small(path: Path, data: bytes) -> None:
    """Write a file that is there whole, or not at all. Links are not followed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    part.replace(path)


def remove_dead_folders(
    is_unfinished: Callable[[Path], bool], root: Path | None = None, keep: Path | None = None
) -> None:
    """Remove what runs of this user have left whose process is gone; but the folder `keep`, and for some days
    those of runs that `is_unfinished` says may be resumed."""
    for path in (root or memory_root()).glob(f"{_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            if path == keep or path.lstat().st_uid != os.getuid():
                continue
            process, _, run = (path / _OWNER).read_bytes().partition(b"\n")
            if _is_dead(os.fsdecode(process)) and not _is_needed(path, Path(os.fsdecode(run)), is_unfinished):
                shutil.rmtree(path, ignore_errors=True)


def _is_needed(path: Path, run: Path, is_unfinished: Callable[[Path], bool]) -> bool:
    folder = MemoryFolder(run, path.parent)
    if folder.path != path or not folder.is_private():
        return False
    return time.time() - folder.changed() < DAYS_KEPT * 24 * 3600 and is_unfinished(run)


def _used(folder: Path) -> int:
    used = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            used += path.lstat().st_size
    return used


def _is_dead(owner: str) -> bool:
    # The number of a dead process may be another process's now: the time when it began tells. And each
    # container may have a process 7.
    namespace, pid, when = [*owner.split(" "), "", "", ""][:3]
    return namespace == _namespace() and pid.isdecimal() and began(int(pid)) != when


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return "host"


def began(pid: int) -> str:
    """Return when a process began, as the system counts; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@final
class MappedFile:
    """A file on a RAM disk as a tensor of bytes: to fill the tensor is to write the file.

    A file of the same size is written again: to ask for new memory would cost more.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        try:
            descriptor = _open(path, size)
        except OSError as error:
            reason = f"keep='memory': {path} cannot be written: {error.strerror or error}"
            if error.errno == errno.ENOSPC:
                reason = (
                    f"keep='memory': {path.parent} has no room for the {show_bytes(size)} of {path.name}; "
                    f"make that RAM disk larger (mount -o remount,size=…), set {VARIABLE} to another, or "
                    "keep=2 for checkpoints on disk"
                )
            raise UserError(reason) from error
        try:
            self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)  # the map keeps the file open, and the tensor keeps the map


def _open(path: Path, size: int) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        if os.fstat(descriptor).st_size == size:
            return descriptor
        os.close(descriptor)
        path.unlink()
    except FileNotFoundError:
        pass
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # without it, a full RAM disk would end the process
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor
