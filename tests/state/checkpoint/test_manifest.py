"""Manifests as bytes and back; what a stranger's may not say."""

import dataclasses
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    FileRecord,
    Manifest,
    OtherVersionError,
    parse,
    to_bytes,
)
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import Slice
from tests.state.checkpoint.small import BIAS, FILES, WEIGHT, record_of, small_manifest, write_small

SHA = "0" * 64
Change = Callable[[dict[str, Any]], None]


def plain() -> dict[str, Any]:
    """A valid manifest as JSON has it."""
    manifest = small_manifest({name: FileRecord(500, SHA) for name in FILES})
    value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(manifest)))
    return value


def test_bytes_and_back(tmp_path: Path) -> None:
    manifest = write_small(tmp_path / "a")
    assert Manifest.from_bytes(manifest.as_bytes()) == manifest
    assert Manifest.from_entries(dataclasses.asdict(manifest)) == manifest
    assert json.loads(manifest.as_bytes())["step"] == 3  # any JSON reader can


def test_a_saved_checkpoint_is_read(tmp_path: Path) -> None:
    write_small(tmp_path / "a")
    saved = SavedState.open(tmp_path / "a")
    saved.verify()
    weight, bias = torch.empty(2, 2), torch.empty(3)
    saved.read(Slice("weight", "value", (3, 4), (0, 1), (2, 2)), weight)
    saved.read(Slice("bias", "value", (3,), (0,), (3,)), bias)
    assert torch.equal(weight, WEIGHT[:2, 1:3])
    assert torch.equal(bias, BIAS)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    data = write_small(tmp_path / "a").as_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(UserError):
            Manifest.from_bytes(bytes(flipped))


def _set(*path: Any, value: Any) -> Change:
    def change(entries: dict[str, Any]) -> None:
        table: Any = entries
        for name in path[:-1]:
            table = table[name]
        table[path[-1]] = value

    return change


def _piece(**changes: Any) -> Change:
    def change(entries: dict[str, Any]) -> None:
        entries["tensors"]["weight"]["value"]["pieces"][1].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("step", value=-1), "step: must be an integer, at least 0, is -1"),
        (_set("step", value=2.0), "step: must be an integer"),
        (_set("ranks", value=0), "ranks: must be an integer, at least 1"),
        (_set("plan", value="\x1b[2J"), "plan: must be a line of text, is '\\x1b[2J'"),
        (_set("numbers", "loss scale", value=float("inf")), "numbers loss scale: must be a finite number"),
        (_set("numbers", "begun steps", value=10**30), "numbers begun steps: must be a finite number"),
        (_set("state_numbers", value=[]), "state_numbers: must be an object"),
        (_set("groups", value={}), "groups: must be a list"),
        (_set("surprise", value=1), "the manifest: has an unknown entry surprise"),
        (lambda entries: entries.pop("files"), "the manifest: has no 'files'"),
        (_set("tensors", "bias", "value", "dtype", value="load"), "tensors bias value dtype: must be one of"),
        (_set("tensors", "bias", "value", "shape", value=[-3]), "tensors bias value shape: must be a list"),
        (_set("tensors", "bias", "value", "shape", value=[2**62, 4]), "tensors bias value shape"),
        (_set("tensors", "bias", "value", "shape", value=[10**9]), "tensors bias value: the pieces hold 3"),
        (_piece(file="../../etc/passwd"), "../../etc/passwd is not the name of a file beside the manifest"),
        (_piece(file="/etc/passwd"), "/etc/passwd is not the name"),
        (_piece(file=".."), ".. is not the name"),
        (_piece(file="a.safetensors"), "is in a.safetensors, which 'files' does not list"),
        (_piece(tensor="bias/value"), "has bias/value for two pieces"),
        (_piece(offsets=[2, 0]), "tensors weight value: a piece at [2, 0] of [2, 4] lies outside"),
        (_piece(offsets=[0, 0]), "tensors weight value: its pieces overlap"),
        (_piece(offsets=[0.0, 0]), "tensors weight value pieces [1] offsets: must be a list of integers"),
        (_set("files", FILES[0], "bytes", value=15), f"files {FILES[0]}: has 15 bytes, too few"),
        (_set("files", FILES[0], "hash", value="x"), "hash: must be 64 hexadecimal digits"),
        (_set("files", "../a", value={"bytes": 1, "hash": SHA}), "../a is not the name of a file"),
    ],
)
def test_what_a_manifest_may_not_say(change: Change, words: str) -> None:
    entries = plain()
    Manifest.from_entries(entries)
    change(entries)
    with pytest.raises(UserError) as refusal:
        Manifest.from_entries(entries)
    assert words in str(refusal.value)


