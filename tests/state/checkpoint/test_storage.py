"""Files of a checkpoint under a URL, as files of this machine."""

from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint import storage
from echelon.state.checkpoint.saved import SavedState
from tests.state.checkpoint.saving import new_saver, save, state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/a"


def test_files_are_fetched_to_a_folder_that_goes_with_them(url: str) -> None:
    save(new_saver(), url, state())
    saved = SavedState.open(url)
    folder = saved.path
    saved.verify()
    assert len(list(folder.iterdir())) == 2
    del saved
    assert not folder.exists()


def test_a_file_is_fetched_in_blocks_and_one_byte_too_many_is_seen(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/manifest.json", b"")
    fsspec.filesystem("memory").pipe_file(f"{url}/x", bytes(range(10)))
    monkeypatch.setattr(storage, "_BLOCK_BYTES", 4)
    files = storage.FetchedFiles(url)
    assert files.file("x", 10).read_bytes() == bytes(range(10))
    monkeypatch.setattr(storage.FetchedFiles, "_check_room", lambda *_: None)
    with pytest.raises(DamagedError, match="it has more bytes than 9, the most it can have"):
        storage.FetchedFiles(url).file("x", 9)


def test_a_disk_that_is_just_large_enough(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/manifest.json", b"")
    fsspec.filesystem("memory").pipe_file(f"{url}/x", bytes(10))
    files = storage.FetchedFiles(url)
    for free, is_enough in ((9, False), (10, True)):
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if is_enough:
            assert files.file("x", 10).stat().st_size == 10
        else:
            with pytest.raises(UserError, match=r"has 10 bytes, and the disk of .* has 9 free"):
                files.file("x", 10)


@pytest.mark.parametrize(
    ("error", "kind"), [(FileNotFoundError(2, "gone"), DamagedError), (OSError(5, "broken"), UserError)]
)
def test_what_is_gone_is_damage_and_what_cannot_be_read_may_be_whole(error: OSError, kind: type) -> None:
    said = r"s3://a: cannot be read: (gone|broken)"
    with pytest.raises(UserError, match=said) as caught, storage.report_read_errors("s3://a"):
        raise error
    assert type(caught.value) is kind
