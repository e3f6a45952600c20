"""Saves of one rank: what is written, what is there before and after, and what goes wrong."""

import dataclasses
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.errors import UserError
from echelon.state.checkpoint import assignment, part_writer, storage_errors
from echelon.state.checkpoint import save as save_module
from echelon.state.checkpoint.file_checks import BLOCK_BYTES
from echelon.state.checkpoint.part_writer import DirectFile
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.save import Saver
from echelon.state.checkpoint.target import FolderTarget
from tests.peak_memory import PeakMemory
from tests.state.checkpoint.saving import (
    ABOUT,
    check_saved,
    names,
    new_saver,
    owned,
    save,
    save_and_finish,
    state,
)


@pytest.mark.parametrize("wait", [True, False])
def test_saved_bits_are_those_that_are_loaded(tmp_path: Path, wait: bool) -> None:
    saver, tensors = new_saver(), state()
    save(saver, tmp_path / "a", tensors, wait=wait)
    for tensor in tensors.values():
        tensor.zero_()  # as the next step would
    saver.finish()
    check_saved(tmp_path / "a", state())
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["manifest.json", "rank-00000.safetensors"]


@pytest.mark.parametrize("wait", [True, False])
def test_safetensors_reads_the_file(tmp_path: Path, wait: bool) -> None:
    from safetensors.torch import load_file

    saver = new_saver()
    save(saver, tmp_path / "a", state(), wait=wait)
    saver.finish()
    loaded = load_file(tmp_path / "a" / "rank-00000.safetensors")
    assert {name.removesuffix("/value") for name in loaded} == set(state())
    assert all(torch.equal(loaded[f"{name}/value"], tensor) for name, tensor in state().items())


def test_a_checkpoint_is_replaced_when_the_new_one_is_whole(tmp_path: Path) -> None:
    saver = new_saver()
    save(saver, tmp_path / "a", state(1.0))
    save(saver, tmp_path / "a", state(2.0))
    check_saved(tmp_path / "a", state(2.0))
    assert names(tmp_path) == ["a"]


def test_an_empty_folder_and_a_link_can_be_saved_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for value in (1.0, 2.0):
        save(new_saver(), tmp_path / "link", state(value))
        check_saved(tmp_path / "real", state(value))
    assert (tmp_path / "link").is_symlink()


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.md").write_text("the only copy")
    (tmp_path / "file").write_text("too")
    for name, message in (("thesis", "no checkpoint of echelon's"), ("file", "is a file")):
        with pytest.raises(UserError, match=message):
            save(new_saver(), tmp_path / name, state())
    assert (tmp_path / "thesis" / "text.md").read_text() == "the only copy"
    assert names(tmp_path) == ["file", "thesis"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_files_of_the_users_in_a_checkpoint_are_not_lost(tmp_path: Path, is_damaged: bool) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    if is_damaged:
        with (tmp_path / "a" / "manifest.json").open("ab") as file:
            file.write(b" ")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"a: beside a checkpoint it has notes.txt, which would be lost"):
        save(new_saver(), tmp_path / "a", state(2.0))
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    (tmp_path / "a" / "notes.txt").unlink()
    save(new_saver(), tmp_path / "a", state(2.0))
    check_saved(tmp_path / "a", state(2.0))


