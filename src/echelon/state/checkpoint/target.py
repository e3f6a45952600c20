"""The place where a checkpoint is written. In a folder: a temporary one, that gets its name when it is whole.

    runs/a/.step-100.5f2c91aa.part/    rank-00000.safetensors, …, manifest.json; .writing is locked by rank 0
    runs/a/step-100/                   the same folder, renamed

So a folder with a final name is whole. The lock is the kernel's: it is gone with the process that held it.
So the next save can tell a folder that no process writes to any more, and removes it.

In remote storage (s3://, gs://, …, through fsspec) objects have no rename, but one object appears, or is
replaced, at once. So files get names that no other save has used, the manifest is written last and makes the
checkpoint whole, and what it does not list is removed:

    s3://bucket/run/step-100/    rank-00000-5f2c91aa.safetensors, …, then manifest.json
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from echelon.errors import UserError
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint.atomic import (
    PART_SUFFIX,
    new_token,
    remove_standby,
    replace_folder,
    sync_path,
    write_file,
)
from echelon.state.checkpoint.file_checks import no_links, open_regular, read_regular
from echelon.state.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MOST_BYTES,
    MOST_VALUES,
    FileRecord,
    from_bytes,
)
from echelon.state.checkpoint.part_writer import DirectFile, Sink
from echelon.state.checkpoint.storage_errors import as_folder, is_url

_LOCK = ".writing"
_REMOVALS = 20  # tries to remove a folder that another rank still writes into
_FILE = re.compile(r"rank-\d{5,}\.safetensors", re.ASCII)
_FRESH_SECONDS = 60.0  # an empty folder may get its lock the next moment; others are being removed

Report = dict[str, Any]  # the numbers and files of a rank, as JSON


@final
class FolderTarget:
    """One checkpoint that is being written, in a folder of a file system that all ranks share.

    Rank 0 begins and commits; every rank writes files.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = Path(os.path.realpath(path))
        self.temporary = self.path.with_name(f".{self.path.name}.{token}{PART_SUFFIX}")
        self._lock: int | None = None

    def begin(self) -> None:
        """Refuse a place where something else is, and prepare it; on rank 0."""
        check_replaceable(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path.parent)
        self.temporary.mkdir()
        # Held until the checkpoint has its name: `remove_leftovers` of another job asks for this lock.
        self._lock = os.open(self.temporary / _LOCK, os.O_WRONLY | os.O_CREAT, 0o666)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def stored_name(self, name: str) -> str:
        return name

    def create(self, name: str) -> Sink:
        """Make a new file, in the place of one that an earlier try has left."""
        (self.temporary / name).unlink(missing_ok=True)
        return DirectFile(self.temporary / name)

    def report(self, rank: int, report: Report) -> None:
        """Tell rank 0, which asks for it by `find_report`, that a rank is done."""
        write_file(self.temporary / _report_name(rank), json.dumps(report).encode())

    def find_report(self, rank: int) -> Report | None:
        path = self.temporary / _report_name(rank)
        try:
            with open(path, "rb", opener=no_links) as file:  # an OSError may pass
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        return parse_report(data, path)

    def commit(self, manifest: bytes, files: Mapping[str, FileRecord]) -> None:
        """Give it its name, when all files are there; on rank 0. An error says that it has not got it."""
        self._check_shared(files)
        for report in self.temporary.glob(_report_name("*")):  # also where an earlier try has failed here
            report.unlink()
        write_file(self.temporary / MANIFEST, manifest)
        sync_path(self.temporary)  # the names of all files are on the disk before the folder's own
        check_replaceable(self.path)  # again: the writing may have taken long
        replace_folder(self.temporary, self.path)

    def clean_up(self) -> None:
        """Remove what was there for the writing, when it has its name; on rank 0. Can be done again."""
        (self.path / _LOCK).unlink(missing_ok=True)
        sync_path(self.path.parent)
        remove_standby(self.path)
        shutil.rmtree(self.temporary, ignore_errors=True)  # the one that it replaced
        self._unlock()

    def _check_shared(self, files: Mapping[str, FileRecord]) -> None:
        missing = [name for name in files if not (self.temporary / name).is_file()]
        if missing:
            raise UserError(
                f"{self.temporary}: rank 0 does not find {', '.join(missing)}, which other ranks have "
                "written: the folder must be on a disk that all ranks share"
            )

    def abandon(self) -> None:
        """Remove what was written, unless it has got its name: then that is the one which it replaced."""
        for _ in range(_REMOVALS):
            shutil.rmtree(self.temporary, ignore_errors=True)
            if not self.temporary.exists():
                break
            time.sleep(0.05)  # another rank, which is not told yet, has begun a file meanwhile
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def parse_report(data: bytes, place: object) -> Report:
    """Read the report of a rank. Names, sizes and hashes in it are checked as those of the manifest."""
    try:
        report: Any = parse_json(data, most_bytes=MOST_BYTES, most_values=MOST_VALUES)
    except ValueError:
        report = None
    if isinstance(report, dict) and isinstance(report.get("numbers"), dict):
        files = report.get("files")
        if isinstance(files, dict) and all(isinstance(f, list) and len(f) == 2 for f in files.values()):
            return report
    raise UserError(f"{place}: is not what a rank reports of its files; does another program write there?")


