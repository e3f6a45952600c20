"""Files of a checkpoint as files of this machine: where they are, or fetched from remote storage when needed.

A rank fetches the files that it verifies or reads from, and keeps them until the checkpoint is closed.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, final

from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.remote_target import open_remote, remote_errors, remote_names
from echelon.checkpoint.storage_errors import RETRIES, as_folder, is_url, reason_of, with_retries
from echelon.checkpoint.swap import standing
from echelon.errors import DamagedError, UserError


class CheckpointFiles(Protocol):
    """`path` is what messages name."""

    path: Path

    def file(self, name: str) -> Path:
        """Where the file is, on this machine."""


def files_at(path: str | Path) -> CheckpointFiles:
    return FetchedFiles(str(path)) if is_url(path) else FolderFiles(standing(as_folder(path)))


@final
class FolderFiles:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        return self.path / name


@final
class FetchedFiles:
    """Of a URL. They are in a temporary folder, which is removed with this."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._root = open_remote(self._url)
        with report_read_errors(self._url):
            names = with_retries(lambda: remote_names(self._fs, self._root), RETRIES)
        if MANIFEST not in names:
            raise DamagedError(f"{self._url}: has no {MANIFEST}: there is no checkpoint, or not a whole one")
        self.path = Path(tempfile.mkdtemp(prefix="echelon-checkpoint-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def file(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            with report_read_errors(f"{self._url}/{name}"):
                with_retries(lambda: self._fetch(name, path), RETRIES)
        return path

    def _fetch(self, name: str, path: Path) -> None:
        part = path.with_name(f".{name}.part")
        with remote_errors():
            self._fs.get_file(f"{self._root}/{name}", str(part))
        part.rename(path)


@contextmanager
def report_read_errors(place: str) -> Iterator[None]:
    """Errors of reading, as errors of the user."""
    try:
        yield
    except OSError as error:
        kind = DamagedError if isinstance(error, FileNotFoundError) else UserError
        raise kind(
            f"{place}: cannot be read: {reason_of(error)}; was it deleted while it was read?"
        ) from error
