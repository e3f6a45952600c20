"""The place of a run's checkpoints: a folder, or a URL that fsspec knows. What is in it, by name."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from echelon.state.checkpoint.manifest import MANIFEST
from echelon.state.checkpoint.remote_target import open_remote, remote_errors, remote_names
from echelon.state.checkpoint.storage_errors import as_folder, is_url
from echelon.state.checkpoint.target import (
    remove_checkpoint,
    remove_leftovers,
    remove_small_leftovers,
    write_atomically,
)


class Storage(ABC):
    """A folder of checkpoints and small files."""

    @abstractmethod
    def at(self, name: str) -> str | Path:
        """The path of a checkpoint in it, for engine.save and engine.load."""

    @abstractmethod
    def names(self) -> list[str]:
        """Of all that is in it; none if it is not there."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Make or replace a small file at once."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a checkpoint, of which no half is ever seen."""

    @abstractmethod
    def remove_leftovers(self, small: str) -> None:
        """Remove what a job that was killed has left, also of the small file; while nobody writes there."""


def storage_at(path: str | Path) -> Storage:
    return RemoteStorage(str(path)) if is_url(path) else FolderStorage(as_folder(path))


@final
class FolderStorage(Storage):
    def __init__(self, path: Path) -> None:
        self._path = path

    def at(self, name: str) -> Path:
        return self._path / name

    def names(self) -> list[str]:
        return sorted(path.name for path in self._path.iterdir()) if self._path.is_dir() else []

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self._path / name, data)

    def remove(self, name: str) -> None:
        remove_checkpoint(self._path / name)

    def remove_leftovers(self, small: str) -> None:
        remove_leftovers(self._path, fresh_seconds=-math.inf)
        remove_small_leftovers(self._path / small)


@final
class RemoteStorage(Storage):
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_remote(self._url)

    def at(self, name: str) -> str:
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        return remote_names(self._fs, self._root)

    def write(self, name: str, data: bytes) -> None:
        with remote_errors():
            self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """The manifest first: without it there is no checkpoint."""
        with remote_errors():
            folder = f"{self._root}/{name}"
            if self._fs.exists(f"{folder}/{MANIFEST}"):
                self._fs.rm_file(f"{folder}/{MANIFEST}")
            self._fs.rm(folder, recursive=True)

    def remove_leftovers(self, small: str) -> None:
        """Nothing: the next save to the same name writes over it."""