def _report_name(rank: int | str) -> str:
    return f"report-{rank}.json"


def check_replaceable(path: Path) -> None:
    """Refuse a path with something else than a checkpoint, or an empty folder."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(
            f"{path}: is a file; give the path of a folder that is not there yet, or a checkpoint"
        )
    if any(path.iterdir()) and not _is_checkpoint(path):
        raise UserError(
            f"{path}: has files that are no checkpoint of echelon's, and would be lost; give the path of a "
            "folder that is not there yet, or of a checkpoint to replace"
        )
    strange = _strange_names(path)
    if strange:
        raise UserError(
            f"{path}: beside a checkpoint it has {', '.join(strange[:3])}, which would be lost when the "
            "checkpoint is replaced; move that elsewhere, or give another path"
        )


def _strange_names(path: Path) -> list[str]:
    """List what is in the folder of a checkpoint and no part of it."""
    names = {each.name for each in path.iterdir()} - {MANIFEST, _LOCK}
    if not names:
        return []
    try:
        listed = from_bytes(read_regular(path / MANIFEST, MOST_BYTES))["files"]
        return sorted(names - set(listed))
    except (UserError, LookupError, TypeError):  # damaged: what a save writes is known by its name
        return sorted(name for name in names if not _FILE.fullmatch(name))


def _is_checkpoint(path: Path) -> bool:
    with suppress(UserError), open_regular(path / MANIFEST) as file:
        return f'"{FORMAT}"'.encode() in file.read(256)
    return False


def remove_leftovers(folder: Path, *, fresh_seconds: float = _FRESH_SECONDS) -> None:
    """Remove the temporary folders of jobs that were killed, and never one that is being written."""
    for path in folder.glob(f".*{PART_SUFFIX}"):
        if path.is_dir() and not path.is_symlink() and _is_left_behind(path, fresh_seconds):
            shutil.rmtree(path, ignore_errors=True)


def _is_left_behind(path: Path, fresh_seconds: float) -> bool:
    try:
        lock = no_links(str(path / _LOCK), os.O_WRONLY)
    except FileNotFoundError:  # not locked yet, or being removed: the lock may go before other files
        with suppress(OSError):
            is_new = not any(path.iterdir()) and time.time() - path.stat().st_mtime < fresh_seconds
            return _is_of_ours(path) and not is_new
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _is_of_ours(path: Path) -> bool:
    """Tell by the name: .NAME.TOKEN.part."""
    token = path.name.removesuffix(PART_SUFFIX).rpartition(".")[2]
    return len(token) == len(new_token()) and all(digit in "0123456789abcdef" for digit in token)


def open_remote(url: str) -> tuple[Any, str]:
    """Open the file system of a URL; returns it, and the path on it."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(
            f"{url}: a URL needs fsspec, and the package of its kind of storage: pip install fsspec (s3fs "
            "for s3://, gcsfs for gs://); or give a folder"
        ) from None
    try:
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: fsspec cannot open this kind of URL: {error}") from error
    return fs, str(root).rstrip("/")