def test_all_errors_are_told_at_once() -> None:
    entries = plain()
    entries["step"], entries["ranks"] = None, "2"
    with pytest.raises(UserError) as refusal:
        Manifest.from_entries(entries)
    assert len(refusal.value.errors) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": NaN}', "NaN is not finite"),
        (b'{"a": 1e999}', "1e999 is not finite"),
        (b'{"a": ' + b"1" * 30 + b"}", "an integer of 30 digits"),
        (b'{"a": ' + b"[" * 100_000, "is not JSON that a checkpoint has"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b"[]", "must hold a JSON object"),
        (b"\xff", "is not JSON"),
    ],
)
def test_json_that_no_manifest_has(text: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(text)


def test_extra_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(UserError, match="finite numbers"):
        to_bytes({"extra": {"loss": float("nan")}})


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, MOST_BYTES + 1)
    with pytest.raises(UserError, match=f"{MANIFEST}: has .* bytes; must have"):
        SavedState.open(tmp_path)


def test_a_manifest_of_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list takes 3 bytes in the file and 64 in memory."""
    monkeypatch.setattr("echelon.state.checkpoint.manifest.MOST_VALUES", 1000)
    assert parse(to_bytes({"extra": [[]] * 490}))
    with pytest.raises(UserError, match="values; 1000 are allowed"):
        parse(to_bytes({"extra": [[]] * 510}))


def test_a_long_name_is_not_copied_for_all_that_it_holds() -> None:
    record = {"shape": [0], "dtype": "uint8", "pieces": []}
    entries = plain()
    entries["tensors"]["x" * 100_000] = {str(number): record for number in range(1000)}
    tracemalloc.start()
    try:
        Manifest.from_entries(entries)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000, "100,000 bytes for each of 1,000"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [MANIFEST, FILES[0]])
def test_links_folders_and_pipes_are_not_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a"
    write_small(folder)
    (folder / name).rename(tmp_path / name)
    makers: list[Callable[[Path], object]] = [
        lambda path: path.symlink_to(tmp_path / name),
        Path.mkdir,
        os.mkfifo,
    ]
    for make in makers:
        make(folder / name)
        with pytest.raises(UserError, match=f"{name}: cannot be read: is (a link|not a regular file)"):
            SavedState.open(folder)
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def change_entry(entries: dict[str, Any]) -> None:
    entries["tensors"]["bias"]["value"]["dtype"] = "int32"


def rename_tensor(entries: dict[str, Any]) -> None:
    entries["tensors"]["bias"]["value"]["pieces"][0]["tensor"] = "other"


def drop_tensor(entries: dict[str, Any]) -> None:
    del entries["tensors"]["bias"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_entry, "holds torch.float32 [3] as bias/value, and the manifest says torch.int32 [3]"),
        (rename_tensor, "holds nothing as other, and the manifest says torch.float32 [3]"),
        (drop_tensor, "holds torch.float32 [3] as bias/value, and the manifest says nothing"),
    ],
)
def test_a_header_that_differs_from_the_manifest_is_found_before_anything_is_read(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """All hashes are right, but the file holds another type, another name, or a tensor more."""
    manifest = write_small(tmp_path / "a")
    entries = json.loads(json.dumps(dataclasses.asdict(manifest)))
    change(entries)
    (tmp_path / "a" / MANIFEST).write_bytes(Manifest.from_entries(entries).as_bytes())
    with pytest.raises(DamagedError, match=re.escape(f"{FILES[1]}: {said}")):
        SavedState.open(tmp_path / "a").verify()
    with pytest.raises(DamagedError, match=re.escape(said)):  # also without hashes
        SavedState.open(tmp_path / "a").read(
            Slice("weight", "value", (3, 4), (1, 0), (1, 4)), torch.empty(1, 4)
        )


def test_a_file_that_is_no_safetensors_is_found_before_anything_is_read(tmp_path: Path) -> None:
    manifest = write_small(tmp_path / "a")
    path = tmp_path / "a" / FILES[1]
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'))
    assert path.read_bytes() != data
    files = {**manifest.files, FILES[1]: record_of(path)}
    (tmp_path / "a" / MANIFEST).write_bytes(small_manifest(files).as_bytes())
    with pytest.raises(DamagedError, match=f"{FILES[1]}: cannot be read as safetensors .*are not where"):
        SavedState.open(tmp_path / "a").verify()


def test_a_part_of_a_manifest_is_refused_unless_it_is_asked_for() -> None:
    entries = plain()
    del entries["tensors"]["weight"]["value"]["pieces"][0]
    part = Manifest.from_entries(entries, is_whole=False)
    assert Manifest.from_bytes(part.as_readable_bytes(is_whole=False), is_whole=False) == part
    for read in (lambda: Manifest.from_entries(entries), lambda: Manifest.from_bytes(part.as_bytes())):
        with pytest.raises(UserError, match="is not the manifest of a whole checkpoint"):
            read()
    with pytest.raises(UserError, match="could not be loaded, and is not saved"):
        part.as_readable_bytes()


def test_a_manifest_is_not_written_longer_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.from_entries(plain())
    size = len(manifest.as_bytes())
    monkeypatch.setattr("echelon.state.checkpoint.manifest.MOST_BYTES", size)
    assert manifest.as_readable_bytes() == manifest.as_bytes()
    monkeypatch.setattr("echelon.state.checkpoint.manifest.MOST_BYTES", size - 1)
    with pytest.raises(UserError, match=f"has {size} bytes; a manifest has {size - 1} at most"):
        manifest.as_readable_bytes()


def test_errors_of_entries_come_before_those_of_pieces() -> None:
    """Entries that are wrong have something harmless in their place, of which nothing should be said."""
    entries = plain()
    entries["tensors"]["bias"]["value"]["shape"] = "x"
    entries["tensors"]["bias"]["value"]["pieces"][0]["tensor"] = 7
    with pytest.raises(UserError) as refusal:
        Manifest.from_entries(entries)
    assert [error.rpartition(": ")[0] for error in refusal.value.errors] == [
        "tensors bias value shape",
        "tensors bias value pieces [0]",
    ]
    assert refusal.value.errors[1].endswith("tensor must be a name, is 7")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"format": "zip", "version": 2, "sha256": "' + b"0" * 64 + b'",\n']
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(UserError, match="is damaged, or is not the manifest of a checkpoint"):
        Manifest.from_bytes(data)


def test_a_manifest_of_another_version_may_be_whole() -> None:
    data = Manifest.from_entries(plain()).as_bytes().replace(b'"version": 2', b'"version": 1', 1)
    with pytest.raises(OtherVersionError, match="is of version 1; this echelon reads version 2"):
        Manifest.from_bytes(data)


def test_the_longest_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(b'{"a": -9223372036854775808, "b": 18446744073709551615}') == {"a": -(2**63), "b": 2**64 - 1}
    with pytest.raises(UserError, match="an integer of 21 digits"):
        parse(b'{"a": 118446744073709551615}')
    with pytest.raises(UserError, match="the key 'b' stands twice"):
        parse(b'{"a": 1, "b": 2, "b": 3, "c": 4}')
    asked = {}
    monkeypatch.setattr(
        "echelon.state.checkpoint.manifest.parse_json", lambda _, **options: asked.update(options) or {}
    )
    parse(b"")
    assert (asked["most_bytes"], asked["most_values"]) == (2**27, 2**23)
