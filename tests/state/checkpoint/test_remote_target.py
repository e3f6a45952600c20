"""The objects of a checkpoint under a URL: which are written, listed and removed."""

import io
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.remote_target import RemoteFile, remote_names, remote_sizes
from echelon.state.checkpoint.target import target_at
from tests.state.checkpoint.test_remote import objects


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/a"


def test_an_object_that_is_not_finished_is_dropped() -> None:
    class File:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def write(self, data: memoryview) -> None:
            self.calls.append(f"write {bytes(data)!r}")

        def close(self) -> None:
            self.calls.append("close")

        def discard(self) -> None:
            self.calls.append("discard")
            raise RuntimeError("of a package")

    for is_finished, expected in ((True, ["write b'ab'", "close"]), (False, ["write b'ab'", "discard"])):
        file = File()
        sink = RemoteFile(file)
        sink.write(memoryview(b"abc"), 2)
        if is_finished:
            sink.finish()
        sink.close()
        assert file.calls == expected
    RemoteFile(io.BytesIO()).close()  # of a storage that cannot


def test_what_is_under_a_url(url: str) -> None:
    memory = fsspec.filesystem("memory")
    assert remote_sizes(memory, url) == {}
    memory.pipe_file(f"{url}/y", b"123")
    memory.pipe_file(f"{url}/x", b"")
    assert remote_sizes(memory, url) == {"x": 0, "y": 3}
    assert remote_names(memory, url) == ["x", "y"]
    listed = SimpleNamespace(ls=lambda *_, **__: [{"name": "x/run/"}, {"name": ""}, {"name": "x/run/c/"}])
    assert remote_sizes(listed, "x/run") == {"c": None}, (
        "a storage lists the folder itself too, without a size"
    )


@pytest.mark.parametrize("name", ["rank-1.txt", "other.safetensors", "report.json"])
def test_objects_that_no_save_has_written(url: str, name: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/{name}", b"")
    with pytest.raises(UserError, match=f"no checkpoint of echelon's: {name}"):
        target_at(url, "0123abcd").begin()


@pytest.mark.parametrize(
    ("there", "is_kept"), [(b"mine", True), (b"another", False), (None, False), (OSError("503"), True)]
)
def test_a_save_is_removed_only_if_it_is_surely_not_there(
    url: str, there: bytes | Exception | None, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, target = fsspec.filesystem("memory"), target_at(url, "0123abcd")
    file = f"{url}/{target.stored_name('rank-00000.safetensors')}"
    assert file.endswith("/rank-00000-0123abcd.safetensors")
    memory.pipe_file(file, b"")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("timed out")))
        with pytest.raises(OSError, match="timed out"):
            target.commit(b"mine", {})
    if isinstance(there, bytes):
        memory.pipe_file(f"{url}/manifest.json", there)
    if isinstance(there, Exception):
        monkeypatch.setattr(type(memory), "cat_file", lambda *_: (_ for _ in ()).throw(there))
    target.abandon()
    assert memory.exists(file) is is_kept


def test_what_is_saved_is_not_removed_and_what_was_never_written_is(url: str) -> None:
    memory, target = fsspec.filesystem("memory"), target_at(url, "0123abcd")
    memory.pipe_file(f"{url}/rank-00000-0123abcd.safetensors", b"")
    memory.pipe_file(f"{url}/rank-00000-89abcdef.safetensors", b"")
    target.abandon()
    assert objects(url) == ["rank-00000-89abcdef.safetensors"]
    target.commit(b"mine", {"rank-00000-89abcdef.safetensors": FileRecord(0, "")})
    memory.pipe_file(f"{url}/rank-00001-0123abcd.safetensors", b"")
    target.abandon()
    assert len(objects(url)) == 3
    target.clean_up()
    assert objects(url) == ["manifest.json", "rank-00000-89abcdef.safetensors"]