@contextmanager
def remote_errors() -> Iterator[None]:
    """Raise all errors of packages for storage, which are of many kinds, as OSErrors."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}") from error


@final
class RemoteTarget:
    """The same in remote storage."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._fs, self._root = open_remote(url)
        self._manifest = b""  # that which was to be written, and the files that it lists
        self._listed: set[str] = set()
        self._is_committed = False

    def begin(self) -> None:
        names = sorted(remote_sizes(self._fs, self._root))
        strange = [name for name in names if name != MANIFEST and not _is_object_of_ours(name)]
        if strange:
            raise UserError(
                f"{self.url}: has objects that are no checkpoint of echelon's: {', '.join(strange[:3])}; "
                "give a place where nothing is, or a checkpoint to replace"
            )
        with remote_errors():
            self._fs.makedirs(self._root, exist_ok=True)  # for the kinds that have folders

    def stored_name(self, name: str) -> str:
        return name.replace(".safetensors", f"-{self._token}.safetensors")

    def create(self, name: str) -> Sink:
        with remote_errors():
            return RemoteFile(self._fs.open(self._at(name), "wb"))

    def report(self, rank: int, report: Report) -> None:
        with remote_errors():
            self._fs.pipe_file(self._at(self._report_name(rank)), json.dumps(report).encode())

    def find_report(self, rank: int) -> Report | None:
        place = self._at(self._report_name(rank))
        with remote_errors():
            try:
                return parse_report(self._fs.cat_file(place), place)
            except FileNotFoundError:
                return None

    def commit(self, manifest: bytes, files: Mapping[str, FileRecord]) -> None:
        self._manifest, self._listed = manifest, set(files)
        with remote_errors():
            self._fs.pipe_file(self._at(MANIFEST), manifest)
        self._is_committed = True

    def clean_up(self) -> None:
        self._remove(lambda name: name not in self._listed and name != MANIFEST)

    def abandon(self) -> None:
        if not self._may_be_committed():
            self._remove(lambda name: self._token in name)

    def _may_be_committed(self) -> bool:
        """Return whether the manifest is there, or may be: an error of the network may have hidden it."""
        if self._is_committed or not self._manifest:
            return self._is_committed
        try:
            return bool(self._fs.cat_file(self._at(MANIFEST)) == self._manifest)
        except FileNotFoundError:
            return False
        except Exception:  # of any package: it may be there, or not
            return True

    def _remove(self, is_removed: Callable[[str], bool]) -> None:
        for name in sorted(remote_sizes(self._fs, self._root)):
            if is_removed(name):
                with remote_errors():
                    self._fs.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _report_name(self, rank: int) -> str:
        return f"report-{rank}-{self._token}.json"


def remote_sizes(fs: Any, root: str) -> dict[str, int | None]:
    """Return the bytes of what is under a path by name; None where the storage does not say how many."""
    with remote_errors():
        try:
            entries = fs.ls(root, detail=True)
        except FileNotFoundError:
            return {}
    sizes = {str(each["name"]).rstrip("/").rpartition("/")[2]: each.get("size") for each in entries}
    return {name: size for name, size in sizes.items() if name and name != root.rpartition("/")[2]}


def _is_object_of_ours(name: str) -> bool:
    return name.startswith(("rank-", "report-")) and name.endswith((".safetensors", ".json"))


@final
class RemoteFile:
    """An object that is being written; it is there when it is finished."""

    def __init__(self, file: Any) -> None:
        self._file, self._is_finished = file, False

    def write(self, memory: memoryview, count: int) -> None:
        with remote_errors():
            self._file.write(memory[:count])

    def finish(self) -> None:
        with remote_errors():
            self._is_finished = True
            self._file.close()

    def close(self) -> None:
        """Drop what was written, if it is not finished. Its name is of this save alone: it may also stay."""
        if not self._is_finished:
            with suppress(Exception):  # of any package; the error that led here is the one to raise
                getattr(self._file, "discard", lambda: None)()


Target = FolderTarget | RemoteTarget


def target_at(path: str | Path, token: str) -> Target:
    """Make the target of a path. `token` is the same on all ranks, and another one for every save."""
    return RemoteTarget(str(path), token) if is_url(path) else FolderTarget(as_folder(path), token)