def test_files_that_come_while_a_checkpoint_is_written_are_not_lost(tmp_path: Path) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    replaced = FolderTarget(tmp_path / "a", "0123abcd")
    replaced.begin()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes.txt, which would be lost"):
        replaced.commit(b"", {})
    replaced.abandon()
    check_saved(tmp_path / "a", state(1.0))
    assert names(tmp_path) == ["a"]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rng": 2**100}, "an integer of 31 digits"),
        ({1: 2, "1": 3}, "the key '1' stands twice"),
        ({"a": nested(40)}, "more than 32 brackets"),
        ({"a": nested(100_000)}, "too many brackets"),
        ({"a": float("nan")}, "cannot be written"),
        ({"a": {1, 2}}, "not JSON serializable"),
        ({"a": "x" * 200}, "bytes; a manifest has 200 at most"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, extra: dict[Any, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(new_saver(), tmp_path / "a", state(1.0))
    if "200" in message:
        monkeypatch.setattr("echelon.state.checkpoint.manifest.MOST_BYTES", 200)
    about = dataclasses.replace(ABOUT, extra=extra)
    for wait in (True, False):
        with pytest.raises(UserError, match=message):
            new_saver().save(tmp_path / "a", owned(state(2.0)), about, SaveOptions(wait))
    monkeypatch.undo()
    check_saved(tmp_path / "a", state(1.0))
    assert names(tmp_path) == ["a"]


class FailingFile:
    """Takes no byte of a file, so often."""

    code, times = errno.ENOSPC, 1

    def __init__(self, path: Path) -> None:
        self._file = DirectFile(path)

    def write(self, memory: memoryview, count: int) -> None:
        cls = type(self)
        cls.times -= 1
        if cls.times >= 0:
            raise OSError(cls.code, os.strerror(cls.code))
        self._file.write(memory, count)

    def finish(self) -> None:
        self._file.finish()

    def close(self) -> None:
        self._file.close()


def fail(patch: pytest.MonkeyPatch, code: int, times: int) -> None:
    monitored = type("Failing", (FailingFile,), {"code": code, "times": times})
    patch.setattr("echelon.state.checkpoint.target.DirectFile", monitored)
    patch.setattr(storage_errors, "_pause", lambda _: None)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_an_error_with_a_fix_and_the_checkpoint_before_stays(
    tmp_path: Path, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver()
    save(saver, tmp_path / "a", state(1.0))
    fail(monkeypatch, errno.ENOSPC, 1)
    if wait:
        with pytest.raises(UserError, match=r"a: .*No space left on device \(free some space"):
            save(saver, tmp_path / "a", state(2.0))
    else:
        save(saver, tmp_path / "a", state(2.0), wait=False)
        with pytest.raises(UserError, match=r"a: .*No space left on device \(free some space"):
            save(saver, tmp_path / "b", state(2.0))
    check_saved(tmp_path / "a", state(1.0))
    assert names(tmp_path) == ["a"]
    save(saver, tmp_path / "a", state(3.0))  # there is space again
    check_saved(tmp_path / "a", state(3.0))


@pytest.mark.parametrize("wait", [True, False])
def test_a_limit_of_the_kernel_is_an_error(tmp_path: Path, wait: bool) -> None:
    saver, large = new_saver(), {"large": torch.zeros(1 << 18)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large") as caught:
            save_and_finish(saver, tmp_path / "a", large, wait=wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).endswith(
        "(raise the limit of a file's size: ulimit -f unlimited); "
        "checkpoints before it, if any, are as they were"
    )
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"/sys/a: .*\(make the folder writable for this user, or save elsewhe"
    ):
        save(new_saver(), "/sys/a", state())


@pytest.mark.parametrize("wait", [True, False])
def test_errors_that_pass_are_tried_again(
    tmp_path: Path, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, errno.EIO, 2)
    saver = new_saver()
    save(saver, tmp_path / "a", state(), wait=wait, retries=2)
    saver.finish()
    check_saved(tmp_path / "a", state())
    fail(monkeypatch, errno.EIO, 2)
    with pytest.raises(UserError, match="Input/output error"):
        save(saver, tmp_path / "b", state(), retries=1)


def test_a_save_without_wait_is_over_when_then_is_called(tmp_path: Path) -> None:
    saver, seen = new_saver(), []
    save(saver, tmp_path / "a", state(), wait=False, then=lambda: seen.append(names(tmp_path)))
    saver.finish()
    assert seen == [["a"]]


def test_an_error_of_then_is_raised(tmp_path: Path) -> None:
    def then() -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    saver = new_saver()
    save(saver, tmp_path / "a", state(), wait=False, then=then)
    with pytest.raises(UserError, match="Permission denied"):
        saver.finish()
    check_saved(tmp_path / "a", state())


def test_the_memory_of_a_snapshot_is_kept(tmp_path: Path) -> None:
    saver, tensors = new_saver(), {"a": torch.ones(1 << 20)}
    with PeakMemory() as first:
        save(saver, tmp_path / "a", tensors, wait=False)
    with PeakMemory() as second:
        save(saver, tmp_path / "b", tensors, wait=False)
    saver.finish()
    assert first.peak >= 1 << 22
    assert second.peak < 1 << 18


def test_a_save_that_waits_holds_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = BLOCK_BYTES
    monkeypatch.setattr(part_writer, "CHUNK_BYTES", chunk)
    tensors = {f"t{number}": torch.full((1 << 20,), number) for number in range(8)}  # of 8 MiB each
    with PeakMemory() as measured:
        save(new_saver(), tmp_path / "a", tensors)
    assert chunk <= measured.peak <= 4 * chunk
    check_saved(tmp_path / "a", tensors)


def test_who_writes_what_is_exchanged_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    exchange = assignment.exchange_slices

    def counted(owned: Any, *args: Any) -> Any:
        calls.append(len(owned))
        return exchange(owned, *args)

    monkeypatch.setattr(assignment, "exchange_slices", counted)
    saver, less = new_saver(), {"wide": torch.ones(3)}
    for tensors in (state(1.0), state(2.0), less, less, {"wide": torch.ones(3).double()}):
        save(saver, tmp_path / "a", tensors)
        check_saved(tmp_path / "a", tensors)
    assert calls == [7, 2, 2]


def test_types_that_a_file_cannot_have_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a \(value\): is torch.complex128, which safetensors does not have"):
        save(new_saver(), tmp_path / "a", {"a": torch.zeros(2, dtype=torch.complex128)})
    assert names(tmp_path) == []


def test_a_failed_engine_gives_up_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    find = "echelon.state.checkpoint.target.FolderTarget.find_report"
    monkeypatch.setattr(find, lambda *_: go_on.wait(0.01) and None)  # the other ranks are gone
    saver: Saver = new_saver()
    save(saver, tmp_path / "a", state(), wait=False)
    saver.abandon()
    assert names(tmp_path) == []
    saver.finish()


def end_without_finish(folder: Path, *, then: Callable[[], None] | None = None) -> None:
    def wait() -> None:
        time.sleep(0.3)
        if then is not None:
            then()

    saver = new_saver()
    save(saver, folder / "a", state(), wait=False, then=wait)
    saver._end()  # as atexit does
    check_saved(folder / "a", state())


def test_a_save_is_finished_when_the_program_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    end_without_finish(tmp_path, then=lambda: seen.append("whole"))
    assert seen == ["whole"]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_save_that_fails_when_the_program_ends_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_then() -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    end_without_finish(tmp_path, then=fail_then)
    assert "a failed: " in capsys.readouterr().err
    monkeypatch.setattr(save_module, "_EXIT_SECONDS", 0.0)
    saver, go_on = new_saver(), threading.Event()
    save(saver, tmp_path / "b", state(), wait=False, then=lambda: go_on.wait(20) and None)
    saver._end()
    assert "b failed: the program ended before it was written" in capsys.readouterr().err
    go_on.set()


ENDING = """
import sys, time
from tests.state.checkpoint.saving import new_saver, save, state
saver = new_saver()
save(saver, sys.argv[1], state(), wait=False, then=lambda: (time.sleep(0.5), print("whole"))[1])
print("end")
"""


@pytest.mark.slow
def test_a_script_that_ends_without_close_has_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split() == ["end", "whole"]
    check_saved(tmp_path / "a", state())
