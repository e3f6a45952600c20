"""A checkpoint in remote storage (s3://, gs://, …), through fsspec.

Objects have no rename, but one object appears, or is replaced, at once. So files get names that no other save
has used, the manifest is written last and makes the checkpoint whole, and what it does not list is removed:

    s3://bucket/run/step-100/    rank-00000-5f2c91aa.safetensors, …, then manifest.json
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, final

from echelon.errors import UserError
from echelon.state.checkpoint.manifest import MANIFEST, FileRecord
from echelon.state.checkpoint.part_writer import Sink
from echelon.state.checkpoint.target import Report, Target, parse_report

T = TypeVar("T")


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
class RemoteTarget(Target):
    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._fs, self._root = open_remote(url)
        self._manifest = b""  # that which was to be written, and the files that it lists
        self._listed: set[str] = set()
        self._is_committed = False

    def begin(self) -> None:
        names = remote_names(self._fs, self._root)
        strange = [name for name in names if name != MANIFEST and not _is_of_ours(name)]
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
        for name in remote_names(self._fs, self._root):
            if is_removed(name):
                with remote_errors():
                    self._fs.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _report_name(self, rank: int) -> str:
        return f"report-{rank}-{self._token}.json"


def remote_names(fs: Any, root: str) -> list[str]:
    return sorted(remote_sizes(fs, root))


def remote_sizes(fs: Any, root: str) -> dict[str, int | None]:
    """Return the bytes of what is under a path by name; None where the storage does not say how many."""
    with remote_errors():
        try:
            entries = fs.ls(root, detail=True)
        except FileNotFoundError:
            return {}
    sizes = {str(each["name"]).rstrip("/").rpartition("/")[2]: each.get("size") for each in entries}
    return {name: size for name, size in sizes.items() if name and name != root.rpartition("/")[2]}


def _is_of_ours(name: str) -> bool:
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
