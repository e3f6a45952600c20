"""Checkpoints in a folder, or behind a URL that fsspec knows: what is there by name, and its files.

    FolderStorage, RemoteStorage    the place of a run's checkpoints
    FolderFiles, FetchedFiles       the files of one checkpoint, on this machine: where they are, or fetched

A rank fetches the files that it verifies or reads from, and keeps them until the checkpoint is closed. The
storage, and a manifest there, may be a stranger's: no file is fetched that is larger than the manifest says.
"""

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.atomic import locate, remove_folder, remove_small_leftovers, write_atomically
from echelon.state.checkpoint.file_checks import check_size
from echelon.state.checkpoint.manifest import MANIFEST, FileRecord
from echelon.state.checkpoint.storage_errors import RETRIES, as_folder, is_url, reason_of, with_retries
from echelon.state.checkpoint.target import (
    open_remote,
    remote_errors,
    remote_sizes,
    remove_leftovers,
)

_BLOCK_BYTES = 1 << 24


@final
class FolderStorage:
    """A folder of checkpoints and small files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def at(self, name: str) -> Path:
        """Return the path of a checkpoint in it, for engine.save and engine.load."""
        return self._path / name

    def names(self) -> list[str]:
        return sorted(path.name for path in self._path.iterdir()) if self._path.is_dir() else []

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a small file atomically."""
        write_atomically(self._path / name, data)

    def remove(self, name: str) -> None:
        remove_folder(self._path / name)

    def remove_leftovers(self, small: str) -> None:
        """Remove what a killed job has left, also of the small file; no other job may be writing there."""
        remove_leftovers(self._path, fresh_seconds=-math.inf)
        remove_small_leftovers(self._path / small)


@final
class RemoteStorage:
    """The same behind a URL."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_remote(self._url)

    def at(self, name: str) -> str:
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        return sorted(remote_sizes(self._fs, self._root))

    def write(self, name: str, data: bytes) -> None:
        with remote_errors():
            self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove the manifest first: without it there is no checkpoint."""
        with remote_errors():
            folder = f"{self._root}/{name}"
            if self._fs.exists(f"{folder}/{MANIFEST}"):
                self._fs.rm_file(f"{folder}/{MANIFEST}")
            self._fs.rm(folder, recursive=True)

    def remove_leftovers(self, small: str) -> None:
        """Do nothing: the next save to the same name writes over what is left."""


def storage_at(path: str | Path) -> FolderStorage | RemoteStorage:
    return RemoteStorage(str(path)) if is_url(path) else FolderStorage(as_folder(path))


@final
class FolderFiles:
    """The files of one checkpoint in a folder. Messages name `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_size(self, name: str, record: FileRecord) -> None:
        """Raise if a file is missing, or not of the size in the manifest. Fetches nothing."""
        check_size(self.path / name, record)

    def file(self, name: str, most_bytes: int) -> Path:  # noqa: ARG002 (it is on this machine already)
        """Return where the file is on this machine. One that has more bytes is not fetched."""
        return self.path / name


@final
class FetchedFiles:
    """The files behind a URL, in a temporary folder that is removed with this object."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_remote(self._url)
        with report_read_errors(self._url):
            self._sizes = with_retries(lambda: remote_sizes(self._fs, self._root), RETRIES)
        if MANIFEST not in self._sizes:
            raise DamagedError(f"{self._url}: has no {MANIFEST}: there is no checkpoint, or not a whole one")
        self.path = Path(tempfile.mkdtemp(prefix="echelon-checkpoint-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def check_size(self, name: str, record: FileRecord) -> None:
        if name not in self._sizes:
            raise DamagedError(f"{self._url}/{name}: is not there, and the manifest lists it")
        found = self._sizes[name]
        if found is not None and found != record.bytes:
            raise DamagedError(
                f"{self._url}/{name}: is damaged: it has {found} bytes, and the manifest says {record.bytes}"
            )

    def file(self, name: str, most_bytes: int) -> Path:
        path = self.path / name
        if not path.exists():
            self._check_room(name, most_bytes)
            with report_read_errors(f"{self._url}/{name}"):
                with_retries(lambda: self._fetch(name, path, most_bytes), RETRIES)
        return path

    def _check_room(self, name: str, most_bytes: int) -> None:
        needed, free = self._sizes.get(name) or 0, shutil.disk_usage(self.path).free
        if needed > most_bytes:
            raise self._too_large(name, most_bytes)
        if needed > free:
            raise UserError(
                f"{self._url}/{name}: has {needed} bytes, and the disk of {self.path} has {free} free; make "
                "room there, or set TMPDIR to a folder on a larger disk"
            )

    def _fetch(self, name: str, path: Path, most_bytes: int) -> None:
        part, count = path.with_name(f".{name}.part"), 0
        with remote_errors(), self._fs.open(f"{self._root}/{name}", "rb") as source, part.open("wb") as file:
            while block := source.read(min(_BLOCK_BYTES, most_bytes - count + 1)):
                count += len(block)
                if count > most_bytes:  # also where the storage has named a smaller size, or none
                    raise self._too_large(name, most_bytes)
                file.write(block)
        part.rename(path)  # a fetch that failed half-way leaves no file that `file` would take for whole

    def _too_large(self, name: str, most_bytes: int) -> DamagedError:
        return DamagedError(
            f"{self._url}/{name}: is damaged: it has more bytes than {most_bytes}, the most it can have"
        )


CheckpointFiles = FolderFiles | FetchedFiles


def files_at(path: str | Path) -> CheckpointFiles:
    return FetchedFiles(str(path)) if is_url(path) else FolderFiles(locate(as_folder(path)))


@contextmanager
def report_read_errors(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DamagedError if isinstance(error, FileNotFoundError) else UserError
        raise kind(
            f"{place}: cannot be read: {reason_of(error)}; was it deleted while it was read?"
        ) from error
